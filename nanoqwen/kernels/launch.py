"""Compile a kernel of `csrc/` for the machine at hand, and launch it there.

The tensors' device chooses the machine. CUDA: NVRTC through CuPy, launched on torch's current stream. CPU: the SIMT
machine (`nanoqwen.simt`). Both take the same list of argument addresses, as `cuLaunchKernel` does.
"""

import ctypes
import functools
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoqwen import simt
from nanoqwen.paths import CSRC, cache_dir

Dim = int | tuple[int, ...]

_LOOK_AGAIN_S = 0.5  # how long a compiled kernel is used before its sources' dates are looked at again


@dataclass(frozen=True)
class Kernel:
    """A kernel by the name that NVRTC knows it by.

    Args:
        source: the file under `csrc/`.
        name: an `extern "C"` name, or a template instance such as `gemv_naive<float>`.
        params: one letter a parameter: p pointer (a tensor or None), i int, u unsigned, l long long, f float.
    """

    source: str
    name: str
    params: str

    def launch(
        self, device: torch.device, grid: Dim, block: Dim, args: Sequence, *, shared_bytes: int = 0
    ) -> None:
        """Run the kernel over `grid` blocks of `block` threads; on CUDA this returns before it has run.

        Raises:
            ValueError: an empty grid or block, or one over the machine's limits.
            RuntimeError: no machine to run it on, or the driver refused the launch.
            nanoqwen.simt.CompileError: the source does not compile; file, line and the compiler's words.
        """
        if device.type == "cuda":
            _gpu_function(self, device.index or 0).launch(grid, block, args, shared_bytes)
        else:
            simt.launch(CSRC / self.source, self.name, grid, block, _packed(self, args), shared_bytes=shared_bytes)


_C_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
}
