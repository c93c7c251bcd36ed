"""The decode step made of our kernels: INT4 weights, paged KV, five launches a layer. Lesson: notebooks 06 and 07.

    engine, tokenizer = Engine.load("qwen2.5-coder-0.5b", "cuda")
    for token in engine.generate(tokenizer.encode("def quicksort(a):"), 64): ...

Read it top to bottom: what is laid out, the prompt, the step, how steps are launched, the loop around them. On a CPU
the same kernels run on the SIMT machine.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoqwen import kernels, models
from nanoqwen.config import ModelConfig
from nanoqwen.engine_weights import Layer, Matrix, Weights, check_shapes, group_of, step_ledger, weight_bytes
from nanoqwen.generation import Sampler
from nanoqwen.graphs import MODES, launcher
from nanoqwen.kernels.launch import sms
from nanoqwen.ledger import Ledger
from nanoqwen.packing import GROUP_SIZE, PAGE_SIZE
from nanoqwen.paged_kv import PagedKV
from nanoqwen.reference import Qwen2, rope_tables, rotate
from nanoqwen.tokenizer import Tokenizer

CHUNK = 1024
"""Tokens of a prompt that go through the layers at a time."""
SHRINK = 16.0
"""What the MLP's activation is divided by while it is stored in fp16, so that values up to a million fit."""

LAUNCHERS = 16
"""Captured graphs, one for each mode and sampler, that are kept."""


class PoolExhausted(RuntimeError):
    """No page is left. What was generated until then counts."""


class Engine:
    """A decoder on one device: weights, pages and buffers laid out once, and used until it is closed.

    Up to `sequences` sequences share the pages. The host keeps the account of pages; token, length and table of the
    sequence that is being decoded lie on the device, at addresses that stay, where the step reads and writes them.

    Args:
        model: a reference decoder, in 16 or 32 bits or in INT4 already, or `Weights`.
        device: by default the GPU where there is one.
        max_tokens: of all sequences together, as far as pages go; by default the model's context, at most 4096.
        group, method: how matrices that are not in INT4 yet are quantised; see `quantize.quantize`.
        mode: one of `graphs.MODES`; by default "in flight" on a GPU, and on a CPU "eager", the only one there.
        blocks: of a product; by default one for each multiprocessor.
        pdl: let a launch of a step begin while the one before it still runs (programmatic dependent launch).

    Raises:
        ValueError: a model that the kernels do not take, an unknown mode.
        RuntimeError: a GPU before sm_90.
        MemoryError: the device has too little; the message says how much is needed, and what would fit.
    """

    def __init__(
        self,
        model: Qwen2 | Weights,
        device: torch.device | str | None = None,
        *,
        max_tokens: int | None = None,
        sequences: int = 8,
        group: int = GROUP_SIZE,
        method: str = "mse",
        mode: str | None = None,
        blocks: int | None = None,
        pdl: bool = True,
        progress: bool = False,
    ):
        self.config = config = model.config
        self.device = device = _device(device)
        self.blocks, self.pdl, self.closed = blocks, pdl, False
        self.use(mode or ("in flight" if device.type == "cuda" else "eager"))
        pages = _pages(config, max_tokens)
        if isinstance(model, Weights):
            check_memory(config, device, pages, {})
            self.weights = model
        else:
            group = group_of(model, group)
            check_shapes(config, group)
            check_memory(config, device, pages, weight_bytes(config, group))
            self.weights = Weights.of(model, device, group, method, progress)

        kv_heads, head_dim, hidden = config.num_key_value_heads, config.head_dim, config.hidden_size
        self.context = min(config.max_position_embeddings, pages * PAGE_SIZE)
        most = -(-self.context // PAGE_SIZE)  # pages of a sequence
        self.kv = PagedKV(
            config.num_hidden_layers, pages, kv_heads, head_dim,
            sequences=sequences, max_pages=most, dtype=torch.float16, device=device,
        )  # fmt: skip
        empty = partial(torch.empty, device=device)
        # The state of the sequence that is being decoded
        self.token = torch.zeros(1, dtype=torch.int32, device=device)
        self.length = torch.zeros(1, dtype=torch.int32, device=device)  # tokens of the steps that have ended
        self.table = torch.full((most,), -1, dtype=torch.int32, device=device)
        self.history = torch.full((self.context,), -1, dtype=torch.int32, device=device)  # what follows each position
        # What one launch leaves for the next
        self.h = empty(hidden)  # the residual stream, fp32
        self.qkv = empty(config.q_size + 2 * config.kv_size)
        self.attended = empty(config.num_attention_heads, head_dim, dtype=torch.float16)
        self.act = empty(config.intermediate_size, dtype=torch.float16)  # divided by SHRINK
        self.logits = empty(config.vocab_size)
        # One workspace for all layers: attention touches it only when the launches before have ended.
        splits = kernels.choose_splits(most * PAGE_SIZE, kv_heads, sms(device))
        self.workspace = kernels.attention_workspace(kv_heads, head_dim, splits, torch.float16, device)
        self.choice = kernels.token_workspace(device)
        self.cos, self.sin = rope_tables(config, torch.arange(self.context, device=device), torch.float32)
        self._pages = self.kv.pool.unbind()  # of each layer
        # The host's table, from where a copy to the GPU need not be waited for
        self._host_table = torch.full((most,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._last: dict[int, int] = {}  # each sequence's latest token, which its next step takes
        self._shown: tuple[int, int] | None = None  # the sequence on the device, and how many of its pages
        self._launchers: dict = {}

    @classmethod
    def load(
        cls, name: str | Path | None, device: torch.device | str | None = None, **how
    ) -> tuple["Engine", Tokenizer]:
        """The engine and tokenizer of a model: a name, a folder or a file, as `models.load` takes them.

        A `.nanoqwen` file of a group that the kernels take is laid out as it is; others are quantised here.
        """
        model, tokenizer = models.load(None if name is None else str(name))
        return cls(model, device, **how), tokenizer

    @classmethod
    def random(
        cls, config: ModelConfig, device: torch.device | str | None = None, group: int = GROUP_SIZE, **how
    ) -> "Engine":
        """An engine of this shape with *random* weights, made on the device as INT4: for speed, not for meaning."""
        device = _device(device)
        check_shapes(config, group)
        check_memory(config, device, _pages(config, how.get("max_tokens")), weight_bytes(config, group))
        return cls(Weights.random(config, device, group), device, **how)

    def close(self) -> None:
        """Give all memory back. Closing twice is harmless; anything else then is an error."""
        self.closed = True
        for name in ("weights", "kv", "workspace", "_pages", "_launchers", "cos", "sin"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # The prompt

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], sampler: Sampler | None = None) -> tuple[int, int]:
        """Run a prompt through the model, as a new sequence.

        Many tokens share each weight, so this is the library's: a matrix at a time becomes 16 bits (on a CPU 32), and
        PyTorch multiplies.

        Returns:
            The sequence, for `decode` and `free`, and its first new token.

        Raises:
            ValueError: no prompt, an id that is no token, or more of them than the context.
            PoolExhausted: too few free pages. RuntimeError: all sequences are in use, or the engine is closed.
        """
        self._check_open()
        self._check_prompt(ids)
        choose = self.chooser(sampler)
        if (room := self.kv.free_pages * PAGE_SIZE) < len(ids):
            raise PoolExhausted(f"the prompt has {len(ids)} tokens; the pool has free pages for {room}: {_MORE_PAGES}")
        sequence, self._shown = self.kv.new(), None
        try:
            self._reserve(sequence, len(ids))
            for part in torch.tensor(ids, device=self.device).split(CHUNK):
                h = self._dense(sequence, part)  # (tokens, hidden)
                self.kv.advance(sequence, len(part))
            self.h.copy_(h[-1])
            self.length.fill_(len(ids) - 1)
            for _, launch, _ in list(self.launches(choose))[-2:]:  # lm_head, and the choice
                launch()
            (self._last[sequence],) = self._history(len(ids) - 1, 1)
        except BaseException:
            self.kv.free(sequence)
            raise
        return sequence, self._last[sequence]

    def _dense(self, sequence: int, tokens: Tensor) -> Tensor:
        """The residual stream (T, hidden) fp32 behind the last layer; keys and values go into the pages."""
        config, dtype = self.config, torch.float16 if self.device.type == "cuda" else torch.float32
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        start = self.kv.length(sequence)
        cos, sin = (part[start : start + len(tokens), None] for part in (self.cos, self.sin))  # (T, 1, D)

        def times(x: Tensor, matrix: Matrix) -> Tensor:
            return F.linear(x.to(dtype), matrix.dequantize(dtype))  # a sum with fp32 widens it, without a copy

        def normed(h: Tensor, norm: Tensor) -> Tensor:
            return F.rms_norm(h, h.shape[1:], norm.float(), config.rms_norm_eps)

        h = F.embedding(tokens, self.weights.embedding).float()  # (T, hidden)
        for i, layer in enumerate(self.weights.layers):
            qkv = times(normed(h, layer.norm), layer.qkv) + layer.bias
            qk, v = qkv.unflatten(1, (-1, config.head_dim)).split((heads + kv_heads, kv_heads), dim=1)  # (T, heads, D)
            q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
            k, v = k.half(), v.half()  # as the pages hold them
            self.kv.write(sequence, i, k, v)
            if start:
                earlier = self.kv.read(sequence, i)
                k, v = torch.cat((earlier[0], k)), torch.cat((earlier[1], v))  # (S, kv_heads, D)
            h = h + times(_attention(q.to(dtype), k.to(dtype), v.to(dtype)).flatten(1), layer.o)
            act = _swiglu(times(normed(h, layer.mlp_norm), layer.gate_up))  # (T, intermediate)
            h = torch.add(h, times(act, layer.down), alpha=SHRINK)
        return h

    # The step

    def step(self, choose: Callable[[], None] | None = None, look: Callable[[str, Tensor], None] | None = None) -> None:
        """One token through the model: `token` at position `length` becomes the next one, and `length` one more.

        All of it are launches that the host does not wait for. It allocates nothing, and no address depends on the
        token, so it can be captured. The sequence has a page for the position.

        Args:
            choose: of `chooser`; greedy by default.
            look: called after each launch, with its name and what it wrote.
        """
        for name, launch, out in self.launches(choose or self.chooser()):
            launch()
            if look:
                look(name, out)

    def launches(self, choose: Callable[[], None]) -> Iterator[tuple[str, Callable[[], object], Tensor]]:
        """The launches of a step in their order: name, what launches it, what it writes."""
        weights, eps, pdl = self.weights, self.config.rms_norm_eps, {"pdl": self.pdl}
        # With pdl a launch may begin while the one before it still runs. Attention then asks for the length and for the
        # pages of earlier tokens before its turn, and the step before has written them. So the first kernel of a step
        # is a barrier: it lets its successor begin only when the step before has ended.
        yield "embed", partial(kernels.embed, weights.embedding, self.token, self.h, **pdl), self.h
        for i, layer in enumerate(weights.layers):
            yield from ((f"layer {i} {name}", launch, out) for name, launch, out in self._layer(i, layer))
        head = partial(kernels.lm_head, weights.head, self.h, weights.norm, eps, self.logits, **pdl)
        yield "lm_head", head, self.logits
        yield "choose", choose, self.token

    def _layer(self, i: int, layer: Layer) -> Iterator[tuple[str, Callable[[], object], Tensor]]:
        pages, length, table, h, pdl = self._pages[i], self.length, self.table, self.h, {"pdl": self.pdl}
        ring = {"blocks": self.blocks, **pdl}
        normed = {"eps": self.config.rms_norm_eps, **ring}

        qkv = partial(_multiply, layer.qkv, h, self.qkv, norm=layer.norm, bias=layer.bias, **normed)
        yield "qkv_proj", qkv, self.qkv
        cache = self.cos, self.sin, length, table, pages
        attention = partial(kernels.rope_attention, self.qkv, *cache, self.attended, workspace=self.workspace, **pdl)
        yield "attention", attention, self.attended
        yield "o_proj", partial(_multiply, layer.o, self.attended.view(-1), h, residual=h, **ring), h
        swiglu = {"norm": layer.mlp_norm, "swiglu": True, "y_factor": 1 / SHRINK, **normed}
        yield "gate_up_proj", partial(_multiply, layer.gate_up, h, self.act, **swiglu), self.act
        yield "down_proj", partial(_multiply, layer.down, self.act, h, residual=h, x_factor=SHRINK, **ring), h

    @torch.inference_mode()
    def check_step(self, sequence: int) -> None:
        """A sequence's next step with a look at what every launch writes; the sequence stays as it was.

        Raises:
            ValueError: something is not finite; the message names the layer and the launch.
            PoolExhausted: there is no room for another token. RuntimeError: the engine is closed.
        """
        self._check_open()
        if not self.room(sequence):
            raise PoolExhausted(f"sequence {sequence} has no room for another token: {_MORE_PAGES}")

        def finite(name: str, out: Tensor) -> None:
            if out.is_floating_point() and not out.isfinite().all():
                kind = "NaN" if out.isnan().any() else "an infinity"
                raise ValueError(f"{name} gave {kind} in {out.dtype}, at position {self.kv.length(sequence)}")

        self.show(sequence, 1)
        self._shown = None
        self.step(look=finite)

    # How steps are launched

    def use(self, mode: str) -> None:
        """Launch steps by another of `graphs.MODES` from now on.

        Raises:
            ValueError: there is none of this name, or a graph on a CPU.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        if MODES[mode].graph and self.device.type != "cuda":
            raise ValueError(f"mode {mode!r} captures a graph, which needs a GPU; on {self.device} use eager")
        self.mode = MODES[mode]

    @torch.inference_mode()
    def decode(self, sequence: int, count: int, sampler: Sampler | None = None) -> list[int]:
        """The next `count` tokens of a sequence, whatever they are.

        Raises:
            ValueError: no such sequence, or a count below 1.
            PoolExhausted: there is no room for so many; nothing was decoded. RuntimeError: the engine is closed.
        """
        self._check_open()
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        if (room := self.room(sequence)) < count:
            raise PoolExhausted(f"sequence {sequence} has room for {room} more tokens, not {count}: {_MORE_PAGES}")
        made, at_once = [], count if self.mode.fed_back else 1
        while len(made) < count:
            position = self.kv.length(sequence)
            launch = self.show(sequence, at_once, sampler)
            shown, self._shown = self._shown, None  # in case that we are interrupted before the host has caught up
            launch(at_once, position)
            made += self._history(position, at_once)
            self.kv.advance(sequence, at_once)
            self._last[sequence], self._shown = made[-1], shown
        return made

    def _reserve(self, sequence: int, tokens: int) -> None:
        """Pages for so many tokens in all."""
        if tokens > (held := len(self.kv.pages(sequence)) * PAGE_SIZE):
            self.kv.reserve(sequence, held - self.kv.length(sequence) + -(-(tokens - held) // PAGE_SIZE) * PAGE_SIZE)

    def _history(self, position: int, count: int) -> list[int]:
        """The tokens that follow those at `position` and after; waits for the device."""
        tokens = self.history[position : position + count].tolist()
        if min(tokens) < 0:
            at = position + next(i for i, token in enumerate(tokens) if token < 0)
            raise RuntimeError(
                f"the logits at position {at} are NaN; check_step() names the launch that made the first"
            )
        return tokens

    def room(self, sequence: int) -> int:
        """Tokens that a sequence can still take: what its context and the pool have left."""
        pages = min(len(self.kv.pages(sequence)) + self.kv.free_pages, self.kv.max_pages)
        return min(self.context, pages * PAGE_SIZE) - self.kv.length(sequence)

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back.

        Raises:
            ValueError: there is no such sequence. RuntimeError: the engine is closed.
        """
        self._check_open()
        self.kv.free(sequence)
        self._last.pop(sequence, None)
        self._shown = None

    def show(self, sequence: int, count: int, sampler: Sampler | None = None) -> Callable[[int, int], None]:
        """Bring a sequence's state to where steps find it, with pages for `count` more tokens.

        The host does not know of steps that the caller launches: afterwards the sequence can only be freed.

        Returns:
            What launches steps, as of `graphs.launcher`; captured when it is first wanted.
        """
        position = self.kv.length(sequence)
        self._reserve(sequence, position + count)
        pages, other = self.kv.pages(sequence), self._shown is None or self._shown[0] != sequence
        if (sequence, len(pages)) != self._shown:
            self._host_table.fill_(-1)
            self._host_table[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
            if other or not (self.mode.graph == "pages" and count == 1):  # else the graph of a new page does so
                self._bring_table()
        if other or not self.mode.fed_back:
            self._put(sequence)
        self._shown = sequence, len(pages)

        key = self.mode, self.pdl, repr(sampler or Sampler())
        if key not in self._launchers:
            step = partial(self.step, self.chooser(sampler))
            if self.mode.graph:  # compile the kernels; what the step does, it will do again
                self._bring_table()
                step()
                self._put(sequence)
            if len(self._launchers) >= LAUNCHERS:
                self._launchers.pop(next(iter(self._launchers)))
            self._launchers[key] = launcher(self.mode, step, self._bring_table, self.device)
        return self._launchers[key]

    def _put(self, sequence: int) -> None:
        self.length.fill_(self.kv.length(sequence))
        self.token.fill_(self._last[sequence])

    def _bring_table(self) -> None:
        self.table.copy_(self._host_table, non_blocking=True)

    def chooser(self, sampler: Sampler | None = None) -> Callable[[], None]:
        """What launches the choice of the next token from the logits; its settings are frozen into a graph."""
        vocab = self.weights.num_tokens  # rows beyond are padding, and never chosen
        sampler = sampler or Sampler()
        if sampler.repetition_penalty != 1:
            raise ValueError(
                f"repetition_penalty is {sampler.repetition_penalty}; our kernels have none: use torch's engine"
            )
        settings = {name: getattr(sampler, name) for name in ("temperature", "top_k", "top_p", "seed")}
        state = self.logits, vocab, self.token, self.length, self.history, self.choice
        never = torch.tensor(sampler.suppress, dtype=torch.int64, device=self.device) if sampler.suppress else None

        def choose() -> None:
            if never is not None:
                self.logits.index_fill_(0, never, float("-inf"))
            kernels.sample(*state, **settings, pdl=self.pdl)

        return choose

    # The loop around them

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampler: Sampler | None = None,
        stop: Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Yield up to `max_new_tokens` ids that continue `prompt`, ending after the first id in `stop`.

        As `generation.generate`: `stop` is by default the configuration's `eos_token_id`, and pad rows of the
        vocabulary are never chosen. Generations may take turns; each has a sequence of its own, freed at its end.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, more tokens than the context holds, or a sampler
                that our kernels do not have.
            PoolExhausted: from the iterator, when no page is left; what was yielded counts. RuntimeError: the engine is
                closed.
        """
        self._check_open()
        self._check_prompt(prompt)
        self.chooser(sampler)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
        if len(prompt) + max_new_tokens > (most := self.config.max_position_embeddings):
            raise ValueError(
                f"{len(prompt)} prompt tokens + {max_new_tokens} new ones exceed the context of {most}; "
                "shorten the prompt or lower max_new_tokens"
            )
        stop = set(self.config.eos_token_id if stop is None else stop)
        return self._generate(prompt, max_new_tokens, sampler, stop)

    def _generate(self, prompt, count: int, sampler: Sampler | None, stop: set[int]) -> Iterator[int]:
        if not count:
            return
        sequence, token = self.prefill(prompt, sampler)
        made = 1
        try:
            yield token
            while token not in stop and made < count:
                self._check_open()
                if not (room := self.room(sequence)):
                    so_far = f"{len(prompt)} prompt tokens and {made} new ones, which stand"
                    raise PoolExhausted(f"no page is left after {so_far}: {_MORE_PAGES}")
                for token in self.decode(sequence, min(self.mode.look, count - made, room), sampler):
                    made += 1
                    yield token
                    if token in stop:
                        return  # what was decoded beyond goes with the sequence
        finally:
            if not self.closed:
                self.free(sequence)

    def ledger(self, depth: int) -> Ledger:
        """The bytes that a step moves, `depth` tokens deep."""
        return step_ledger(self.config, depth, self.weights.group, self.weights.head.dtype)

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the engine is closed; make another")

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise ValueError("the prompt is empty; give at least one token")
        if bad := [int(t) for t in ids if not 0 <= t < self.weights.num_tokens]:
            raise ValueError(f"prompt token {bad[0]} is outside the vocabulary of {self.weights.num_tokens}")
        if len(ids) > self.context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the engine's context is {self.context}: shorten it, or make the "
                f"engine with a larger max_tokens (the model's limit is {self.config.max_position_embeddings})"
            )


_MORE_PAGES = "free a sequence, or make the engine with a larger max_tokens"


def _multiply(matrix: Matrix, x: Tensor, out: Tensor, *, blocks: int | None, pdl: bool, **how) -> None:
    if blocks is None and pdl:
        rows, words = matrix.words.shape
        blocks = kernels.overlapping_blocks(rows // 16, 8 * words, sms(x.device))
    kernels.int4_gemm_ring(matrix.words, matrix.scales, x, out, blocks=blocks, pdl=pdl, **how)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T of S tokens: q (T, heads, D), k and v (S, kv_heads, D) → (T, heads, D)."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))  # (1, heads, tokens, D)
    if q.shape[2] == k.shape[2]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:  # PyTorch's fast kernels take a mask, but then not fewer KV heads
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return out[0].transpose(0, 1)


def _swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up / SHRINK: (T, 2 intermediate), columns 16 of the gate and 16 of up → (T, intermediate)."""
    if gate_up.is_cuda:
        return kernels.swiglu(gate_up, 1 / SHRINK)
    gate, up = gate_up.unflatten(1, (-1, 2, 16)).unbind(2)  # on the SIMT machine a prompt would take minutes
    return (F.silu(gate) * up / SHRINK).flatten(1)


def check_memory(config: ModelConfig, device: torch.device, pages: int, weights: dict[str, int]) -> None:
    """Refuse what the device has too little memory for, before any of it is taken.

    Args:
        pages: of the pool. weights: bytes of what is still to be made, by name.

    Raises:
        MemoryError: how much is needed, how much is free, and what would fit.
    """
    if (free := free_memory(device)) is None:
        return
    per_page = config.num_hidden_layers * 2 * config.kv_size * 2 * PAGE_SIZE
    widest = 2 * config.intermediate_size

    def needed(pages: int) -> dict[str, int]:
        # Of a chunk: gate and up in fp16 and what they make; or attention to all tokens, with keys and values in fp16
        # as they are read, joined and repeated for each query head, and the mask, which PyTorch widens
        seen = min(config.max_position_embeddings, pages * PAGE_SIZE)
        attention = seen * (8 * config.kv_size + 4 * config.q_size + 3 * CHUNK)
        passing = 2 * widest * config.hidden_size + 24 * CHUNK * config.hidden_size  # a matrix in 16 bits, the stream
        passing += max(3 * CHUNK * widest, attention if seen > CHUNK else 0)
        return {**weights, f"pages for {pages * PAGE_SIZE:,} tokens": pages * per_page, "a prompt's passing": passing}

    needs = needed(pages)
    if (total := sum(needs.values())) <= free:
        return
    parts = ", ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in needs.items())
    fit = (bisect_right(range(pages), free, key=lambda fewer: sum(needed(fewer).values())) - 1) * PAGE_SIZE
    way = f"max_tokens={fit} would fit" if fit > 0 else "not even a few tokens would fit: take a smaller model"
    raise MemoryError(
        f"the engine needs {total / 1e9:.2f} GB on {device} ({parts}), and {free / 1e9:.2f} GB are free: {way}"
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a GPU, those included that PyTorch keeps; None on a CPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _device(device: torch.device | str | None) -> torch.device:
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if (have := torch.cuda.get_device_capability(device)) < (9, 0):
            raise RuntimeError(
                f"the engine's kernels need bulk copies (sm_90), this GPU is sm_{have[0]}{have[1]}: use --engine torch"
            )
    return device


def _pages(config: ModelConfig, max_tokens: int | None) -> int:
    tokens = min(config.max_position_embeddings, 4096) if max_tokens is None else max_tokens
    if tokens < 1:
        raise ValueError(f"max_tokens is {tokens}; it must be at least 1")
    return -(-tokens // PAGE_SIZE)
