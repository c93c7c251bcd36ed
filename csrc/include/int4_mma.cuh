// Layout 2 in the tensor cores: 16 rows x 32 columns of INT4 weights times up to eight tokens. See csrc/int4_gemm.cu.
//
// Lane (g, t), g = lane / 4 and t = lane % 4, brings two words, the columns 8t ... 8t + 7 of rows g and g + 8, and as
// many values of x of token g. They make two k-steps of 16 columns each; which column is called which does not matter
// to a sum, as long as weights and x agree.
#pragma once
#include "int4.cuh"
#include "mma.cuh"

// d += (w + offsets) * x. The offsets are what unpack_offset leaves: 1032 for half of the columns, 72 for the others.
__device__ __forceinline__ void fragment_mma(float (&d)[4], unsigned row_g, unsigned row_g8, uint4 x) {
    unsigned top[4], bottom[4];
    unpack_offset(row_g, top);
    unpack_offset(row_g8, bottom);
    const unsigned a0[4] = {top[0], bottom[0], top[1], bottom[1]}, b0[2] = {x.x, x.y};
    const unsigned a1[4] = {top[2], bottom[2], top[3], bottom[3]}, b1[2] = {x.z, x.w};
    mma_16x8x16_f16(d, a0, b0);
    mma_16x8x16_f16(d, a1, b1);
}

// c -= offsets * x, the same for every row: c + d is w * x. Both grow with the offsets before they meet, a thousand
// times the size of x in fp32, so add them up at the end of each group.
__device__ __forceinline__ void offsets_mma(float (&c)[4], uint4 x) {
    const unsigned a[4] = {MINUS_1032, MINUS_1032, MINUS_72, MINUS_72}, b0[2] = {x.x, x.y}, b1[2] = {x.z, x.w};
    mma_16x8x16_f16(c, a, b0);
    mma_16x8x16_f16(c, a, b1);
}

// total += 1 * x, the same for every row: what a zero-point is multiplied with.
__device__ __forceinline__ void total_mma(float (&total)[4], uint4 x) {
    constexpr unsigned ONES = 0x3c003c00u;  // twice, as halves
    const unsigned a[4] = {ONES, ONES, ONES, ONES}, b0[2] = {x.x, x.y}, b1[2] = {x.z, x.w};
    mma_16x8x16_f16(total, a, b0);
    mma_16x8x16_f16(total, a, b1);
}
