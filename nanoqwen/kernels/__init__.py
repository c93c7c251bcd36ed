"""One function for each kernel: CUDA tensors run on the GPU, CPU tensors on the SIMT machine, by the same source."""

from nanoqwen.kernels.gemv import gemv, gemv_coalesced, gemv_naive, gemv_rows, gemv_unrolled, gemv_vectorized

__all__ = ["gemv", "gemv_coalesced", "gemv_naive", "gemv_rows", "gemv_unrolled", "gemv_vectorized"]
