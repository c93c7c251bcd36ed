"""y = W x: the naive kernel of lesson 02 and the ladder of lesson 03, each as a function."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import H200_SMS as H200_SMS
from nanoqwen.kernels.launch import Program
from nanoqwen.kernels.launch import sms as sms_of

C_NAMES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
LANES, LOADS = (32, 64, 128), (7, 4, 2)  # instances of the last step
WARPS_PER_SM = 32  # with fewer than this, loads in flight do not cover the latency of memory

_PARAMS = "pppii"
_OUTPUTS = ("y",)
_DTYPES = tuple(C_NAMES)
_NAIVE = {d: Program(Path("gemv_naive.cu"), {f"gemv_naive<{t}>": _PARAMS}) for d, t in C_NAMES.items()}
_LADDER = {
    dtype: Program(
        Path("gemv.cu"),
        {f"gemv_{step}<{t}>": _PARAMS for step in ("coalesced", "vectorized", "unrolled", "rows")}
        | {f"gemv<{t}, {lanes}, {loads}>": _PARAMS for lanes in LANES for loads in LOADS},
    )
    for dtype, t in C_NAMES.items()
}


def gemv_naive(w: Tensor, x: Tensor, out: Tensor | None = None, *, block: int = 128) -> Tensor:
    """y = W x with one thread a row (lesson 02).

    Args:
        w: (rows, cols), row-major, float32, float16 or bfloat16.
        x: (cols), of the same dtype and device.
        out: (rows), where to write y; a new tensor by default.
        block: threads a block.

    Returns:
        y (rows). Sums are taken in fp32, in the order of the columns, and rounded once.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    rows, cols, out = _arguments(w, x, out, wide=False)
    grid = -(-rows // block) if block > 0 else 1
    name = f"gemv_naive<{C_NAMES[w.dtype]}>"
    _NAIVE[w.dtype].launch(name, w.device, grid, block, (w, x, out, rows, cols), outputs=_OUTPUTS)
    return out


def gemv_coalesced(w: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """y = W x with a warp a row, one element a lane (lesson 03, step 1). Arguments as `gemv_naive`."""
    return _step("coalesced", w, x, out, wide=False)


def gemv_vectorized(w: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """y = W x with 16-byte loads (lesson 03, step 2). As `gemv_naive`; a row must be a multiple of 16 bytes."""
    return _step("vectorized", w, x, out)


def gemv_unrolled(w: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """y = W x with four loads in flight (lesson 03, step 3). As `gemv_naive`; a row must be a multiple of 16 bytes."""
    return _step("unrolled", w, x, out)


def gemv_rows(w: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """y = W x with two rows a warp (lesson 03, step 4). As `gemv_naive`; a row must be a multiple of 16 bytes."""
    return _step("rows", w, x, out, rows_per_warp=2)


def gemv(w: Tensor, x: Tensor, out: Tensor | None = None, *, sms: int | None = None) -> Tensor:
    """y = W x, the launch chosen for the shape (lesson 03, step 5).

    As `gemv_naive`; a row must be a multiple of 16 bytes.

    Args:
        sms: choose as for a GPU of so many multiprocessors; default: this GPU's, or an H200's on a CPU.
    """
    rows, cols, out = _arguments(w, x, out)
    name, grid = _plan(w.dtype, rows, cols, sms or sms_of(w.device))
    _LADDER[w.dtype].launch(name, w.device, grid, 128, (w, x, out, rows, cols), outputs=_OUTPUTS)
    return out


@functools.lru_cache
def _plan(dtype: torch.dtype, rows: int, cols: int, sms: int) -> tuple[str, int]:
    """The instance of `gemv` and the number of blocks."""
    lanes, loads = choose(rows, cols * dtype.itemsize, sms)
    return f"gemv<{C_NAMES[dtype]}, {lanes}, {loads}>", -(-rows // (128 // lanes))


def choose(rows: int, row_bytes: int, sms: int) -> tuple[int, int]:
    """The lanes that share a row, and the loads each has in flight, for a GPU of `sms` multiprocessors.

    Lanes double while the GPU has too few warps to fill it and each lane would still have about two loads. Loads
    are then as many as can be without idling in the last round: at most a quarter of a row's slots.
    """
    packs = row_bytes / ALIGNMENT
    lanes = LANES[0]
    while lanes < LANES[-1] and rows * lanes / 32 < WARPS_PER_SM * sms and packs / (2 * lanes) >= 1.75:
        lanes *= 2

    def idle(loads: int) -> float:
        slots = -(-packs // (lanes * loads)) * lanes * loads
        return 1 - packs / slots

    good = [loads for loads in LOADS if idle(loads) <= 0.25]
    return lanes, good[0] if good else min(LOADS, key=idle)


def _step(step: str, w: Tensor, x: Tensor, out: Tensor | None, wide: bool = True, rows_per_warp: int = 1) -> Tensor:
    rows, cols, out = _arguments(w, x, out, wide)
    grid = -(-rows // (4 * rows_per_warp))  # blocks of 128 threads: four warps
    name = f"gemv_{step}<{C_NAMES[w.dtype]}>"
    _LADDER[w.dtype].launch(name, w.device, grid, 128, (w, x, out, rows, cols), outputs=_OUTPUTS)
    return out


def _arguments(w: Tensor, x: Tensor, out: Tensor | None, wide: bool = True) -> tuple[int, int, Tensor]:
    alignment = ALIGNMENT if wide else 1
    check_tensor("w", w, ("rows", "cols"), _DTYPES, alignment=alignment)
    (rows, cols), dtypes, device = w.shape, (w.dtype,), w.device
    check_tensor("x", x, (cols,), dtypes, device, alignment)
    if wide and cols * w.itemsize % ALIGNMENT:
        raise ValueError(
            f"w has {cols} columns of {w.itemsize} bytes; a row must be a multiple of {ALIGNMENT} bytes "
            f"({ALIGNMENT // w.itemsize} columns) for 16-byte loads: pad the columns with zeros"
        )
    if rows >= 2**31 or cols >= 2**31:
        raise ValueError(f"w has shape {tuple(w.shape)}; rows and columns must be below 2**31")
    if out is None:
        return rows, cols, torch.empty(rows, dtype=w.dtype, device=device)
    check_tensor("out", out, (rows,), dtypes, device)
    if overlap(out, w) or overlap(out, x):
        name = "w" if overlap(out, w) else "x"
        raise ValueError(f"out overlaps {name}; blocks would read what others have already written")
    return rows, cols, out
