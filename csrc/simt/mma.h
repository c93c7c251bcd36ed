// The twin of include/mma.cuh: all lanes bring their pieces, and the last one to come multiplies the tiles.
#pragma once
#include "simt/half.h"
#include "simt/machine.h"

namespace simt {
#define SIMT_UNSEEN __attribute__((noinline, no_sanitize("thread")))  // the machine's work, not the kernel's

struct MmaPiece {
    float d[4];
    unsigned a[4], b[2];
};
template <bool bf16> SIMT_UNSEEN void mma_16x8x16(void** lanes) {
    float A[16][16], B[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaPiece* p = static_cast<const MmaPiece*>(lanes[lane]);
        if (!p) continue;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 6; ++i) {
            unsigned word = i < 4 ? p->a[i] : p->b[i - 4];
            for (int k = 0; k < 2; ++k) {
                unsigned short bits = (unsigned short)(word >> 16 * k);
                float v = bf16 ? bf16_to_float(bits) : half_to_float(bits);
                if (i < 4) A[g + 8 * (i & 1)][2 * t + k + 8 * (i >> 1)] = v;
                else B[2 * t + k + 8 * (i - 4)][g] = v;
            }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        MmaPiece* p = static_cast<MmaPiece*>(lanes[lane]);
        if (!p) continue;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            int row = g + 8 * (i >> 1), column = 2 * t + (i & 1);
            double sum = p->d[i];
            for (int k = 0; k < 16; ++k) sum += double(A[row][k]) * double(B[k][column]);
            p->d[i] = float(sum);
        }
    }
}

struct BytesPiece {
    int d[4], a[4];
    unsigned b[2];
};
SIMT_UNSEEN inline void mma_16x8x32_s8(void** lanes) {
    signed char A[16][32], B[32][8];
    for (int lane = 0; lane < 32; ++lane) {
        const BytesPiece* p = static_cast<const BytesPiece*>(lanes[lane]);
        if (!p) continue;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 6; ++i) {
            for (int k = 0; k < 4; ++k) {
                signed char v = (signed char)((i < 4 ? unsigned(p->a[i]) : p->b[i - 4]) >> 8 * k);
                if (i < 4) A[g + 8 * (i & 1)][4 * t + k + 16 * (i >> 1)] = v;
                else B[4 * t + k + 16 * (i - 4)][g] = v;
            }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        BytesPiece* p = static_cast<BytesPiece*>(lanes[lane]);
        if (!p) continue;
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4 + 8 * (i >> 1), column = 2 * (lane % 4) + (i & 1);
            for (int k = 0; k < 32; ++k) p->d[i] += A[row][k] * B[k][column];
        }
    }
}

struct RowPiece {
    uint4 row;
    unsigned out[4];
};
template <bool transposed> SIMT_UNSEEN void spread_rows(void** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
        RowPiece* p = static_cast<RowPiece*>(lanes[lane]);
        if (!p) continue;
        for (int tile = 0; tile < 4; ++tile) {
            unsigned word = 0;
            for (int k = 0; k < 2; ++k) {
                int row = transposed ? 2 * (lane % 4) + k : lane / 4;
                int column = transposed ? lane / 4 : 2 * (lane % 4) + k;
                const RowPiece* from = static_cast<const RowPiece*>(lanes[8 * tile + row]);
                unsigned short bits = 0xffff;
                if (from) __builtin_memcpy(&bits, reinterpret_cast<const char*>(&from->row) + 2 * column, 2);
                word |= unsigned(bits) << 16 * k;
            }
            p->out[tile] = word;
        }
    }
}

struct WordPiece {
    unsigned in, out;
};
inline SIMT_UNSEEN void transpose_words(void** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
        WordPiece* p = static_cast<WordPiece*>(lanes[lane]);
        if (!p) continue;
        unsigned word = 0;
        for (int k = 0; k < 2; ++k) {
            int row = 2 * (lane % 4) + k, column = lane / 4;
            const WordPiece* from = static_cast<const WordPiece*>(lanes[4 * row + column / 2]);
            word |= (from ? from->in >> 16 * (column % 2) & 0xffffu : 0xffffu) << 16 * k;
        }
        p->out = word;
    }
}

inline __attribute__((always_inline)) void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                               void (*work)(void**), const char* file, unsigned line) {
    MmaPiece mine = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    simt_warp_together(0xffffffffu, &mine, work, "mma", file, line);
    for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}
inline __attribute__((always_inline)) void ldmatrix(unsigned (&r)[4], const void* row, void (*work)(void**),
                                                    const char* file, unsigned line) {
    RowPiece mine;
    mine.row = *static_cast<const uint4*>(row);  // seen as what it is: 16 bytes of shared memory for each lane
    simt_warp_together(0xffffffffu, &mine, work, "ldmatrix", file, line);
    for (int i = 0; i < 4; ++i) r[i] = mine.out[i];
}
}  // namespace simt

#define SIMT_PLACE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()
inline __attribute__((always_inline)) void mma_16x8x16_f16(float (&d)[4], const unsigned (&a)[4],
                                                           const unsigned (&b)[2], SIMT_PLACE) {
    simt::mma(d, a, b, simt::mma_16x8x16<false>, file, line);
}
inline __attribute__((always_inline)) void mma_16x8x16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                            const unsigned (&b)[2], SIMT_PLACE) {
    simt::mma(d, a, b, simt::mma_16x8x16<true>, file, line);
}
inline __attribute__((always_inline)) void mma_16x8x32_s8(int (&d)[4], const int (&a)[4], uint2 b, SIMT_PLACE) {
    simt::BytesPiece mine = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b.x, b.y}};
    simt_warp_together(0xffffffffu, &mine, simt::mma_16x8x32_s8, "mma", file, line);
    for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}
inline __attribute__((always_inline)) void ldmatrix_x4(unsigned (&r)[4], const void* row, SIMT_PLACE) {
    simt::ldmatrix(r, row, simt::spread_rows<false>, file, line);
}
inline __attribute__((always_inline)) void ldmatrix_x4_transposed(unsigned (&r)[4], const void* row, SIMT_PLACE) {
    simt::ldmatrix(r, row, simt::spread_rows<true>, file, line);
}
inline __attribute__((always_inline)) unsigned transpose_8x8(unsigned row_piece, SIMT_PLACE) {
    simt::WordPiece mine = {row_piece, 0};
    simt_warp_together(0xffffffffu, &mine, simt::transpose_words, "movmatrix", file, line);
    return mine.out;
}
