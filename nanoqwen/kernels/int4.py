"""y = W x with INT4 weights: the ladder of lesson 04, each step as a function.

The weights are words of `nanoqwen.packing` and fp16 scales, x is fp16, and y is fp32: a large activation may take a row
past 65,504, the last finite fp16.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import Program, sms
from nanoqwen.packing import FRAGMENT, GROUP_SIZES, VALUE_SHUFFLE, group_of, layout_of

MAX_TOKENS = 8  # columns of the tensor cores' tile
WARPS_PER_SM = 16  # of int4_gemm_mma, eight loads of 512 bytes each: enough in flight to cover the latency of memory
SHAPES = ((8, 1), (4, 1), (8, 2), (4, 2))  # its instances: warps a block, tiles of 16 rows a warp

_INT32, _HALF, _FLOAT, _INT8 = (torch.int32,), (torch.float16,), (torch.float32,), (torch.int8,)
_GEMV = Program(
    Path("int4_gemv.cu"),
    {f"int4_gemv_{step}": "ppppiii" for step in ("naive", "warp", "prmt", "magic")} | {"int4_gemv_dp4a": "pppppiii"},
)
_QUANTIZE_X = Program(Path("quantize_x.cu"), {"quantize_x": "pppi"})
_GEMM = {
    (group, zeros): Program(
        Path("int4_gemm.cu"),
        {f"int4_gemm_mma<{group}, {warps}, {tiles}, {zeros}>": "pppppppiii" for warps, tiles in SHAPES},
    )
    for group in GROUP_SIZES
    for zeros in ("false", "true")
}


def int4_gemv_naive(
    words: Tensor, scales: Tensor, x: Tensor, out: Tensor | None = None, *, layout: int = VALUE_SHUFFLE
) -> Tensor:
    """y = W x with one thread a row (lesson 04, step 0).

    Args:
        words: (rows, cols / 8) int32, eight values each; `nanoqwen.packing.pack` makes them.
        scales: (rows, cols / group) float16; the group, 32, 64, 128 or 256, follows from the shape.
        x: (cols) float16, of the same device.
        out: (rows) float32, where to write y; a new tensor by default.
        layout: the layout of the words; this kernel was compiled for ValueShuffle, and refuses others.

    Returns:
        y (rows) float32. Sums are taken in fp32.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    return _gemv("naive", words, scales, x, out, layout, 128)


def int4_gemv_warp(
    words: Tensor, scales: Tensor, x: Tensor, out: Tensor | None = None, *, layout: int = VALUE_SHUFFLE
) -> Tensor:
    """y = W x with a warp a row, unpacked by shifts and conversions (lesson 04, step 1). As `int4_gemv_naive`."""
    return _gemv("warp", words, scales, x, out, layout, 4)


def int4_gemv_prmt(
    words: Tensor, scales: Tensor, x: Tensor, out: Tensor | None = None, *, layout: int = VALUE_SHUFFLE
) -> Tensor:
    """y = W x with a warp a row, unpacked by byte permutes (lesson 04, step 2). As `int4_gemv_naive`."""
    return _gemv("prmt", words, scales, x, out, layout, 4)


def int4_gemv_dp4a(
    words: Tensor, scales: Tensor, x: Tensor, out: Tensor | None = None, *, layout: int = VALUE_SHUFFLE
) -> Tensor:
    """y = W x with x rounded to INT8 and four products an instruction (lesson 04, step 3).

    Two launches: `quantize_x`, then the product. Arguments as `int4_gemv_naive`; y has the rounding of x in it.
    """
    rows, cols, group, out = _matrix("int4_gemv_dp4a", words, scales, x, out, layout)
    q, x_scales = _quantize_x(x)
    args = (words, scales, q, x_scales, out, rows, cols, _log2(group))
    _GEMV.launch("int4_gemv_dp4a", words.device, -(-rows // 4), 128, args, outputs=("y",))
    return out


def int4_gemv_magic(
    words: Tensor, scales: Tensor, x: Tensor, out: Tensor | None = None, *, layout: int = VALUE_SHUFFLE
) -> Tensor:
    """y = W x with two rows a warp, unpacked into half2 (lesson 04, step 4).

    As `int4_gemv_naive`, but four products at a time are added in fp16 before they join the fp32 sum. They come
    divided by 64, so that no finite x takes them past what fp16 holds.
    """
    return _gemv("magic", words, scales, x, out, layout, 8)


def quantize_x(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations to INT8, as `int4_gemv_dp4a` wants them.

    Args:
        x: (cols) float16, cols a multiple of 32.

    Returns:
        q (cols) int8, in each octet in the order 0 4 1 5 2 6 3 7; scales (cols / 128, rounded up) float32: the largest
        magnitude of each 128 columns over 127.

    Raises:
        TypeError, ValueError: an x that does not fit.
    """
    check_tensor("x", x, ("cols",), _HALF, alignment=ALIGNMENT)
    _check_cols(x.shape[0], 32, "the kernel's loads")
    return _quantize_x(x)


def int4_gemm_mma(
    words: Tensor,
    scales: Tensor,
    x: Tensor,
    out: Tensor | None = None,
    *,
    rows: int | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    zeros: Tensor | None = None,
    layout: int = FRAGMENT,
    shape: tuple[int, int] | None = None,
) -> Tensor:
    """y = x Wᵀ (+ bias) (+ residual) for one to eight tokens, on tensor cores (lesson 04, step 5).

    Args:
        words: (rows rounded up to 16, cols / 8) int32 of the layout "fragment".
        scales: (tiles of 16 rows, cols / group, 16) float16: `nanoqwen.packing.tile_scales` makes them.
        x: (tokens, cols) or (cols) float16, at most eight tokens; cols is a multiple of 64.
        out: (tokens, rows), or (rows) where x has one dimension, float32; a new tensor by default.
        rows: of the matrix, without those that fill the last tile; by default all that `words` has.
        bias: (rows) float32, added to each token's y.
        residual: float32, of y's shape, added to y; may be `out`.
        zeros: zero-points of asymmetric groups, which are taken off the values before the scale; float16, of the
            shape of the scales and tiled alike, whole numbers −8…7.
        layout: the layout of the words; this kernel was compiled for "fragment", and refuses others.
        shape: warps a block and tiles of 16 rows a warp, one of `SHAPES`; by default chosen for the matrix.

    Returns:
        y float32. Products and sums are taken in fp32; the scales are applied in fp32.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    if shape is not None and shape not in SHAPES:
        raise ValueError(f"shape is {shape}; the kernel was compiled for {', '.join(map(str, SHAPES))}")
    group, padded, rows, out, outputs = tiled(
        "int4_gemm_mma", words, scales, x, out, rows, bias, residual, layout, zeros
    )
    warps, tiles = shape or choose(padded, sms(words.device))
    form, grid = "false" if zeros is None else "true", -(-padded // (16 * tiles))
    name = f"int4_gemm_mma<{group}, {warps}, {tiles}, {form}>"
    args = (words, scales, zeros, x, bias, residual, out, x.numel() // x.shape[-1], rows, x.shape[-1])
    _GEMM[group, form].launch(name, words.device, grid, 32 * warps, args, outputs=outputs)
    return out


@functools.lru_cache
def choose(rows: int, sms: int) -> tuple[int, int]:
    """Warps that share a row, and tiles of 16 rows that a warp takes, for a GPU of `sms` multiprocessors.

    A matrix of few rows needs more warps for each to fill the GPU; one of many shares each load of x, and each product
    that takes the offsets off, between two tiles.
    """
    tiles = -(-rows // 16)
    if 4 * tiles < WARPS_PER_SM * sms:
        return 8, 1
    return (4, 2) if 2 * tiles >= WARPS_PER_SM * sms else (4, 1)


def _gemv(step: str, words: Tensor, scales: Tensor, x: Tensor, out: Tensor | None, layout: int, per_block: int):
    name = f"int4_gemv_{step}"
    rows, cols, group, out = _matrix(name, words, scales, x, out, layout)
    args = (words, scales, x, out, rows, cols, _log2(group))
    _GEMV.launch(name, words.device, -(-rows // per_block), 128, args, outputs=("y",))
    return out


def tiled(
    name, words, scales, x, out, rows, bias, residual, layout, zeros=None, x_dtype=torch.float16, swiglu=False
) -> tuple[int, int, int, Tensor, tuple]:
    """Group, rows of all tiles, rows, output and written parameters of a product in layout 2, after all checks."""
    _check_layout(name, layout, FRAGMENT)
    check_tensor("words", words, ("rows", "cols / 8"), _INT32, alignment=ALIGNMENT)
    device, (padded, octets) = words.device, words.shape
    cols = 8 * octets
    _check_cols(cols, 64, "tiles of layout fragment")
    if padded % 16:
        raise ValueError(f"words have {padded} rows; layout fragment has 16 in a tile: use nanoqwen.packing.pack")
    rows = padded if rows is None else rows
    if not padded - 16 < rows <= padded:
        raise ValueError(f"rows is {rows}; words with {padded} rows, in tiles of 16, hold {padded - 15} to {padded}")
    check_tensor("scales", scales, (padded // 16, "cols / group", 16), _HALF, device, ALIGNMENT)
    group = group_of(cols, scales.shape[1])
    _check_size(padded, cols)

    flat = not (isinstance(x, Tensor) and x.dim() == 2)
    tokens = 1 if flat else x.shape[0]
    check_tensor("x", x, (cols,) if flat else ("tokens", cols), (x_dtype,), device, ALIGNMENT)
    if tokens > MAX_TOKENS:
        raise ValueError(f"x has {tokens} tokens; a call takes at most {MAX_TOKENS}: split it, or dequantise")
    if swiglu and rows % 32:
        raise ValueError(f"rows is {rows}; SwiGLU needs a multiple of 32: 16 of the gate and 16 that it multiplies")
    width, y_dtype = (rows // 2, torch.float16) if swiglu else (rows, torch.float32)
    y_shape = (width,) if flat else (tokens, width)
    if zeros is not None:
        check_tensor("zeros", zeros, tuple(scales.shape), _HALF, device, ALIGNMENT)
    if bias is not None:
        check_tensor("bias", bias, (rows,), _FLOAT, device)
    if residual is not None:
        check_tensor("residual", residual, y_shape, _FLOAT, device)
    in_place = False
    if out is None:
        out = torch.empty(y_shape, dtype=y_dtype, device=device)
    else:
        in_place = residual is not None and isinstance(out, Tensor) and out.data_ptr() == residual.data_ptr()
        inputs = {"words": words, "scales": scales, "zeros": zeros, "x": x, "bias": bias}
        _check_out(out, y_shape, device, inputs | ({} if in_place else {"residual": residual}), y_dtype)
    return group, padded, rows, out, () if in_place else ("y",)


def _quantize_x(x: Tensor) -> tuple[Tensor, Tensor]:
    cols = x.shape[0]
    q = torch.empty(cols, dtype=torch.int8, device=x.device)
    scales = torch.empty(-(-cols // 128), dtype=torch.float32, device=x.device)
    _QUANTIZE_X.launch("quantize_x", x.device, -(-cols // 512), 128, (x, q, scales, cols), outputs=("q", "scales"))
    return q, scales


def _matrix(
    name: str, words: Tensor, scales: Tensor, x: Tensor, out: Tensor | None, layout: int
) -> tuple[int, int, int, Tensor]:
    """Rows, columns, group and output of a GEMV in layout 1, after all checks."""
    _check_layout(name, layout, VALUE_SHUFFLE)
    check_tensor("words", words, ("rows", "cols / 8"), _INT32, alignment=ALIGNMENT)
    device, (rows, octets) = words.device, words.shape
    cols = 8 * octets
    _check_cols(cols, 32, "16-byte loads")
    check_tensor("scales", scales, (rows, "cols / group"), _HALF, device)
    group = group_of(cols, scales.shape[1])
    check_tensor("x", x, (cols,), _HALF, device, ALIGNMENT)
    _check_size(rows, cols)
    if out is None:
        return rows, cols, group, torch.empty(rows, dtype=torch.float32, device=device)
    _check_out(out, (rows,), device, {"words": words, "scales": scales, "x": x})
    return rows, cols, group, out


def _check_layout(name: str, layout: int, wanted: int) -> None:
    if layout != wanted:
        ours, theirs = layout_of(wanted), layout_of(layout)
        raise ValueError(
            f"{name} was compiled for layout {wanted} ({ours.name}); the words are said to be in layout {layout} "
            f"({theirs.name}): use nanoqwen.packing.convert"
        )


def _check_cols(cols: int, multiple: int, why: str) -> None:
    if cols % multiple:
        raise ValueError(f"K = {cols} columns; {why} need a multiple of {multiple}: pad the columns with zeros")


def _check_size(rows: int, cols: int) -> None:
    if rows >= 2**31 or cols >= 2**27:
        raise ValueError(f"the matrix has {rows} rows and {cols} columns; the limits are 2**31 and 2**27")


def _check_out(
    out: Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    inputs: dict[str, Tensor | None],
    dtype: torch.dtype = torch.float32,
) -> None:
    check_tensor("out", out, shape, (dtype,), device)
    for name, tensor in inputs.items():
        if tensor is not None and overlap(out, tensor):
            raise ValueError(f"out overlaps {name}; blocks would read what others have already written")


def _log2(n: int) -> int:
    return n.bit_length() - 1
