"""Attention over a paged KV cache by specialised warps: one fetches pages into a ring, six compute (lesson 05).

The cache is a pool of pages, (layers, pages, kv_heads, 2, 16, head_dim): of 16 tokens of one KV head the keys, and then
the values.
"""

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import Program, sms

PAGE_SIZE, HEAD_DIMS, MAX_GROUP = 16, (64, 128), 8
CONSUMERS, WARPS, STAGES, SLICES = 6, 8, 3, 4  # as in csrc/paged_attention_ring.cu
BLOCKS_PER_SM = 2
MAX_PAGES = 2**20

_DTYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_INT32, _FLOAT, _INT64 = (torch.int32,), (torch.float32,), (torch.int64,)


@functools.cache
def _program(dtype: torch.dtype, head_dim: int, group: int, bulk: bool) -> tuple[Program, str, str]:
    """The program of one kind of heads, and the names of its two kernels."""
    name = _DTYPES[dtype]
    ring = f"paged_attention_ring<{name}, {head_dim}, {group}, {str(bulk).lower()}>"
    combine = f"combine_splits<{name}, {head_dim}>"
    return Program(Path("paged_attention_ring.cu"), {ring: "pppppppfiii", combine: "pppi"}), ring, combine


def paged_attention_ring(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    length: Tensor,
    out: Tensor | None = None,
    *,
    layer: int = 0,
    appended: int = 0,
    splits: int | None = None,
    timestamps: Tensor | None = None,
) -> Tensor:
    """Attention of one query over a paged cache; pages come by bulk copies that report to an mbarrier (lesson 05).

    Two launches: the ring, which leaves a result for each split, then a kernel that combines them.

    Args:
        q: (heads, head_dim) float16 or bfloat16; head_dim is 64 or 128. One to eight heads share a KV head.
        pool: (layers, pages, kv_heads, 2, 16, head_dim) of q's dtype. What lies past the length is never used.
        page_table: (max_pages) int32, the pages of the sequence in order.
        length: (1) int32, the tokens in the cache. It is read by the kernel, so that a captured graph sees it change; a
            length that the page table cannot hold is taken for all that it can. No token at all gives zeros.
        out: (heads, head_dim) of q's dtype; a new tensor by default.
        layer: whose pages.
        appended: tokens in the cache that `length` does not count yet.
        splits: how many blocks share a KV head's pages; by default as many as the GPU holds at once.
        timestamps: (fills, 7, 3) int64 for a picture of the first block: the clock at which each warp (the producer is
            the last) began to wait for a fill of the ring, had it, and was done with it. Fills are K and V in turn.
            What the block does not come to stays as it was.

    Returns:
        (heads, head_dim). Sums are taken in fp32, with the scale 1 / sqrt(head_dim).

    Raises:
        RuntimeError: a GPU that has no bulk copies (before sm_90).
        TypeError, ValueError: an argument that does not fit; the message names it. The values of `page_table` and
            `length` are looked at on a CPU alone: on a GPU that would be a synchronisation.
    """
    return _attend("paged_attention_ring", q, pool, page_table, length, out, layer, appended, splits, timestamps)


def paged_attention_cp_async(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    length: Tensor,
    out: Tensor | None = None,
    *,
    layer: int = 0,
    appended: int = 0,
    splits: int | None = None,
    timestamps: Tensor | None = None,
) -> Tensor:
    """As `paged_attention_ring`, the same bits; pages come by `cp.async`, which GPUs have from sm_80 on (lesson 05)."""
    return _attend("paged_attention_cp_async", q, pool, page_table, length, out, layer, appended, splits, timestamps)


def _attend(name, q, pool, page_table, length, out, layer, appended, splits, timestamps) -> Tensor:
    bulk = name == "paged_attention_ring"
    check_tensor("q", q, ("heads", "head_dim"), tuple(_DTYPES), alignment=ALIGNMENT)
    device, (heads, head_dim) = q.device, q.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; {name} was compiled for {' and '.join(map(str, HEAD_DIMS))}")
    shape = ("layers", "pages", "kv_heads", 2, PAGE_SIZE, head_dim)
    check_tensor("pool", pool, shape, (q.dtype,), device, ALIGNMENT)
    layers, pages, kv_heads = pool.shape[:3]
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{heads} query heads and {kv_heads} KV heads; one to {MAX_GROUP} must share a KV head")
    if not 0 <= layer < layers:
        raise ValueError(f"layer is {layer}; the pool has layers 0 to {layers - 1}")
    check_tensor("page_table", page_table, ("max_pages",), _INT32, device)
    check_tensor("length", length, (1,), _INT32, device)
    max_pages = page_table.numel()
    if max_pages > MAX_PAGES:
        raise ValueError(f"page_table has {max_pages} pages; the limit is {MAX_PAGES}")
    if appended < 0:
        raise ValueError(f"appended is {appended}; it must be at least 0")
    if splits is not None and not 1 <= splits <= 65535:
        raise ValueError(f"splits is {splits}; it must be 1 to 65535")
    if device.type == "cpu":
        _check_values(page_table, int(length) + appended, pages)
    if out is None:
        out = torch.empty_like(q)
    else:
        check_tensor("out", out, (heads, head_dim), (q.dtype,), device)
        for other, tensor in (("q", q), ("pool", pool), ("page_table", page_table), ("length", length)):
            if overlap(out, tensor):
                raise ValueError(f"out shares memory with {other}; it must be a tensor of its own")
    if timestamps is not None:
        check_tensor("timestamps", timestamps, ("fills", CONSUMERS + 1, 3), _INT64, device)
    if bulk and q.is_cuda and (have := torch.cuda.get_device_capability(device)) < (9, 0):
        raise RuntimeError(f"{name} needs sm_90, this GPU is sm_{have[0]}{have[1]}: use paged_attention_cp_async")

    splits = splits or choose_splits(max_pages, kv_heads, sms(device))
    partial = torch.empty(splits, heads, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(splits, heads, dtype=torch.float32, device=device)
    program, ring, combine = _program(q.dtype, head_dim, heads // kv_heads, bulk)
    program.launch(
        ring,
        device,
        (kv_heads, splits),
        32 * WARPS,
        (
            *(q, pool[layer], page_table, length, partial, lse, timestamps),
            *(1 / math.sqrt(head_dim), appended, max_pages, 0 if timestamps is None else len(timestamps)),
        ),
        shared_bytes=STAGES * CONSUMERS * PAGE_SIZE * head_dim * q.element_size(),
        outputs=("partial", "lse"),
    )
    program.launch(combine, device, heads, SLICES * head_dim, (partial, lse, out, splits), outputs=("out",))
    return out


def choose_splits(max_pages: int, kv_heads: int, sms: int) -> int:
    """Blocks that share a KV head's pages: all that the GPU holds at once, but a page for each of their warps."""
    return max(1, min(BLOCKS_PER_SM * sms // kv_heads, -(-max_pages // CONSUMERS)))


def _check_values(page_table: Tensor, tokens: int, pages: int) -> None:
    if not 1 <= tokens <= page_table.numel() * PAGE_SIZE:
        capacity = page_table.numel() * PAGE_SIZE
        raise ValueError(f"length is {tokens} tokens; a page table of {page_table.numel()} holds 1 to {capacity}")
    used = page_table[: -(-tokens // PAGE_SIZE)]
    if int(used.min()) < 0 or int(used.max()) >= pages:
        wrong = int(used.min()) if int(used.min()) < 0 else int(used.max())
        raise ValueError(f"page_table names page {wrong}; the pool has pages 0 to {pages - 1}")
