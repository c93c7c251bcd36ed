"""All layers of a decode step in one launch: `decode_layers`, the persistent kernel of lesson 06."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor
from nanoqwen.kernels.attention import HEAD_DIMS, LOG2_E, MAX_GROUP, Workspace, check_table, check_workspace
from nanoqwen.kernels.int4_ring import NORM_COLS, RING_CHUNK, SHARED_BYTES
from nanoqwen.kernels.launch import Program, sms
from nanoqwen.packing import GROUP_SIZES, PAGE_SIZE

WARPS, MOST_STAGES = 8, 8  # as in csrc/decode_layers.cu
POINTERS = 12  # of its Layer
BARRIERS = 6  # as there: qkv, o, gate_up, down, attention, and the blocks that have left
_HALF, _FLOAT, _INT32, _INT64 = (torch.float16,), (torch.float32,), (torch.int32,), (torch.int64,)


class Int4(Protocol):
    """A matrix of the layout "fragment": words (rows, cols / 8) int32, scales (rows / 16, cols / group, 16) float16."""

    words: Tensor
    scales: Tensor


class Layer(Protocol):
    """The weights of a decoder layer; `nanoqwen.engine_weights.Layer` is one."""

    norm: Tensor  # (hidden) float16
    qkv: Int4  # (heads + 2 kv_heads) * head_dim rows
    bias: Tensor  # of qkv, float32
    o: Int4  # hidden rows
    mlp_norm: Tensor  # (hidden) float16
    gate_up: Int4  # 2 inner rows: 16 of the gate, 16 of up, and so on
    down: Int4  # hidden rows


@dataclass(frozen=True)
class LayerTable:
    """Where the weights and caches of all layers lie, as the kernel reads it; made by `layer_table`."""

    pointers: Tensor  # (layers, POINTERS) int64 on the device
    tensors: tuple[Tensor, ...]  # what they point to
    hidden: int
    inner: int
    group: int  # columns that share a scale
    heads: int
    kv_heads: int
    head_dim: int
    pool: Tensor  # pages of the first layer; the others' are alike

    def __len__(self) -> int:
        return len(self.pointers)


def layer_table(layers: Sequence[Layer], pages: Sequence[Tensor]) -> LayerTable:
    """The table for layers that are alike, all tensors on one device.

    Args:
        layers: in their order. Their tensors must stay where they are as long as the table is used.
        pages: of each layer, (pages, kv_heads, 2, 16, head_dim) float16.

    Raises:
        ValueError, TypeError: a tensor that does not fit; the message names layer and tensor.
    """
    if not layers or len(layers) != len(pages):
        raise ValueError(f"{len(layers)} layers and {len(pages)} pools of pages; one for each layer, and at least one")
    first, device = layers[0], layers[0].qkv.words.device
    check_tensor("pages[0]", pages[0], ("pages", "kv_heads", 2, PAGE_SIZE, "head_dim"), _HALF, device, ALIGNMENT)
    _, kv_heads, _, _, head_dim = pages[0].shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"pages[0] has head_dim {head_dim}; the kernel was compiled for 64 and 128")
    hidden, inner = 8 * first.qkv.words.shape[1], 8 * first.down.words.shape[1]
    group = hidden // first.qkv.scales.shape[1]
    if group not in GROUP_SIZES:
        raise ValueError(f"layer 0's qkv has groups of {group} columns; they must be of {', '.join(map(str, GROUP_SIZES))}")
    heads = len(first.qkv.words) // head_dim - 2 * kv_heads
    if heads < 1 or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{heads} query heads and {kv_heads} KV heads; at most {MAX_GROUP} share a KV head, all alike")
    if hidden > NORM_COLS:
        raise ValueError(f"layer 0's qkv has {hidden} columns; a norm takes at most {NORM_COLS}")
    q_size, qkv_rows = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    for name, size in {"hidden": hidden, "inner": inner, "q_size": q_size}.items():
        if size % math.lcm(64, group):
            raise ValueError(f"{name} is {size}; the kernel takes whole groups of {group} and multiples of 64 columns")

    rows, tensors = [], []
    for i, (layer, pool) in enumerate(zip(layers, pages, strict=True)):
        shapes = {"qkv": (qkv_rows, hidden), "o": (hidden, q_size), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        words, scales = [], []
        for name, (m, n) in shapes.items():
            matrix = getattr(layer, name)
            check_tensor(f"layer {i}'s {name}.words", matrix.words, (m, n // 8), _INT32, device, ALIGNMENT)
            check_tensor(f"layer {i}'s {name}.scales", matrix.scales, (m // 16, n // group, 16), _HALF, device, ALIGNMENT)
            words.append(matrix.words)
            scales.append(matrix.scales)
        for name in ("norm", "mlp_norm"):
            check_tensor(f"layer {i}'s {name}", getattr(layer, name), (hidden,), _HALF, device, ALIGNMENT)
        check_tensor(f"layer {i}'s bias", layer.bias, (qkv_rows,), _FLOAT, device, ALIGNMENT)
        check_tensor(f"pages[{i}]", pool, tuple(pages[0].shape), _HALF, device, ALIGNMENT)
        row = (*words, *scales, layer.norm, layer.mlp_norm, layer.bias, pool)
        rows.append([tensor.data_ptr() for tensor in row])
        tensors += row
    pointers = torch.tensor(rows, dtype=torch.int64).to(device)
    return LayerTable(pointers, tuple(tensors), hidden, inner, group, heads, kv_heads, head_dim, pages[0])


def layer_barriers(device: torch.device | str) -> Tensor:
    """What the blocks of `decode_layers` count their arrivals in. Launches that may overlap need one each."""
    return torch.zeros(BARRIERS, 32, dtype=torch.int32, device=device)


def decode_layers(
    layers: LayerTable,
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor,
    table: Tensor,
    qkv: Tensor,
    attended: Tensor,
    act: Tensor,
    *,
    workspace: Workspace,
    barriers: Tensor,
    eps: float = 1e-6,
    act_factor: float = 1.0,
    blocks: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """A token through all layers, in one launch whose blocks wait for each other: lesson 06.

    The same bits as, layer by layer, `int4_gemm_ring` with norm and bias, `rope_attention`, `int4_gemm_ring` onto h,
    `int4_gemm_ring` with norm and swiglu, `int4_gemm_ring` onto h.

    Args:
        h: (hidden) float32, the token's residual stream; becomes that behind the last layer.
        cos, sin, length, table: as `rope_attention`.
        qkv, attended, act: where the layers leave what their names say for each other: ((heads + 2 kv_heads) *
            head_dim) float32, (heads, head_dim) float16, (inner) float16.
        workspace: of `attention_workspace`. barriers: of `layer_barriers`.
        act_factor: act is stored divided by it, so that larger values fit into float16.
        blocks: at most the multiprocessors of the GPU, which is the default.
        pdl: let the launch overlap the end of the kernel before it (programmatic dependent launch). That kernel must
            write h alone.

    Returns:
        h.

    Raises:
        RuntimeError: a GPU that has no bulk copies (before sm_90).
        TypeError, ValueError: an argument that does not fit, more blocks than multiprocessors, or layers so wide that
            x does not fit into shared memory; the message names it. On a GPU, a position past the table or past cos
            stores nothing and makes h NaN.
    """
    device, heads, kv_heads, head_dim = h.device, layers.heads, layers.kv_heads, layers.head_dim
    if device.type == "cuda" and (have := torch.cuda.get_device_capability(device)) < (9, 0):
        raise RuntimeError(f"decode_layers needs sm_90, this GPU is sm_{have[0]}{have[1]}: launch its parts one by one")
    check_tensor("h", h, (layers.hidden,), _FLOAT, layers.pointers.device, ALIGNMENT)
    check_tensor("qkv", qkv, ((heads + 2 * kv_heads) * head_dim,), _FLOAT, device, ALIGNMENT)
    check_tensor("attended", attended, (heads, head_dim), _HALF, device, ALIGNMENT)
    check_tensor("act", act, (layers.inner,), _HALF, device, ALIGNMENT)
    check_tensor("cos", cos, ("positions", head_dim), _FLOAT, device)
    check_tensor("sin", sin, tuple(cos.shape), _FLOAT, device)
    check_table(layers.pool, table, length, 1)
    if length.is_cpu and int(length) >= len(cos):
        raise ValueError(f"length is {int(length)}; cos and sin have {len(cos)} positions")
    workspace, splits = check_workspace(workspace, None, table, kv_heads, head_dim, torch.float16, device)
    check_tensor("barriers", barriers, (BARRIERS, 32), _INT32, device)
    most = sms(device)
    if blocks is not None and not 1 <= blocks <= most:
        raise ValueError(f"blocks is {blocks}; it must be 1 to {most}, all on the GPU at once")
    grid = blocks or most
    # Each split has a block of its own; with fewer blocks some share one.
    splits = min(splits, grid // kv_heads)
    if splits < 1:
        raise ValueError(f"blocks is {grid}; attention needs one for each of {kv_heads} KV heads")
    stages, sums, rest = _shared_bytes(_sizes(layers), grid)
    if stages < 2:
        raise ValueError(
            f"x of {layers.inner} columns, and the sums of {grid} blocks, leave no shared memory for the rings: launch "
            "the parts one by one"
        )
    program, name = _program(layers.group, head_dim)
    args = (layers.pointers, h, qkv, attended, act, cos, sin, table, length, *workspace, barriers)
    sizes = (len(layers), layers.hidden, heads // kv_heads, kv_heads, layers.inner, splits)
    sizes += (len(table), len(cos), stages, sums)
    factors = (eps, head_dim**-0.5 * LOG2_E, act_factor, 1 / act_factor)
    program.launch(
        name,
        device,
        grid,
        32 * WARPS,
        (*args, *sizes, *factors),
        shared_bytes=rest + stages * WARPS * _stage_bytes(layers.group),
        pdl=pdl,
        outputs=("qkv", "attended", "act"),
        cooperative=True,
        buffers=layers.tensors,
    )
    return h


def fits_one_launch(layers: LayerTable, blocks: int | None = None) -> bool:
    """Whether `decode_layers` takes these layers on their device, with so many blocks."""
    blocks = blocks or sms(layers.pointers.device)
    return blocks >= layers.kv_heads and _shared_bytes(_sizes(layers), blocks)[0] >= 2


def _sizes(layers: LayerTable) -> tuple[int, ...]:
    return len(layers), layers.hidden, layers.inner, layers.group, layers.heads, layers.kv_heads, layers.head_dim


def _stage_bytes(group: int) -> int:
    return RING_CHUNK * 8 + RING_CHUNK // group * 32


@functools.lru_cache
def _shared_bytes(sizes: tuple[int, ...], grid: int) -> tuple[int, int, int]:
    """Stages of a ring, bytes of a block's sums, and bytes of all but the rings."""
    layers, hidden, inner, group, heads, kv_heads, head_dim = sizes
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    sums = 0
    for rows, cols, unit in (  # tiles that stay together
        (q_size + 2 * kv_size, hidden, 1),
        (hidden, q_size, 1),
        (2 * inner, hidden, 2),
        (hidden, inner, 1),
    ):
        tiles = -(-(rows // (16 * unit)) // grid) * unit
        sums = max(sums, tiles * -(-cols // RING_CHUNK) * 64)
    widest = max(hidden, q_size, inner)
    # x and its groups; or AttentionShared of csrc/include/attention_mma.cuh: queries, the new token, 8 warps' answers
    board = 8 * 2 * head_dim + 4 * head_dim + 8 * 32 * head_dim + 528
    rest = sums + 8 * POINTERS * layers + max(-(-(widest // group) // 2) * 16 + 2 * widest, board)
    return min((SHARED_BYTES - rest) // (WARPS * _stage_bytes(group)), MOST_STAGES), sums, rest


@functools.cache
def _program(group: int, head_dim: int) -> tuple[Program, str]:
    name = f"decode_layers<{group}, {head_dim}>"
    return Program(Path("decode_layers.cu"), {name: "p" * 13 + "iuiiuiiiiuffff"}), name
