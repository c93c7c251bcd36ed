"""Activations for kernels that take fp16: of any range, scaled on the way there and back, and SwiGLU of a prompt."""

from pathlib import Path

import torch
from torch import Tensor

from nanoqwen.kernels.arguments import ALIGNMENT, check_tensor, overlap
from nanoqwen.kernels.launch import Program

_C_NAMES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
_PROGRAM = Program(
    Path("half_x.cu"),
    {f"half_x<{t}>": "pppi" for t in _C_NAMES.values()} | {f"widen_y<{t}>": "ppppi" for t in _C_NAMES.values()},
)
_SWIGLU = Program(Path("swiglu.cu"), {f"swiglu<{t}>": "ppfu" for t in _C_NAMES.values()})
_SWIGLU_THREADS = 256


def half_x(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in fp16, each token times the power of two that takes its largest magnitude to 2^14 … 2^15.

    A bf16 x keeps all its bits down to 2^−28 of the largest, if that is 2^−112 or more; NaN and infinity stay what they
    are. The host does not wait for the power.

    Args:
        x: (tokens, cols) bfloat16, float32 or float16.

    Returns:
        (tokens, cols) float16, and what undoes it: (tokens) float32.

    Raises:
        TypeError, ValueError: an x that does not fit.
    """
    check_tensor("x", x, ("tokens", "cols"), tuple(_C_NAMES))
    tokens, cols = x.shape
    made = torch.empty(tokens, cols, dtype=torch.float16, device=x.device)
    back = torch.empty(tokens, dtype=torch.float32, device=x.device)
    name = f"half_x<{_C_NAMES[x.dtype]}>"
    _PROGRAM.launch(name, x.device, tokens, 1024, (x, made, back, cols), outputs=("out", "back"))
    return made, back


def widen_y(y: Tensor, back: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """y · back (+ bias), taken in fp32 and rounded once to `dtype`.

    Args:
        y: (tokens, rows) float32. back: (tokens) float32, of `half_x`. bias: (rows) float32.
        dtype: bfloat16, float32 or float16.

    Raises:
        TypeError, ValueError: an argument that does not fit.
    """
    if dtype not in _C_NAMES:
        raise TypeError(f"dtype is {dtype}; it must be one of {', '.join(map(str, _C_NAMES))}")
    check_tensor("y", y, ("tokens", "rows"), (torch.float32,))
    tokens, rows = y.shape
    check_tensor("back", back, (tokens,), (torch.float32,), y.device)
    if bias is not None:
        check_tensor("bias", bias, (rows,), (torch.float32,), y.device)
    out = torch.empty(tokens, rows, dtype=dtype, device=y.device)
    grid, args = (-(-rows // 256), tokens), (y, back, bias, out, rows)
    _PROGRAM.launch(f"widen_y<{_C_NAMES[dtype]}>", y.device, grid, 256, args, outputs=("out",))
    return out


def swiglu(gate_up: Tensor, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """silu(gate) · up · factor of a prompt's tokens, taken in fp32 and rounded once.

    Args:
        gate_up: (tokens, 2 inner) float16, bfloat16 or float32, its columns 16 of the gate, 16 of up, and so on, as the
            product with `engine_weights.Layer.gate_up` leaves them.
        factor: a power of two below 1 keeps what is over 65504 in the range of fp16.
        out: (tokens, inner) float16, where to write; a new tensor by default.

    Returns:
        (tokens, inner) float16.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
    """
    check_tensor("gate_up", gate_up, ("tokens", "2 inner"), tuple(_C_NAMES), alignment=ALIGNMENT)
    tokens, width = gate_up.shape
    if width % 32:
        raise ValueError(f"gate_up has {width} columns; it must have a multiple of 32: 16 of the gate and 16 of up")
    if gate_up.numel() >= 2**34:
        raise ValueError(f"gate_up holds {tokens} × {width} numbers; they must be fewer than 2**34: split the tokens")
    if out is None:
        out = torch.empty(tokens, width // 2, dtype=torch.float16, device=gate_up.device)
    else:
        check_tensor("out", out, (tokens, width // 2), (torch.float16,), gate_up.device, ALIGNMENT)
        if overlap(out, gate_up):
            raise ValueError("out overlaps gate_up; blocks would read what others have already written")
    count = out.numel() // 8
    name, grid = f"swiglu<{_C_NAMES[gate_up.dtype]}>", -(-count // _SWIGLU_THREADS)
    _SWIGLU.launch(name, gate_up.device, grid, _SWIGLU_THREADS, (gate_up, out, factor, count), outputs=("out",))
    return out
