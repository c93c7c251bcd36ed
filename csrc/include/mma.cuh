// The tensor cores, by hand: d += a * b for a 16x16 tile `a`, a 16x8 tile `b`, sums in float, by one warp (sm_80).
//
// Each lane holds a piece. With g = lane / 4 and t = lane % 4, two numbers to a 32-bit word, lower index first:
//     a[0] = A[g    ][2t, 2t+1]      b[0] = B[2t,     2t + 1][g]      d[0], d[1] = D[g    ][2t, 2t+1]
//     a[1] = A[g + 8][2t, 2t+1]      b[1] = B[2t + 8, 2t + 9][g]      d[2], d[3] = D[g + 8][2t, 2t+1]
//     a[2] = A[g    ][2t + 8, 2t + 9]
//     a[3] = A[g + 8][2t + 8, 2t + 9]
//
// The hardware adds the 16 products in an order, and with roundings, of its own; the SIMT machine adds them exactly and
// rounds once. The two agree closely, not bit for bit.
#pragma once

#ifdef NANOQWEN_SIMT
#include "simt/mma.h"
#else
__device__ __forceinline__ void mma_16x8x16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_16x8x16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d += a * b for a 16x32 tile and a 32x8 tile of signed bytes, sums in int, exact on both machines. Four numbers to a word:
//     a[0] = A[g][4t ... 4t + 3], a[1] the same of g + 8, a[2], a[3] those of columns 16 + 4t ...;   d as above
//     b.x = B[4t ... 4t + 3][g], b.y = B[16 + 4t ...][g]
__device__ __forceinline__ void mma_16x8x32_s8(int (&d)[4], const int (&a)[4], uint2 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
// Four 8x8 tiles of 16-bit numbers from shared memory into the layout above. Lane i gives the address of row i % 8 of
// tile i / 8; it gets, of each tile, the numbers [lane / 4][2t, 2t + 1].
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}
// The same of the transposed tiles: [2t, 2t + 1][lane / 4].
__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}
// An 8x8 tile that lies in the warp as a[0] above, transposed: a lane gives [g][2t, 2t+1] and gets [2t, 2t+1][g].
__device__ __forceinline__ unsigned transpose_8x8(unsigned row_piece) {
    unsigned out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(row_piece));
    return out;
}
#endif
