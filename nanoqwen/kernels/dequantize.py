"""INT4 words of our own layouts back to a 16-bit matrix: what a prompt's many tokens are multiplied with."""

from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import Program
from nanoqwen.packing import FRAGMENT, VALUE_SHUFFLE, group_of, layout_of

LAYOUTS = (VALUE_SHUFFLE, FRAGMENT)

_WORDS_PER_BLOCK = 4 * 128
_C_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_PROGRAM = Program(
    Path("int4_dequantize.cu"),
    {f"int4_dequantize<{t}, {layout}>": "ppppiiiu" for t in _C_NAMES.values() for layout in LAYOUTS},
)


def int4_dequantize(
    words: Tensor,
    scales: Tensor,
    out: Tensor | None = None,
    *,
    rows: int | None = None,
    zeros: Tensor | None = None,
    layout: int = FRAGMENT,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(value − zero-point) · scale of each weight, rounded once.

    Args:
        words: int32 (rows, cols / 8) of the layout; "fragment" has rows rounded up to 16.
        scales: float16, (rows, cols / group) for ValueShuffle, and for "fragment" in the tiles of
            `nanoqwen.packing.tile_scales`.
        out: (rows, cols), where to write; a new tensor by default.
        rows: of the matrix, without those that fill the last tile; by default all that `words` has.
        zeros: zero-points −8…7, as the scales; None: all are 0.
        layout: ValueShuffle or "fragment"; others are refused.
        dtype: float16 or bfloat16; default: that of `out`, or float16.

    Returns:
        The weight (rows, cols), as `nn.Linear` holds it.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    if layout not in LAYOUTS:
        ours = " and ".join(f"{each} ({layout_of(each).name})" for each in LAYOUTS)
        raise ValueError(
            f"int4_dequantize was compiled for layouts {ours}; the words are said to be in layout {layout} "
            f"({layout_of(layout).name}): use nanoqwen.packing.convert"
        )
    check_tensor("words", words, ("rows", "cols / 8"), (torch.int32,))
    tall, wide = layout_of(layout).tile
    device, have, cols = words.device, words.shape[0], 8 * words.shape[1]
    rows = have if rows is None else rows
    if have % tall or not have - tall < rows <= have:
        raise ValueError(f"words have {have} rows for {rows}; layout {layout_of(layout).name} packs {tall} at a time")
    if cols % wide:
        raise ValueError(f"K = {cols} columns; layout {layout_of(layout).name} packs {wide} at a time")
    if have * cols >= 2**34:
        raise ValueError(f"words hold {have} × {cols} weights; they must be fewer than 2**34")
    form = (have // tall, "cols / group", tall) if layout == FRAGMENT else (have, "cols / group")
    check_tensor("scales", scales, form, (torch.float16,), device)
    group = group_of(cols, scales.shape[1])
    if zeros is not None:
        check_tensor("zeros", zeros, tuple(scales.shape), (torch.float16,), device)
    dtype = dtype or (torch.float16 if out is None else out.dtype)
    if dtype not in _C_NAMES:
        raise TypeError(f"dtype is {dtype}; it must be torch.float16 or torch.bfloat16")
    if out is None:
        out = torch.empty(rows, cols, dtype=dtype, device=device)
    else:
        check_tensor("out", out, (rows, cols), (dtype,), device, ALIGNMENT)
        for name, tensor in {"words": words, "scales": scales, "zeros": zeros}.items():
            if tensor is not None and overlap(out, tensor):
                raise ValueError(f"out overlaps {name}; blocks would read what others have already written")
    count = words.numel()
    args = (words, scales, zeros, out, rows, cols, group, count)
    name = f"int4_dequantize<{_C_NAMES[dtype]}, {layout}>"
    _PROGRAM.launch(name, device, -(-count // _WORDS_PER_BLOCK), 128, args, outputs=("out",))
    return out
