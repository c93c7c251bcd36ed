"""One function for each kernel: CUDA tensors run on the GPU, CPU tensors on the SIMT machine, by the same source."""

from nanoqwen.kernels.activations import half_x, swiglu, widen_y
from nanoqwen.kernels.attention import (
    attention_online,
    attention_workspace,
    choose_splits,
    paged_attention,
    paged_attention_cp_async,
    paged_attention_mma,
    paged_attention_prefetch,
    paged_attention_ring,
    paged_attention_split,
    rope_append,
    rope_attention,
)
from nanoqwen.kernels.awq import awq_dequantize, awq_dequantize_v1, awq_dequantize_v2, awq_dequantize_v3
from nanoqwen.kernels.dequantize import int4_dequantize
from nanoqwen.kernels.gemv import gemv, gemv_coalesced, gemv_naive, gemv_rows, gemv_unrolled, gemv_vectorized
from nanoqwen.kernels.int4 import (
    int4_gemm_mma,
    int4_gemv_dp4a,
    int4_gemv_magic,
    int4_gemv_naive,
    int4_gemv_prmt,
    int4_gemv_warp,
    quantize_x,
)
from nanoqwen.kernels.int4_ring import int4_gemm_ring, overlapping_blocks
from nanoqwen.kernels.step import embed, greedy, lm_head, sample, token_workspace

__all__ = [
    "attention_online",
    "attention_workspace",
    "awq_dequantize",
    "awq_dequantize_v1",
    "awq_dequantize_v2",
    "awq_dequantize_v3",
    "choose_splits",
    "embed",
    "gemv",
    "gemv_coalesced",
    "gemv_naive",
    "gemv_rows",
    "gemv_unrolled",
    "gemv_vectorized",
    "greedy",
    "half_x",
    "int4_dequantize",
    "int4_gemm_mma",
    "int4_gemm_ring",
    "int4_gemv_dp4a",
    "int4_gemv_magic",
    "int4_gemv_naive",
    "int4_gemv_prmt",
    "int4_gemv_warp",
    "lm_head",
    "overlapping_blocks",
    "paged_attention",
    "paged_attention_cp_async",
    "paged_attention_mma",
    "paged_attention_prefetch",
    "paged_attention_ring",
    "paged_attention_split",
    "quantize_x",
    "rope_append",
    "rope_attention",
    "sample",
    "swiglu",
    "token_workspace",
    "widen_y",
]
