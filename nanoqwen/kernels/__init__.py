"""One function for each kernel: CUDA tensors run on the GPU, CPU tensors on the SIMT machine, by the same source."""

from nanoqwen.kernels.attention_ring import paged_attention_cp_async, paged_attention_ring
from nanoqwen.kernels.awq import awq_dequantize, awq_dequantize_v1, awq_dequantize_v2, awq_dequantize_v3
from nanoqwen.kernels.gemv import gemv, gemv_coalesced, gemv_naive, gemv_rows, gemv_unrolled, gemv_vectorized
from nanoqwen.kernels.int4 import (
    int4_gemm_mma,
    int4_gemm_ring,
    int4_gemv_dp4a,
    int4_gemv_magic,
    int4_gemv_naive,
    int4_gemv_prmt,
    int4_gemv_warp,
    quantize_x,
)

__all__ = [
    "awq_dequantize",
    "awq_dequantize_v1",
    "awq_dequantize_v2",
    "awq_dequantize_v3",
    "gemv",
    "gemv_coalesced",
    "gemv_naive",
    "gemv_rows",
    "gemv_unrolled",
    "gemv_vectorized",
    "int4_gemm_mma",
    "int4_gemm_ring",
    "int4_gemv_dp4a",
    "int4_gemv_magic",
    "int4_gemv_naive",
    "int4_gemv_prmt",
    "int4_gemv_warp",
    "paged_attention_cp_async",
    "paged_attention_ring",
    "quantize_x",
]
