"""The INT4 product that a decode step is made of: `int4_gemm_ring`, with what stands before and after it."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.int4 import tiled
from nanoqwen.kernels.launch import Program, sms
from nanoqwen.packing import FRAGMENT

RING_STAGES, RING_WARPS, RING_CHUNK, NORM_COLS = 2, 16, 512, 16384  # as in csrc/int4_ring.cu
SHARED_BYTES = 226 * 1024  # of the 227 KB that a block of sm_90 may have; the kernel's barriers need some of the last
_TOKENS = (1, 4, 8)  # what the kernel is compiled for
_SOURCE, _PARAMS = Path("int4_ring.cu"), "p" * 9 + "iiuiff"


def int4_gemm_ring(
    words: Tensor,
    scales: Tensor,
    x: Tensor,
    out: Tensor | None = None,
    *,
    rows: int | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    zeros: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    x_factor: float = 1.0,
    swiglu: bool = False,
    y_factor: float = 1.0,
    layout: int = FRAGMENT,
    blocks: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """y = x Wᵀ (+ bias) (+ residual) for one to eight tokens, streamed to integer tensor cores (lesson 04, step 6).

    x becomes whole numbers of 16 bits, with a scale for each group of columns; products with INT4 weights and their
    sums over a group are exact. The scales are applied, and groups added up, in fp32.

    Args:
        words: (rows rounded up to 16, cols / 8) int32 of the layout "fragment".
        scales: (tiles of 16 rows, cols / group, 16) float16: `nanoqwen.packing.tile_scales` makes them.
        x: (tokens, cols) or (cols) float16, at most eight tokens; cols is a multiple of 64. With `norm` (cols) float32.
        out: (tokens, rows), or (rows) where x has one dimension, float32; a new tensor by default.
        rows: of the matrix, without those that fill the last tile; by default all that `words` has.
        bias: (rows) float32, added to each token's y.
        residual: float32, of y's shape, added to y; may be `out`.
        zeros: zero-points of asymmetric groups, which are taken off the values before the scale; float16, of the
            shape of the scales and tiled alike, whole numbers −8…7.
        norm: (cols) float16: multiply x / √(mean of x² + eps) · norm instead of x, the RMSNorm of Qwen2.
        x_factor: what x is multiplied with.
        swiglu: the rows are 16 of a gate, 16 that it multiplies, and so on; out is (…, rows / 2) float16,
            gate · sigmoid(gate) · the other · y_factor.
        layout: the layout of the words; this kernel was compiled for "fragment", and refuses others.
        blocks: how many share the rows; by default one for each multiprocessor.
        pdl: let the kernel fill its rings while the kernel before it still runs (programmatic dependent launch). Words,
            scales, zeros and norm must have been written earlier than by that kernel.

    Returns:
        y float32, or float16 with `swiglu`.

    Raises:
        RuntimeError: a GPU that has no bulk copies (before sm_90).
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks is {blocks}; it must be at least 1")
    if norm is not None and x.dim() == 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; with a norm it is one token, (cols)")
    if swiglu and (bias is not None or residual is not None):
        raise ValueError("swiglu takes neither bias nor residual")
    x_dtype = torch.float16 if norm is None else torch.float32
    group, padded, rows, out, outputs = tiled(
        "int4_gemm_ring", words, scales, x, out, rows, bias, residual, layout, zeros, x_dtype, swiglu
    )
    device, cols, tokens = words.device, x.shape[-1], x.numel() // x.shape[-1]
    if norm is not None:
        check_tensor("norm", norm, (cols,), (torch.float16,), device, ALIGNMENT)
        if cols > NORM_COLS:
            raise ValueError(f"x has {cols} columns; a norm takes at most {NORM_COLS}")
        if overlap(out, norm):
            raise ValueError("out overlaps norm; blocks would read what others have already written")
    if device.type == "cuda" and (have := torch.cuda.get_device_capability(device)) < (9, 0):
        raise RuntimeError(f"int4_gemm_ring needs sm_90, this GPU is sm_{have[0]}{have[1]}: use int4_gemm_mma")

    unit = 32 if swiglu else 16
    units = -(-padded // unit)
    grid = min(units, blocks or sms(device))
    tiles = -(-units // grid) * (unit // 16)  # that one block has at most
    compiled = next(n for n in _TOKENS if n >= tokens)
    room, per_tile = _shared_bytes(cols, group, tokens, compiled, zeros is not None)
    groups = None
    form = "HALF_X" if norm is None else "NORM_X"
    if room < per_tile * unit // 16:  # x does not fit: split it first, and read it from global memory
        room += tokens * (2 * cols) + -(-tokens * (cols // group) // 2) * 16
        if room < per_tile * unit // 16:
            raise ValueError(
                f"x has {cols} columns; sums of {tokens} tokens for each {RING_CHUNK} do not fit: take fewer"
            )
        form, (x, groups) = "SPLIT_X", _split_x(x, group, pdl)
    slots = min(tiles, room // per_tile // (unit // 16) * (unit // 16))
    program, name = _program(group, compiled, form, swiglu, zeros is not None)
    args = (words, scales, zeros, x, norm, groups, bias, residual, out)
    program.launch(
        name,
        device,
        grid,
        32 * RING_WARPS,
        (*args, tokens, rows, cols, slots, x_factor if norm is None else eps, y_factor),
        shared_bytes=SHARED_BYTES - room + slots * per_tile,
        pdl=pdl,
        outputs=outputs,
    )
    return out


@functools.lru_cache
def overlapping_blocks(tiles: int, cols: int, sms: int) -> int:
    """Blocks of a launch among others that overlap it (`pdl`), for a matrix of so many tiles of 16 rows.

    One for each multiprocessor; but of a small matrix as many as hold all of it in their rings, if that is a third of
    them or more: the others begin with the next launch. By itself the matrix wants them all.
    """
    held = RING_WARPS * RING_STAGES // -(-cols // RING_CHUNK)  # tiles that a block's rings hold
    blocks = -(-tiles // held) if held else sms
    return blocks if sms <= 3 * blocks <= 3 * sms else sms


@functools.lru_cache
def _shared_bytes(cols: int, group: int, tokens: int, compiled: int, zeros: bool) -> tuple[int, int]:
    """Bytes of shared memory that rings and x leave (below 0: too few), and that the sums of a tile of rows take."""
    stage = RING_CHUNK * 8 + (2 if zeros else 1) * (RING_CHUNK // group * 32)
    x_bytes = tokens * 2 * cols + -(-tokens * (cols // group) // 2) * 16
    return SHARED_BYTES - RING_WARPS * RING_STAGES * stage - x_bytes, -(-cols // RING_CHUNK) * 64 * compiled


def _split_x(x: Tensor, group: int, pdl: bool) -> tuple[Tensor, Tensor]:
    octets = x.numel() // 8
    halves = torch.empty(2 * x.numel(), dtype=torch.uint8, device=x.device)
    groups = torch.empty(x.numel() // group, 2, dtype=torch.int32, device=x.device)
    _SPLIT[group].launch(
        f"split_x<{group}>", x.device, -(-octets // 128), 128, (x, halves, groups, octets), pdl=pdl, outputs=("bytes",)
    )
    return halves, groups


_SPLIT = {group: Program(_SOURCE, {f"split_x<{group}>": "pppi"}) for group in (32, 64, 128, 256)}


@functools.cache
def _program(group: int, tokens: int, form: str, swiglu: bool, zeros: bool) -> tuple[Program, str]:
    """One instance alone: each takes seconds to compile, and a model needs three or four of them."""
    name = f"int4_gemm_ring<{group}, {tokens}, {form}, {str(swiglu).lower()}, {str(zeros).lower()}>"
    return Program(_SOURCE, {name: _PARAMS}), name
