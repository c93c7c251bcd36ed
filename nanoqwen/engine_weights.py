"""A decoder's weights as its decode step reads them: every matrix in INT4, joined and laid out once.

What one launch multiplies lies together: queries, keys and values are one matrix, and so are gate and up, whose rows
alternate, 16 and 16, so that the block that has a gate also has what it multiplies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanoqwen import kernels, packing, quantize
from nanoqwen.config import ModelConfig
from nanoqwen.kernels.arguments import ALIGNMENT
from nanoqwen.kernels.attention import HEAD_DIMS, MAX_GROUP
from nanoqwen.ledger import Grouped, Ledger, ledger
from nanoqwen.packing import FRAGMENT, GROUP_SIZE
from nanoqwen.quantize import FP16_MAX, QuantizedLinear
from nanoqwen.reference import Qwen2

TILE_ROWS, TILE_COLS = packing.layout_of(FRAGMENT).tile


@dataclass(frozen=True)
class Matrix:
    """INT4 in the layout "fragment": words (rows, cols / 8) int32, scales (rows / 16, cols / group, 16) fp16."""

    words: Tensor
    scales: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """W (rows, cols). On a GPU a kernel makes it; on a CPU, where kernels are slow, PyTorch does."""
        if self.words.is_cuda:
            return kernels.int4_dequantize(self.words, self.scales, dtype=dtype)
        scales = self.scales.unflatten(2, (8, 2)).permute(0, 3, 2, 1).reshape(len(self.words), -1)
        return quantize.Quantized(packing.unpack(self.words, FRAGMENT), scales).dequantize(dtype)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    norm: Tensor  # (hidden) fp16
    qkv: Matrix  # (q_size + 2 kv_size, hidden)
    bias: Tensor  # (q_size + 2 kv_size) fp32
    o: Matrix  # (hidden, q_size)
    mlp_norm: Tensor  # (hidden) fp16
    gate_up: Matrix  # (2 intermediate, hidden): 16 rows of the gate, 16 of up, and so on
    down: Matrix  # (hidden, intermediate)


@dataclass(frozen=True)
class Weights:
    """All that a decode step reads but the KV cache. `num_tokens`: rows of the vocabulary that are real tokens."""

    config: ModelConfig
    embedding: Tensor  # (vocab, hidden) fp16 or bf16
    layers: Sequence[Layer]
    norm: Tensor  # (hidden) fp16
    head: Tensor  # (vocab, hidden) fp16 or bf16; a tied model's is its embedding
    num_tokens: int

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        words, scales = self.layers[0].qkv.words, self.layers[0].qkv.scales
        return 8 * words.shape[1] // scales.shape[1]

    @classmethod
    def of(
        cls,
        model: Qwen2,
        device: torch.device | str,
        group: int = GROUP_SIZE,
        method: str = "mse",
        progress: bool = False,
    ) -> "Weights":
        """Those of a reference decoder, on `device`. Matrices that are not in INT4 yet are quantised, one at a time.

        Args:
            group, method: as `quantize.quantize` takes them; a matrix in INT4 stays as it is.

        Raises:
            ValueError: a shape that the kernels do not take, or weights that do not fit their form; the message names
                the tensor.
        """
        group = group_of(model, group)
        check_shapes(model.config, group)
        layers = []
        for i, block in enumerate(tqdm(model.model.layers, desc="lay out", unit="layer", disable=not progress)):

            def matrix(path: str, block: nn.Module = block, i: int = i) -> Matrix:
                return _matrix(f"model.layers.{i}.{path}", block.get_submodule(path), device, group, method)

            def norm(path: str, block: nn.Module = block, i: int = i) -> Tensor:
                return _half(f"model.layers.{i}.{path}.weight", block.get_submodule(path).weight, device)

            q, k, v = (matrix(f"self_attn.{name}_proj") for name in "qkv")
            biases = [part.bias for part in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)]
            layers.append(
                Layer(
                    norm("input_layernorm"),
                    _joined(q, k, v),
                    torch.cat([bias.detach().to(device, torch.float32) for bias in biases]),
                    matrix("self_attn.o_proj"),
                    norm("post_attention_layernorm"),
                    _alternating(matrix("mlp.gate_proj"), matrix("mlp.up_proj")),
                    matrix("mlp.down_proj"),
                )
            )
        embedding = _sixteen_bits(model.model.embed_tokens.weight, device)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        head = embedding if tied else _sixteen_bits(model.lm_head.weight, device)
        last = _half("model.norm.weight", model.model.norm.weight, device)
        return cls(model.config, embedding, layers, last, head, model.num_tokens)

    @classmethod
    def random(
        cls, config: ModelConfig, device: torch.device | str, group: int = GROUP_SIZE, seed: int = 0
    ) -> "Weights":
        """Random weights of this shape, made on the device as INT4: for speed runs that need no meaning.

        As `models.random`: matrices have a deviation of about 0.02 and norms are ones.
        """
        check_shapes(config, group)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

        def matrix(rows: int, cols: int) -> Matrix:
            # The words are drawn: each nibble is as likely as any other, with a deviation of 4.6.
            shape = packing.words_shape(rows, cols, FRAGMENT)
            words = torch.empty(shape, dtype=torch.int32, device=device)
            words.random_(-(2**31), 2**31, generator=generator)
            scales = torch.empty(rows // TILE_ROWS, cols // group, TILE_ROWS, dtype=torch.float16, device=device)
            return Matrix(words, scales.uniform_(0.5, 1.5, generator=generator).mul_(0.02 / 4.6))

        hidden, inner, qkv = config.hidden_size, config.intermediate_size, config.q_size + 2 * config.kv_size
        ones = torch.ones(hidden, dtype=torch.float16, device=device)
        layers = [
            Layer(
                ones.clone(),
                matrix(qkv, hidden),
                normal(qkv, dtype=torch.float32),
                matrix(hidden, config.q_size),
                ones.clone(),
                matrix(2 * inner, hidden),
                matrix(hidden, inner),
            )
            for _ in range(config.num_hidden_layers)
        ]
        embedding = normal(config.vocab_size, hidden, dtype=torch.bfloat16)
        head = embedding if config.tie_word_embeddings else normal(config.vocab_size, hidden, dtype=torch.bfloat16)
        return cls(config, embedding, layers, ones, head, config.vocab_size)


def group_of(model: Qwen2, group: int) -> int:
    """The group of a model's INT4 matrices; of one that has none yet, what `group` says."""
    return next((part.group for part in model.model.modules() if isinstance(part, QuantizedLinear)), group)


def check_shapes(config: ModelConfig, group: int) -> None:
    """Refuse a model that the kernels of a decode step do not take.

    Raises:
        ValueError: names the tensor or the setting, its size, and the sizes that would do.
    """
    quantize.check_settings(group)
    for name, shape in config.weight_shapes().items():
        if name.endswith("_proj.weight"):
            if shape[1] % TILE_COLS:
                raise ValueError(
                    f"{name} has K = {shape[1]} columns; the kernels of the decode step take multiples of {TILE_COLS}: "
                    "use --engine torch"
                )
            quantize.check_columns(shape[1], group, name)
    if config.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim is {config.head_dim}; the attention kernels were compiled for "
            f"{' and '.join(map(str, HEAD_DIMS))}: use --engine torch"
        )
    if (shared := config.num_attention_heads // config.num_key_value_heads) > MAX_GROUP:
        raise ValueError(f"{shared} query heads share a KV head; the kernels take at most {MAX_GROUP}")


def weight_bytes(config: ModelConfig, group: int) -> dict[str, int]:
    """What `Weights` of this shape take on the device: the matrices, and what stays in 16 bits."""
    matrices = [shape for name, shape in config.weight_shapes().items() if name.endswith("_proj.weight")]
    elements = sum(map(math.prod, matrices))
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return {"INT4 weights": elements // 2 + elements // group * 2, "embedding and head": 2 * vocabulary}


def step_ledger(config: ModelConfig, depth: int, group: int = GROUP_SIZE, head: torch.dtype = torch.bfloat16) -> Ledger:
    """The bytes that a step moves with `Weights` of this shape: INT4 in groups, fp16 norms and cache, fp32 biases.

    Args:
        depth: tokens in the cache. head: of the embedding and of lm_head.
    """
    forms = dict.fromkeys(("qkv", "o", "gate_up", "down"), Grouped(4, group)) | {"bias": torch.float32}
    forms |= dict.fromkeys(("norm", "kv_read", "kv_write"), torch.float16)
    return ledger(config, forms | {"default": head}, depth)


def _matrix(name: str, linear: nn.Module, device, group: int, method: str) -> Matrix:
    if isinstance(linear, QuantizedLinear):
        if linear.bits != 4 or linear.zeros is not None or linear.group != group:
            form = f"{linear.bits} bits, group {linear.group}{', zero-points' if linear.zeros is not None else ''}"
            raise ValueError(f"{name} has {form}; the engine takes symmetric groups of 4 bits, one size: {group} here")
        words = packing.convert(linear.words.to(device), linear.layout, FRAGMENT, linear.out_features)
        return Matrix(words, packing.tile_scales(linear.scales.to(device)))
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"{name} is a {type(linear).__name__}; the engine takes nn.Linear and QuantizedLinear")
    made = quantize.quantize(linear.weight.to(device), group, method, name=f"{name}.weight")
    return Matrix(packing.pack(made.values, FRAGMENT), packing.tile_scales(made.scales))


def _joined(*parts: Matrix) -> Matrix:
    """Their rows one after another: whole tiles of 16 rows, as `head_dim` is a multiple of 16."""
    return Matrix(torch.cat([part.words for part in parts]), torch.cat([part.scales for part in parts]))


def _alternating(gate: Matrix, up: Matrix) -> Matrix:
    """16 rows of the gate, 16 of up, and so on. A tile of 16 rows is one run of words, which moves as it is."""
    words = [part.words.unflatten(0, (-1, TILE_ROWS)) for part in (gate, up)]
    return Matrix(torch.stack(words, 1).flatten(0, 2), torch.stack([gate.scales, up.scales], 1).flatten(0, 1))


def _half(name: str, norm: Tensor, device) -> Tensor:
    """A norm in fp16, as the kernels take it."""
    largest = norm.detach().abs().max().item()
    if not largest <= FP16_MAX:
        raise ValueError(f"{name} holds {largest:.4g}; the kernels take norms in fp16, which ends at {FP16_MAX:.0f}")
    return norm.detach().to(device, torch.float16)


def _sixteen_bits(weight: Tensor, device) -> Tensor:
    """Weights of 16 bits as they are; others in fp16, or where that does not reach in bf16."""
    weight = weight.detach().to(device)
    if weight.dtype not in (torch.float16, torch.bfloat16):
        weight = weight.to(torch.float16 if weight.abs().max() <= FP16_MAX else torch.bfloat16)
    weight = weight.contiguous()
    return weight.clone() if weight.data_ptr() % ALIGNMENT else weight  # a mapped file's place is its own
