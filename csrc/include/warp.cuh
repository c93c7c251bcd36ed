// Sums and maxima over the lanes of a warp. Every lane gets the result.
//
// A butterfly: in step d each lane adds the value of the lane whose number differs in one bit. After five steps each
// lane has added all 32, in the same order of pairs everywhere, so all lanes hold the same bits.
#pragma once

template <int width = 32, typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int d = width / 2; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
    return value;
}

template <int width = 32>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int d = width / 2; d > 0; d /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, d));
    return value;
}
