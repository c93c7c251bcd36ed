"""Checks of a kernel's arguments, made before anything is launched: a wrong call never reaches the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes of the widest load


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    alignment: int = 1,
) -> None:
    """Refuse a tensor that a kernel cannot take.

    Args:
        name: the argument's name, for the message.
        shape: wanted sizes; a string stands for any size of at least 1 and is its name in the message.
        dtypes: those allowed.
        device: where it must lie; None: anywhere that kernels run.
        alignment: bytes that its address must be a multiple of.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another device or shape, not contiguous, or not aligned.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; it must be {wanted}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}: use {name}.to({str(device)!r})")
    if device is None and not (tensor.is_cuda or tensor.is_cpu):
        raise ValueError(f"{name} is on {tensor.device}; kernels run on cuda and cpu")
    if (sizes := tensor.shape) != shape and not _matches(sizes, shape):
        wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"{name} has shape {tuple(sizes)}; it must be {wanted}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous (strides {tensor.stride()}); pass {name}.contiguous()")
    if tensor.data_ptr() % alignment:
        raise ValueError(
            f"{name} starts at an address that is no multiple of {alignment} bytes (a slice?); pass {name}.clone()"
        )


def _matches(sizes: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(sizes) != len(shape):
        return False
    for have, want in zip(sizes, shape, strict=True):
        if have != want and (isinstance(want, int) or have < 1):
            return False
    return True


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors of one device share a byte."""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes
