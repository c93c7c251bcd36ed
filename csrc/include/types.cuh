// half and bfloat16 on both machines, and conversions that a template can name.
#pragma once

#ifdef NANOQWEN_SIMT
#include "simt/half.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}

// Two short numbers that lie in one 32-bit word, as two floats. `first` is the one at the lower address.
__device__ __forceinline__ float2 half2_to_float2(unsigned word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
// A bfloat16 is the upper half of a float, so no conversion is needed: only a shift or a mask.
__device__ __forceinline__ float2 bfloat162_to_float2(unsigned word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
