"""What you would use instead of our engine, each with the same two verbs: `first` and `run`.

PyTorch as one writes it for speed (16 bits, eager, as a graph, and compiled and as a graph; INT4, compiled and as a
graph), `transformers`, and llama.cpp through `llama-cpp-python`. What is not installed, or has no weights for a model,
says so in one line.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FunctionType, MethodType

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoqwen.bench_engine import WARM
from nanoqwen.bench_gemv import captured
from nanoqwen.bench_int4 import for_torch, torch_int4_mm
from nanoqwen.checkpoint import find_gguf, open_checkpoint
from nanoqwen.config import ModelConfig
from nanoqwen.gguf_convert import open_gguf
from nanoqwen.graphs import CHAIN
from nanoqwen.ledger import Grouped, ledger
from nanoqwen.packing import GROUP_SIZE
from nanoqwen.quantize import quantize
from nanoqwen.reference import Qwen2, rope_tables, rotate
from nanoqwen.timing import synchronize

SPLIT = 256
"""Places of the cache that one product of attention takes: a long cache is many products, side by side."""
TOLERANCE = 0.15
"""Of the logits after a timed run, ‖run − prompt‖ / ‖prompt‖, in bf16."""
INSTALL_LLAMA = 'CMAKE_ARGS="-DGGML_CUDA=on" pip install llama-cpp-python'


class Unavailable(RuntimeError):
    """A peer that cannot run here; the message says why in one line."""


def weights_of(model: Qwen2, dtype: torch.dtype, device: torch.device) -> Callable[[str], Tensor]:
    """A model's weights by their name in a checkpoint, in `dtype` on `device`; those in INT4 dequantised."""

    def weight(name: str) -> Tensor:
        path, _, kind = name.rpartition(".")
        return getattr(model.get_submodule(path), kind).detach().to(device, dtype)

    return weight


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Callable[[str], Tensor]:
    """Weights of this shape, each drawn on the device when it is asked for, as `models.random` has them."""
    generator, shapes = torch.Generator(device).manual_seed(seed), config.weight_shapes()

    def weight(name: str) -> Tensor:
        out = torch.empty(shapes[name], dtype=dtype, device=device)
        return out.fill_(1) if name.endswith("norm.weight") else out.normal_(0, 0.02, generator=generator)

    return weight


def allocated(device: torch.device) -> int:
    """Bytes that PyTorch holds on a GPU; 0 on a CPU, where it does not say."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class TorchDecoder:
    """A decoder as one writes it in PyTorch for speed: matrices joined, a static cache, token and position fed back.

    Args:
        weight: of `weights_of` or `random_weights`; asked once for each name.
        int4: matrices in INT4 in groups of 128 for `aten._weight_int4pack_mm` (rounded to nearest); embedding and head
            stay in 16 bits, as in our engine.
    """

    def __init__(
        self,
        config: ModelConfig,
        weight: Callable[[str], Tensor],
        num_tokens: int | None = None,
        int4: bool = False,
    ):
        self.config, self.int4, self.num_tokens = config, int4, num_tokens or config.vocab_size
        self.embedding = weight("model.embed_tokens.weight")
        self.dtype, self.device = self.embedding.dtype, self.embedding.device

        def matrix(layer: str, *names: str) -> Tensor | tuple[Tensor, Tensor]:
            joined = torch.cat([weight(f"{layer}.{name}_proj.weight") for name in names])
            if not int4:
                return joined
            made = quantize(joined, GROUP_SIZE, "rtn")
            return for_torch(made.values, made.scales)

        self.layers = []
        for layer in (f"model.layers.{i}" for i in range(config.num_hidden_layers)):
            self.layers.append(
                (
                    weight(f"{layer}.input_layernorm.weight"),
                    matrix(f"{layer}.self_attn", "q", "k", "v"),
                    torch.cat([weight(f"{layer}.self_attn.{name}_proj.bias") for name in "qkv"]),
                    matrix(f"{layer}.self_attn", "o"),
                    weight(f"{layer}.post_attention_layernorm.weight"),
                    matrix(f"{layer}.mlp", "gate", "up"),
                    matrix(f"{layer}.mlp", "down"),
                )
            )
        self.norm = weight("model.norm.weight")
        self.head = self.embedding if config.tie_word_embeddings else weight("lm_head.weight")
        self.token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.logits = torch.zeros(config.vocab_size, dtype=self.dtype, device=self.device)
        self.none = torch.zeros(1, config.hidden_size, dtype=self.dtype, device=self.device)
        self.caches: dict[int, tuple[Tensor, ...]] = {}
        tensors = [
            self.norm,
            self.embedding,
            *(each for layer in self.layers for part in layer for each in _parts(part)),
        ]
        self.weight_bytes = sum(each.nbytes for each in tensors)
        self.weight_bytes += 0 if config.tie_word_embeddings else self.head.nbytes

    def cache(self, extent: int) -> tuple[Tensor, ...]:
        """Keys and values (layers, KV heads, extent, D), cos and sin (extent, D), places and tokens made (extent)."""
        if extent not in self.caches:
            config, shape = self.config, (extent, self.config.head_dim)
            shape = (config.num_hidden_layers, config.num_key_value_heads, *shape)
            keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
            places = torch.arange(extent, device=self.device)
            made = torch.full_like(places, -1)
            self.caches[extent] = keys, values, *rope_tables(config, places, self.dtype), places, made
        return self.caches[extent]

    def prefill(self, ids: Sequence[int], extent: int) -> None:
        """Run a prompt, all of it at once; its first new token and the position are left where steps find them."""
        keys, values, cos, sin, places, made = self.cache(extent)
        tokens = torch.tensor(ids, device=self.device)
        positions = places[: len(ids)]
        rope = cos[positions, None], sin[positions, None]
        h, delta = F.embedding(tokens, self.embedding), self.none  # (T, hidden)
        for i, weights in enumerate(self.layers):
            h, delta = self.layer(h, delta, rope, positions, None, keys[i], values[i], weights)
        self.position.fill_(len(ids) - 1)
        self._choose((h + delta)[-1:], made)

    def step(self, extent: int, layer: Callable | None = None) -> None:
        """One token: `token` at `position` becomes the next. It can be captured; `layer` is `self.layer`, compiled."""
        keys, values, cos, sin, places, made = self.cache(extent)
        rope = cos[self.position, None], sin[self.position, None]  # (1, 1, D)
        h, delta, ahead = F.embedding(self.token, self.embedding), self.none, places > self.position
        for i, weights in enumerate(self.layers):
            h, delta = (layer or self.layer)(h, delta, rope, self.position, ahead, keys[i], values[i], weights)
        self._choose(h + delta, made)

    def _choose(self, h: Tensor, made: Tensor) -> None:
        self.logits.copy_(F.linear(self._normed(h, self.norm), self.head)[0])
        self.token.copy_(self.logits[: self.num_tokens].argmax(-1, keepdim=True))
        made.index_copy_(0, self.position, self.token)
        self.position.add_(1)

    def layer(self, h, delta, rope, positions, ahead, keys, values, weights) -> tuple[Tensor, Tensor]:
        """One layer, from h + delta (T, hidden) to the same in two parts.

        The sum is left to the next layer, whose norm a compiler can then fuse with it. `ahead` (S): places of the cache
        that a step must not see; None: a prompt.
        """
        norm, qkv, bias, o, mlp_norm, gate_up, down = weights
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        h = h + delta
        x = self._times(self._normed(h, norm), qkv, bias).unflatten(1, (-1, self.config.head_dim))
        qk, v = x.split((heads + kv_heads, kv_heads), 1)  # (T, heads, D)
        q, k = rotate(qk, *rope).split((heads, kv_heads), 1)
        keys[:, positions], values[:, positions] = k.transpose(0, 1), v.transpose(0, 1)
        if ahead is None:
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        else:
            attended = self._attend(q, keys, values, ahead)
        h = h + self._times(attended.flatten(1), o)
        gate, up = self._times(self._normed(h, mlp_norm), gate_up).chunk(2, 1)
        return h, self._times(F.silu(gate) * up, down)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, ahead: Tensor) -> Tensor:
        """One token's attention over the whole cache: q (1, heads, D) → the same.

        The query heads that share keys are the rows of one product, so that nothing is copied for them.
        """
        kv_heads, extent, head_dim = keys.shape
        scores = (q.view(kv_heads, -1, head_dim) * head_dim**-0.5) @ keys.transpose(1, 2)  # (KV heads, group, S)
        shares = scores.masked_fill(ahead, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        shares = shares.unflatten(2, (-1, SPLIT)).transpose(1, 2)  # (KV heads, S / SPLIT, group, SPLIT)
        parts = shares @ values.view(kv_heads, extent // SPLIT, SPLIT, head_dim)  # (KV heads, S / SPLIT, group, D)
        return parts.sum(1).view(1, -1, head_dim)

    def _normed(self, h: Tensor, norm: Tensor) -> Tensor:
        return F.rms_norm(h, norm.shape, norm, self.config.rms_norm_eps)

    def _times(self, x: Tensor, matrix: Tensor | tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
        if not self.int4:
            return F.linear(x, matrix, bias)
        y = torch_int4_mm(x, *matrix)
        return y if bias is None else y + bias


class TorchPeer:
    """A `TorchDecoder` timed: eagerly or as a CUDA graph (on a CPU the same calls, uncaptured), compiled or not.

    The host looks at the tokens after each eager step, and after every 16 replays. Compiled is the step's layer: one
    compilation for each length of the cache. Prompts run eagerly.
    """

    def __init__(self, decoder: TorchDecoder, graph: bool, compiled: bool = False):
        self.decoder, self.graph, self.compiled = decoder, graph, compiled
        self.look = CHAIN if graph and decoder.device.type == "cuda" else 1
        self.steps: dict[int, Callable[[], object]] = {}
        self.last: tuple[list[int], int, Tensor] | None = None
        if compiled:
            self.layer = torch.compile(_own_code(decoder.layer), fullgraph=True, dynamic=False)

    def nbytes(self, depth: int) -> int:
        """What a token must read and write, `depth` tokens deep."""
        decoder = self.decoder
        if not decoder.int4:
            return ledger(decoder.config, decoder.dtype, depth).total
        matrices = Grouped(4, GROUP_SIZE, torch.float32)  # each group has a bf16 scale and a bf16 zero-point
        forms = dict.fromkeys(("qkv", "o", "gate_up", "down"), matrices)
        return ledger(decoder.config, forms | {"default": decoder.dtype}, depth).total

    @torch.no_grad()
    def first(self, ids: Sequence[int]) -> float:
        """Seconds from a prompt to its first token on the host."""
        synchronize(self.decoder.device)
        started = time.perf_counter()
        self.decoder.prefill(ids, _extent(len(ids) + 1))
        int(self.decoder.token)
        return time.perf_counter() - started

    @torch.no_grad()
    def run(self, ids: Sequence[int], steps: int) -> list[float]:
        """Seconds a token of each look, of `steps` steps after a prompt and `WARM` steps."""
        decoder, extent = self.decoder, _extent(len(ids) + WARM + steps + 1)
        step, made = self._step(extent), decoder.cache(extent)[-1]
        decoder.prefill(ids, extent)
        at, seconds = len(ids), []
        for _ in range((WARM + steps) // self.look):
            started = time.perf_counter()
            for _ in range(self.look):
                step()
            made[at : at + self.look].tolist()  # waits
            seconds.append((time.perf_counter() - started) / self.look)
            at += self.look
        self.last = [*ids, *made[len(ids) - 1 : at - 1].tolist()], extent, decoder.logits.clone()
        return seconds[WARM // self.look :]

    def _step(self, extent: int) -> Callable[[], object]:
        if extent not in self.steps:
            layer = self.layer if self.compiled else None

            def step() -> None:
                self.decoder.step(extent, layer)

            if self.graph:
                self.decoder.position.zero_()
                for _ in range(2):  # libraries set themselves up, and the compiler runs
                    step()
                step = captured(step, self.decoder.device)
            self.steps[extent] = step
        return self.steps[extent]

    @torch.no_grad()
    def check(self) -> None:
        """Hold the logits of the last run against those of its tokens as one prompt.

        Raises:
            RuntimeError: they are off by more than `TOLERANCE` of their norm, or not finite.
        """
        ids, extent, logits = self.last
        self.decoder.prefill(ids, extent)
        wanted = self.decoder.logits.float()
        error = ((logits.float() - wanted).norm() / wanted.norm()).item()
        if not error < TOLERANCE:  # NaN does not pass
            raise RuntimeError(f"after {len(ids)} tokens the logits are off by {error:.3g} of their norm")


class Transformers:
    """`transformers`' greedy `generate`, as it comes, on the model's device; times are those of its streamer."""

    def __init__(self, model):
        self.model, self.config = model, ModelConfig.from_dict(model.config.to_dict())

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> "Transformers":
        """A checkpoint's folder, as `open_checkpoint` finds it."""
        transformers = _transformers()
        return cls(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval())

    @classmethod
    def random(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "Transformers":
        """Random weights, made on the device."""
        transformers = _transformers()
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.Qwen2Config.from_dict(config.to_dict()), dtype=dtype
            )
        return cls(model.eval())

    def nbytes(self, depth: int) -> int:
        return ledger(self.config, self.model.dtype, depth).total

    def first(self, ids: Sequence[int]) -> float:
        return transformers_arrivals(self.model, ids, 1)[1]

    def run(self, ids: Sequence[int], steps: int) -> list[float]:
        return transformers_arrivals(self.model, ids, 1 + WARM + steps)[2][WARM:]

    def check(self) -> None:
        """`transformers` is trusted: the reference decoder is tested against it."""


class LlamaCpp:
    """llama.cpp on a GGUF file, through `llama-cpp-python`: greedy, all layers on the GPU where there is one.

    Raises:
        Unavailable: it is not installed, or was built without CUDA on a machine with a GPU.
    """

    def __init__(self, path: Path, context: int, device: torch.device):
        try:
            import llama_cpp
        except ImportError:
            raise Unavailable(f"llama-cpp-python is not installed: {INSTALL_LLAMA}") from None
        gpu = device.type == "cuda"
        if gpu and not llama_cpp.llama_supports_gpu_offload():
            raise Unavailable(f"llama-cpp-python was built without CUDA: {INSTALL_LLAMA}")
        self.llama = llama_cpp.Llama(
            str(path), n_gpu_layers=-1 if gpu else 0, n_ctx=context, n_batch=512, flash_attn=gpu, verbose=False
        )
        self.weight_bytes, self.kv_bytes = gguf_bytes(path)

    def nbytes(self, depth: int) -> int:
        return self.weight_bytes + (depth + 1) * self.kv_bytes

    def first(self, ids: Sequence[int]) -> float:
        return self._gaps(ids, 1)[0]

    def run(self, ids: Sequence[int], steps: int) -> list[float]:
        return self._gaps(ids, 1 + WARM + steps)[1 + WARM :]

    def check(self) -> None:
        """Its tokens come from other weights (the file's own blocks): there is nothing to hold them against."""

    def _gaps(self, ids: Sequence[int], count: int) -> list[float]:
        """Seconds to the first token, and between the others."""
        self.llama.reset()  # else it would find the prompt in its cache
        times = [time.perf_counter()]
        for _ in self.llama.generate(list(ids), temp=0.0):
            times.append(time.perf_counter())
            if len(times) > count:
                break
        return [b - a for a, b in pairwise(times)]


def gguf_bytes(path: Path) -> tuple[int, int]:
    """What a token reads of a GGUF file's weights, and of each earlier token's keys and values in fp16.

    Of the embedding it reads one row, unless that is the head too.
    """
    tensors = {tensor.name: tensor for tensor in open_gguf(path).tensors}
    embedding = tensors["token_embd.weight"]
    total = sum(int(tensor.n_bytes) for tensor in tensors.values())
    if "output.weight" in tensors:
        total -= int(embedding.n_bytes) - int(embedding.n_bytes) // int(embedding.shape[1])
    rows = sum(int(t.shape[-1]) for name, t in tensors.items() if name.endswith(("attn_k.weight", "attn_v.weight")))
    return total, 2 * rows


def find_gguf_of(path: Path) -> Path:
    """The GGUF file of a model's folder, or the file itself.

    Raises:
        Unavailable: there is none.
    """
    if (file := find_gguf(path)) is None:
        raise Unavailable(f"llama.cpp reads GGUF files, and {path.name} has none")
    return file


def checkpoint_folder(path: Path) -> Path:
    """The folder that `transformers` reads.

    Raises:
        Unavailable: the model is no such folder.
    """
    try:
        return open_checkpoint(path).path
    except (ValueError, FileNotFoundError) as error:
        raise Unavailable(f"transformers reads Hugging Face folders: {str(error).rpartition('/')[2]}") from None


def transformers_arrivals(model, prompt: Sequence[int], count: int) -> tuple[list[int], float, list[float]]:
    """`transformers`' greedy generate: the tokens, the seconds to the first, and those between the others."""
    from transformers import GenerationConfig

    times, tokens = [], []

    class Clock:  # the streamer protocol: put() takes the prompt first, then every token
        def put(self, value):
            times.append(time.perf_counter())
            tokens.extend(value.flatten().tolist())

        def end(self):
            pass

    device = model.device
    ids = torch.tensor([prompt], device=device)
    # No stop token: exactly `count` tokens. The model's own defaults would come back in through generation_config.
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)
    synchronize(device)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=Clock())
    made = tokens[len(prompt) :]
    if len(made) != count:
        raise RuntimeError(f"transformers made {len(made)} tokens, not {count}")
    times[0] = start
    gaps = [b - a for a, b in pairwise(times)]
    return made, gaps[0], gaps[1:]


def _transformers():
    try:
        import transformers
    except ImportError:
        raise Unavailable('transformers is not installed; add it with: pip install "nanoqwen[test]"') from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _own_code(method: Callable) -> Callable:
    """The same method with a code object of its own.

    The compiler keeps what it makes, and counts the shapes of which it makes only so many, by code object: the peers of
    one method would share both. To reset it between them would take from one what its captured graph still launches.
    """
    of = method.__func__
    return MethodType(FunctionType(of.__code__.replace(), of.__globals__, of.__name__), method.__self__)


def _parts(matrix: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return matrix if isinstance(matrix, tuple) else (matrix,)


def _extent(tokens: int) -> int:
    return -(-tokens // SPLIT) * SPLIT
