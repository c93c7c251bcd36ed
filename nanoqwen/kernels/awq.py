"""AWQ's 4-bit weights back to 16 bits: three kernels of lesson 08, and the launch that is fastest for the shape."""

from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.autotune import Tuner
from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import Program

SOURCE = Path("awq_dequantize.cu")
GROUPS = (32, 64, 128)  # rows that share a zero-point and a scale
ROWS = (1, 2, 4, 8)  # words a thread of the last step: its instances
BLOCKS = (64, 128, 256, 512)
PER_WORD = 8

_C_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_PARAMS = "ppppiii"
_PROGRAMS = {
    dtype: Program(
        SOURCE,
        {f"awq_v1<{t}>": _PARAMS, f"awq_v2<{t}>": _PARAMS} | {f"awq_v3<{t}, {rows}>": _PARAMS for rows in ROWS},
    )
    for dtype, t in _C_NAMES.items()
}


def awq_dequantize_v1(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, out: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """(q − z) · s with one thread an element (lesson 08, step 1).

    Args:
        qweight: (rows, cols / 8) int32, eight columns a word in AWQ's order; rows are what x is multiplied with.
        qzeros: (rows / group, cols / 8) int32, packed alike; the group is 32, 64 or 128 rows.
        scales: (rows / group, cols) float16.
        out: (rows, cols), where to write; a new tensor by default.
        dtype: float16 or bfloat16; default: that of `out`, or float16.

    Returns:
        The weight (rows, cols): y = x @ weight, and its transpose is what `nn.Linear` holds. Each element is the
        exact product, rounded once.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    rows, cols, group, out = _arguments(qweight, qzeros, scales, out, dtype, alignment=1)
    _launch("awq_v1<{}>", rows * cols, 256, qweight, qzeros, scales, out, group)
    return out


def awq_dequantize_v2(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, out: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """(q − z) · s with one thread a word (lesson 08, step 2).

    As `awq_dequantize_v1`; scales and out start at a multiple of 16 bytes.
    """
    rows, cols, group, out = _arguments(qweight, qzeros, scales, out, dtype)
    _launch("awq_v2<{}>", rows * cols // PER_WORD, 256, qweight, qzeros, scales, out, group)
    return out


def awq_dequantize_v3(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    block: int = 128,
    rows: int = 4,
) -> Tensor:
    """(q − z) · s with `rows` words a thread and `block` threads a block (lesson 08, step 3). As `awq_dequantize_v2`.

    Args:
        block: 1 to 1024.
        rows: 1, 2, 4 or 8 words, one below the other.
    """
    height, cols, group, out = _arguments(qweight, qzeros, scales, out, dtype)
    if rows not in ROWS:
        raise ValueError(f"rows is {rows!r}; it must be one of {', '.join(map(str, ROWS))}")
    if not isinstance(block, int) or not 1 <= block <= 1024:
        raise ValueError(f"block is {block!r}; it must be 1 to 1024 threads")
    _launch(f"awq_v3<{{}}, {rows}>", height * cols // PER_WORD // rows, block, qweight, qzeros, scales, out, group)
    return out


def awq_dequantize(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, out: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """(q − z) · s by the launch of `awq_dequantize_v3` that is fastest on this GPU. As `awq_dequantize_v2`.

    The first call for a shape times the launches (`nanoqwen.autotune`), unless an earlier process has.
    """
    rows, cols, group, out = _arguments(qweight, qzeros, scales, out, dtype)
    launch = TUNER.choose(
        (rows, cols, group), out, lambda out, **launch: awq_dequantize_v3(qweight, qzeros, scales, out, **launch)
    )
    words = rows * cols // PER_WORD // launch["rows"]
    _launch(f"awq_v3<{{}}, {launch['rows']}>", words, launch["block"], qweight, qzeros, scales, out, group)
    return out


TUNER = Tuner(
    "awq_dequantize",
    SOURCE,
    [{"block": 128, "rows": 4}]  # the default: what a machine without a clock takes
    + [{"block": block, "rows": rows} for block in BLOCKS for rows in ROWS if (block, rows) != (128, 4)],
)


def _launch(
    name: str, threads: int, block: int, qweight: Tensor, qzeros: Tensor, scales: Tensor, out: Tensor, group: int
) -> None:
    args = (qweight, qzeros, scales, out, *out.shape, group)
    name = name.format(_C_NAMES[out.dtype])
    _PROGRAMS[out.dtype].launch(name, out.device, -(-threads // block), block, args, outputs=("out",))


def _arguments(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    out: Tensor | None,
    dtype: torch.dtype | None,
    alignment: int = ALIGNMENT,
) -> tuple[int, int, int, Tensor]:
    check_tensor("qweight", qweight, ("rows", "cols / 8"), (torch.int32,))
    device, (rows, words) = qweight.device, qweight.shape
    cols = words * PER_WORD
    check_tensor("qzeros", qzeros, ("rows / group", words), (torch.int32,), device)
    groups = len(qzeros)
    if rows not in (groups * group for group in GROUPS):
        raise ValueError(
            f"qzeros has {groups} rows of groups for qweight's {rows} rows; "
            f"a group must be {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]} rows"
        )
    check_tensor("scales", scales, (groups, cols), (torch.float16,), device, alignment)
    if rows * cols >= 2**31:
        raise ValueError(f"qweight holds {rows} × {cols} weights; they must be fewer than 2**31")
    dtype = dtype or (torch.float16 if out is None else out.dtype)
    if dtype not in _C_NAMES:
        raise TypeError(f"dtype is {dtype}; it must be torch.float16 or torch.bfloat16")
    if out is None:
        return rows, cols, rows // groups, torch.empty(rows, cols, dtype=dtype, device=device)
    check_tensor("out", out, (rows, cols), (dtype,), device, alignment)
    for name, tensor in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales)):
        if overlap(out, tensor):
            raise ValueError(f"out overlaps {name}; blocks would read what others have already written")
    return rows, cols, rows // groups, out
