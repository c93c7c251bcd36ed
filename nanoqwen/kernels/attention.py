"""Attention of one new token: the ladder of lesson 05, and what stores the token's keys and values.

The cache of one layer is `pages` (pages, kv_heads, 2, 16, head_dim), keys before values; `table` (max_pages) int32
names the page of each 16 tokens, and `length` (1) int32 says how many count. `nanoqwen.paged_kv` makes all three.

`length` lies on the device and belongs to the step: it counts the tokens of steps that have ended, and is the position
of the token at hand. `rope_append` stores that token and leaves `length` alone; attention after it takes `appended=1`.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import Program, sms
from nanoqwen.packing import PAGE_SIZE

HEAD_DIMS = (64, 128)
MAX_GROUP = 8  # query heads of a KV head: the columns of the tensor cores' tile
MAX_SPLITS = 512
BLOCKS_PER_SM = 4  # of the first steps, whose blocks have less on the way
RING_BLOCKS_PER_SM = 2
LOG2_E = 1.4426950408889634  # the exponentials of paged_attention_mma are powers of two
CONSUMERS, RING_WARPS, STAGES = 6, 8, 3  # as in csrc/paged_attention_ring.cu

_C_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_DTYPES, _INT32, _INT64, _FLOAT = tuple(_C_NAMES), (torch.int32,), (torch.int64,), (torch.float32,)
_LAYOUTS = {(dtype, head_dim): f"{t}, {head_dim}" for dtype, t in _C_NAMES.items() for head_dim in HEAD_DIMS}
_ONLINE = {
    key: Program(Path("attention.cu"), {f"attention_online<{types}>": "pppppfiii"}) for key, types in _LAYOUTS.items()
}
_PAGED = {
    key: Program(
        Path("paged_attention.cu"),
        {
            f"paged_attention<{types}>": "pppppfii",
            f"paged_attention_split<{types}>": "ppppppfii",
            f"paged_attention_prefetch<{types}>": "ppppppfiii",
            f"combine_splits<{types}>": "pppi",
        },
    )
    for key, types in _LAYOUTS.items()
}
_RING = {  # one program for each number of query heads that share a KV head: each takes a while to compile
    (*key, group, bulk): Program(
        Path("paged_attention_ring.cu"),
        {f"paged_attention_ring<{types}, {group}, {str(bulk).lower()}>": "pppppppfiii"},
    )
    for key, types in _LAYOUTS.items()
    for group in range(1, MAX_GROUP + 1)
    for bulk in (True, False)
}
_MMA = {
    key: Program(
        Path("paged_attention_mma.cu"),
        {f"paged_attention_mma<{types}, {rope}>": "pppppppppppfiiii" for rope in ("false", "true")},
    )
    for key, types in _LAYOUTS.items()
}
_ROPE = {
    key: Program(
        Path("rope_append.cu"), {f"rope_append<{t}, {types}>": "pppppppiiii" for t in {"float", _C_NAMES[key[0]]}}
    )
    for key, types in _LAYOUTS.items()
}


class Workspace(NamedTuple):
    """What the splits of `paged_attention_mma` leave for the last of them. Launches that may overlap need one each."""

    partial: Tensor  # (kv_heads, splits, 8 * head_dim) of the dtype of q: the answers, in the order of the registers
    lse: Tensor  # (kv_heads, splits, 8) float32: their weights, as logarithms to base 2
    arrivals: Tensor  # (kv_heads) int32, zero before and after each launch


def attention_online(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, out: Tensor | None = None, *, appended: int = 0
) -> Tensor:
    """softmax(q kᵀ / √head_dim) v with a warp a query head, over a contiguous cache (lesson 05, step 0).

    Online softmax: Milakov & Gimelshein, 2018.

    Args:
        q: (heads, head_dim) float16 or bfloat16; head_dim is 64 or 128.
        k, v: (kv_heads, capacity, head_dim) of the same dtype and device; at most 8 query heads share a KV head.
        length: (1) int32, tokens of the cache that count.
        out: (heads, head_dim), where to write; a new tensor by default.
        appended: tokens that count beyond `length`, 1 after `rope_append`.

    Returns:
        (heads, head_dim) in the dtype of q; sums are taken in fp32. Zeros where the length is 0.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    head_dim = _check_q(q)
    check_tensor("k", k, ("kv_heads", "capacity", head_dim), (q.dtype,), q.device)
    check_tensor("v", v, tuple(k.shape), (q.dtype,), q.device)
    kv_heads, capacity = k.shape[:2]
    group = _group(len(q), kv_heads)
    check_tensor("length", length, (1,), _INT32, q.device)
    _check_tokens(length, appended, capacity, f"k holds {capacity}")
    out = _output(q, out)
    args = (q, k, v, length, out, head_dim**-0.5, appended, group, capacity)
    name = f"attention_online<{_LAYOUTS[q.dtype, head_dim]}>"
    _ONLINE[q.dtype, head_dim].launch(name, q.device, len(q), 32, args, outputs=("out",))
    return out


def paged_attention(
    q: Tensor, pages: Tensor, table: Tensor, length: Tensor, out: Tensor | None = None, *, appended: int = 0
) -> Tensor:
    """softmax(q kᵀ / √head_dim) v over a paged cache, with a block a KV head (lesson 05, step 1).

    Pages: Kwon et al., 2023 (arXiv 2309.06180).

    Args:
        q: (heads, head_dim) float16 or bfloat16; head_dim is 64 or 128.
        pages: (pages, kv_heads, 2, 16, head_dim) of the same dtype and device: one layer of a `PagedKV.pool`.
        table: (max_pages) int32, the page of each 16 tokens.
        length: (1) int32, tokens that count.
        out: (heads, head_dim), where to write; a new tensor by default.
        appended: tokens that count beyond `length`, 1 after `rope_append`.

    Returns:
        As `attention_online`.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it. What `table` and `length` hold is
            looked at on a CPU only; on a GPU that is `PagedKV`'s to know, and a length over the table counts as a full
            table.
    """
    head_dim, kv_heads, group, out = _paged(q, pages, table, length, out, appended)
    args = (q, pages, table, length, out, head_dim**-0.5, appended, len(table))
    name = f"paged_attention<{_LAYOUTS[q.dtype, head_dim]}>"
    _PAGED[q.dtype, head_dim].launch(name, q.device, kv_heads, 32 * group, args, outputs=("out",))
    return out


def paged_attention_split(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: Tensor,
    out: Tensor | None = None,
    *,
    appended: int = 0,
    splits: int | None = None,
) -> Tensor:
    """As `paged_attention`, the pages of a KV head shared among `splits` blocks (lesson 05, step 2).

    Two launches, the second adds the splits up. Flash-Decoding: Dao, Haziza, Massa & Sizov, 2023.

    Args:
        splits: blocks for each KV head; by default `choose_splits` for a full table.
    """
    head_dim, kv_heads, group, out = _paged(q, pages, table, length, out, appended)
    tail = (head_dim**-0.5, appended, len(table))
    return _split("split", q, pages, table, length, out, tail, kv_heads, 32 * group, splits)


def paged_attention_prefetch(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: Tensor,
    out: Tensor | None = None,
    *,
    appended: int = 0,
    splits: int | None = None,
) -> Tensor:
    """As `paged_attention_split`, with 16-byte loads and the next page on its way (lesson 05, step 3)."""
    head_dim, kv_heads, group, out = _paged(q, pages, table, length, out, appended)
    tail = (head_dim**-0.5, appended, group, len(table))
    return _split("prefetch", q, pages, table, length, out, tail, kv_heads, 256, splits)


def paged_attention_ring(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: Tensor,
    out: Tensor | None = None,
    *,
    appended: int = 0,
    splits: int | None = None,
    timestamps: Tensor | None = None,
) -> Tensor:
    """As `paged_attention_split`, by specialised warps: one fetches pages, six compute (lesson 05, step 4).

    Pages come by bulk copies, which report to an mbarrier (sm_90).

    Args:
        timestamps: (fills, 7, 3) int64 for a picture of the first block: the clock at which each warp (the producer is
            the last) began to wait for a fill of the ring, had it, and was done with it. Fills are K and V in turn.
            What the block does not come to stays as it was.

    Raises:
        RuntimeError: a GPU that has no bulk copies (before sm_90).
    """
    return _ring(True, q, pages, table, length, out, appended, splits, timestamps)


def paged_attention_cp_async(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: Tensor,
    out: Tensor | None = None,
    *,
    appended: int = 0,
    splits: int | None = None,
    timestamps: Tensor | None = None,
) -> Tensor:
    """As `paged_attention_ring`, the same bits; pages come by `cp.async`, which GPUs have from sm_80 on."""
    return _ring(False, q, pages, table, length, out, appended, splits, timestamps)


def paged_attention_mma(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: Tensor,
    out: Tensor | None = None,
    *,
    appended: int = 0,
    splits: int | None = None,
    workspace: Workspace | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `paged_attention_split`, on tensor cores and in one launch (lesson 05, step 5).

    exp(s − max) is rounded to the dtype of q before it meets the values.

    Args:
        splits: blocks for each KV head; by default what `workspace` was made for, or `choose_splits` for a full table.
        workspace: of `attention_workspace`; a new one by default, which costs a launch that fills it with zeros.
        pdl: let the launch overlap the end of the kernel before it (programmatic dependent launch). That kernel must
            not write length, table or, with `appended`, any page but the last.
    """
    head_dim, kv_heads, group, out = _paged(q, pages, table, length, out, appended)
    workspace, splits = _workspace(workspace, splits, table, kv_heads, head_dim, q.dtype, q.device)
    args = (q, None, None, None, pages, table, length, out, *workspace, head_dim**-0.5 * LOG2_E)
    tail = (appended, group, len(table), 0)
    name = f"paged_attention_mma<{_LAYOUTS[q.dtype, head_dim]}, false>"
    _MMA[q.dtype, head_dim].launch(name, q.device, (splits, kv_heads), 256, (*args, *tail), pdl=pdl, outputs=("out",))
    return out


def rope_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor,
    table: Tensor,
    pages: Tensor,
    out: Tensor | None = None,
    *,
    splits: int | None = None,
    workspace: Workspace | None = None,
    pdl: bool = False,
) -> Tensor:
    """`rope_append` and then `paged_attention_mma`, the same bits, in one launch.

    Args:
        qkv: (heads + 2 kv_heads, head_dim), or flat: query heads, keys, values, biases added; float32.
        cos, sin, length, table, pages: as `rope_append`.
        out: (heads, head_dim) of the dtype of pages; a new tensor by default.
        splits, workspace: as `paged_attention_mma`.
        pdl: let the launch overlap the end of the kernel before it (programmatic dependent launch). That kernel must
            not write length, table, cos, sin or pages.

    Returns:
        out.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it. On a GPU, a position past the table
            or past cos stores nothing and fills out with NaN.
    """
    heads, qkv = _check_rope(qkv, cos, sin, length, table, pages, float_only=True)
    (_, kv_heads, _, _, head_dim), device, dtype = pages.shape, pages.device, pages.dtype
    if out is None:
        out = torch.empty(heads, head_dim, dtype=dtype, device=device)
    check_tensor("out", out, (heads, head_dim), (dtype,), device, alignment=4)
    for name, tensor in {"qkv": qkv, "pages": pages}.items():
        if overlap(out, tensor):
            raise ValueError(f"out overlaps {name}; blocks would read what others have already written")
    workspace, splits = _workspace(workspace, splits, table, kv_heads, head_dim, dtype, device)
    args = (None, qkv, cos, sin, pages, table, length, out, *workspace, head_dim**-0.5 * LOG2_E)
    tail = (1, heads // kv_heads, len(table), len(cos))
    name = f"paged_attention_mma<{_LAYOUTS[dtype, head_dim]}, true>"
    _MMA[dtype, head_dim].launch(name, device, (splits, kv_heads), 256, (*args, *tail), pdl=pdl, outputs=("out",))
    return out


def attention_workspace(
    kv_heads: int, head_dim: int, splits: int, dtype: torch.dtype, device: torch.device | str
) -> Workspace:
    """A workspace for `paged_attention_mma` with `splits` blocks for each KV head.

    Raises:
        ValueError: no splits, or more than 512.
    """
    _check_splits(splits)
    return Workspace(
        torch.empty(kv_heads, splits, MAX_GROUP * head_dim, dtype=dtype, device=device),
        torch.empty(kv_heads, splits, MAX_GROUP, device=device),
        torch.zeros(kv_heads, dtype=torch.int32, device=device),
    )


@functools.lru_cache
def choose_splits(length: int, kv_heads: int, sms: int, blocks_per_sm: int = 1, least_pages: int = 1) -> int:
    """Blocks that share the pages of a KV head, for `length` tokens on a GPU of `sms` multiprocessors.

    As many as the GPU holds at once, but none with less than `least_pages`. Inside a captured graph choose for the
    longest length: splits that have no pages yet cost a block that ends at once.
    """
    most = -(-length // (PAGE_SIZE * least_pages))
    return max(1, min(most, sms * blocks_per_sm // kv_heads, MAX_SPLITS))


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor,
    table: Tensor,
    pages: Tensor,
    q: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Turn q and k by the token's position, `length`, and store k and v in the token's page (lesson 05).

    Args:
        qkv: (heads + 2 kv_heads, head_dim), or flat: query heads, keys, values, biases added; float32 or the dtype of
            pages.
        cos, sin: (positions, head_dim) float32: `nanoqwen.reference.rope_tables` of positions 0, 1, ...
        length: (1) int32, the position; it stays as it is.
        table: (max_pages) int32.
        pages: (pages, kv_heads, 2, 16, head_dim) float16 or bfloat16, where k and v go.
        q: (heads, head_dim) of the dtype of pages, where the turned q goes; a new tensor by default.
        pdl: as `paged_attention_mma`.

    Returns:
        q. The products of the rotation are rounded in fp32 as torch rounds them.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it. On a GPU, a position past the table
            or past cos stores nothing and fills q with NaN.
    """
    heads, qkv = _check_rope(qkv, cos, sin, length, table, pages)
    (_, kv_heads, _, _, head_dim), device, dtype = pages.shape, pages.device, pages.dtype
    if q is None:
        q = torch.empty(heads, head_dim, dtype=dtype, device=device)
    check_tensor("q", q, (heads, head_dim), (dtype,), device)
    if overlap(q, qkv):
        raise ValueError("q overlaps qkv; threads would read what others have already written")
    source = "float" if qkv.dtype == torch.float32 else _C_NAMES[dtype]
    args = (qkv, cos, sin, length, table, q, pages, heads, kv_heads, len(cos), len(table))
    name = f"rope_append<{source}, {_LAYOUTS[dtype, head_dim]}>"
    _ROPE[dtype, head_dim].launch(name, device, len(qkv), head_dim // 2, args, pdl=pdl, outputs=("q",))
    return q


def _check_rope(qkv, cos, sin, length, table, pages, float_only=False) -> tuple[int, Tensor]:
    """The number of query heads, and qkv with a row a head, after all checks."""
    _check_pages(pages)
    kv_heads, head_dim, device = pages.shape[1], pages.shape[4], pages.device
    dtypes = _FLOAT if float_only else (torch.float32, pages.dtype)
    if isinstance(qkv, Tensor) and qkv.dim() == 1 and len(qkv) % head_dim == 0:
        qkv = qkv.unflatten(0, (-1, head_dim))
    check_tensor("qkv", qkv, ("heads + 2 kv_heads", head_dim), dtypes, device)
    heads = len(qkv) - 2 * kv_heads
    if heads < 1:
        raise ValueError(f"qkv has {len(qkv)} heads; {kv_heads} KV heads need {2 * kv_heads} and those of the queries")
    _group(heads, kv_heads)
    check_tensor("cos", cos, ("positions", head_dim), _FLOAT, device)
    check_tensor("sin", sin, tuple(cos.shape), _FLOAT, device)
    _check_table(pages, table, length, 1)
    if length.is_cpu and int(length) >= len(cos):
        raise ValueError(f"length is {int(length)}; cos and sin have {len(cos)} positions")
    return heads, qkv


def _split(step, q, pages, table, length, out, tail, kv_heads, block, splits) -> Tensor:
    if splits is None:
        splits = choose_splits(len(table) * PAGE_SIZE, kv_heads, sms(q.device), BLOCKS_PER_SM)
    _check_splits(splits)
    key = q.dtype, q.shape[1]
    name = f"paged_attention_{step}<{_LAYOUTS[key]}>"
    return _launch_splits(_PAGED[key], name, block, q, (pages, table, length), out, tail, (kv_heads, splits))


def _ring(bulk, q, pages, table, length, out, appended, splits, timestamps) -> Tensor:
    head_dim, kv_heads, group, out = _paged(q, pages, table, length, out, appended)
    if splits is None:
        room = len(table) * PAGE_SIZE
        splits = choose_splits(room, kv_heads, sms(q.device), RING_BLOCKS_PER_SM, least_pages=CONSUMERS)
    _check_splits(splits)
    if timestamps is not None:
        check_tensor("timestamps", timestamps, ("fills", CONSUMERS + 1, 3), _INT64, q.device)
    if bulk and q.is_cuda and (have := torch.cuda.get_device_capability(q.device)) < (9, 0):
        raise RuntimeError(f"bulk copies need sm_90, this GPU is sm_{have[0]}{have[1]}: use paged_attention_cp_async")
    program = _RING[q.dtype, head_dim, group, bulk]
    name = f"paged_attention_ring<{_LAYOUTS[q.dtype, head_dim]}, {group}, {str(bulk).lower()}>"
    tail = (timestamps, head_dim**-0.5, appended, len(table), 0 if timestamps is None else len(timestamps))
    shared = STAGES * CONSUMERS * PAGE_SIZE * head_dim * q.element_size()
    cache, grid = (pages, table, length), (kv_heads, splits)
    return _launch_splits(program, name, 32 * RING_WARPS, q, cache, out, tail, grid, shared_bytes=shared)


def _launch_splits(program, name, block, q, cache, out, tail, grid, **how) -> Tensor:
    """A kernel that leaves an answer for each split, and the one that adds them up."""
    (heads, head_dim), device, splits = q.shape, q.device, grid[1]
    partial = torch.empty(splits, heads, head_dim, device=device)
    lse = torch.empty(splits, heads, device=device)
    program.launch(name, device, grid, block, (q, *cache, partial, lse, *tail), outputs=("partial", "lse"), **how)
    name, args = f"combine_splits<{_LAYOUTS[q.dtype, head_dim]}>", (partial, lse, out, splits)
    _PAGED[q.dtype, head_dim].launch(name, device, heads, head_dim, args, outputs=("out",))
    return out


def _paged(q, pages, table, length, out, appended) -> tuple[int, int, int, Tensor]:
    """head_dim, KV heads, query heads of each, and the output, after all checks."""
    head_dim = _check_q(q)
    _check_pages(pages, head_dim, q)
    kv_heads = pages.shape[1]
    group = _group(len(q), kv_heads)
    _check_table(pages, table, length, appended)
    out = _output(q, out)
    if overlap(out, pages):
        raise ValueError("out overlaps pages; blocks would read what others have already written")
    return head_dim, kv_heads, group, out


def _check_q(q: Tensor) -> int:
    check_tensor("q", q, ("heads", "head_dim"), _DTYPES, alignment=ALIGNMENT)
    _check_head_dim("q", q.shape[1])
    return q.shape[1]


def _check_head_dim(name: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{name} has head_dim {head_dim}; the kernels were compiled for 64 and 128")


def _check_pages(pages: Tensor, head_dim: int | None = None, q: Tensor | None = None) -> None:
    shape = ("pages", "kv_heads", 2, "page_size", "head_dim" if head_dim is None else head_dim)
    dtypes, device = (_DTYPES, None) if q is None else ((q.dtype,), q.device)
    check_tensor("pages", pages, shape, dtypes, device, ALIGNMENT)
    if pages.shape[3] != PAGE_SIZE:
        raise ValueError(f"pages hold {pages.shape[3]} tokens each; the kernels were compiled for {PAGE_SIZE}")
    _check_head_dim("pages", pages.shape[4])


def _check_table(pages: Tensor, table: Tensor, length: Tensor, appended: int) -> None:
    check_tensor("table", table, ("max_pages",), _INT32, pages.device)
    check_tensor("length", length, (1,), _INT32, pages.device)
    tokens = _check_tokens(length, appended, len(table) * PAGE_SIZE, f"table has {len(table)} pages of {PAGE_SIZE}")
    if tokens is None:
        return
    used = table[: -(-tokens // PAGE_SIZE)]
    outside = ((used < 0) | (used >= len(pages))).nonzero()
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"table[{at}] is page {int(table[at])}; the pool has pages 0 to {len(pages) - 1}")


def _check_tokens(length: Tensor, appended: int, room: int, why: str) -> int | None:
    """How many tokens count; None where only the GPU knows."""
    if appended not in (0, 1):
        raise ValueError(f"appended is {appended!r}; it is 1 for a token that length does not count yet, or 0")
    if not length.is_cpu:
        return None
    tokens = int(length) + appended
    if not appended <= tokens <= room:
        ahead = " and one appended" if appended else ""
        raise ValueError(f"length is {int(length)} tokens{ahead}; {why}: reserve room first")
    return tokens


def _group(heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    if heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{heads // kv_heads} query heads share a KV head; the kernels take at most {MAX_GROUP}")
    return heads // kv_heads


def _output(q: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty_like(q)
    check_tensor("out", out, tuple(q.shape), (q.dtype,), q.device, alignment=4)
    if overlap(out, q):
        raise ValueError("out overlaps q; blocks would read what others have already written")
    return out


def _check_splits(splits: int) -> None:
    if not isinstance(splits, int) or not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is {splits!r}; it must be 1 to {MAX_SPLITS}")


def _workspace(workspace, splits, table, kv_heads, head_dim, dtype, device) -> tuple[Workspace, int]:
    """The workspace, checked or new, and the number of splits."""
    if workspace is None:
        if splits is None:
            splits = choose_splits(len(table) * PAGE_SIZE, kv_heads, sms(device))
        return attention_workspace(kv_heads, head_dim, splits, dtype, device), splits
    partial, lse, arrivals = workspace
    splits = lse.shape[1] if splits is None else splits
    _check_splits(splits)
    check_tensor("workspace.partial", partial, (kv_heads, splits, MAX_GROUP * head_dim), (dtype,), device, ALIGNMENT)
    check_tensor("workspace.lse", lse, (kv_heads, splits, MAX_GROUP), _FLOAT, device)
    check_tensor("workspace.arrivals", arrivals, (kv_heads,), _INT32, device)
    return workspace, splits
