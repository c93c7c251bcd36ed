// INT4 weights: eight two's-complement nibbles in a 32-bit word, and four ways to get them out.
//
// Layout 1, "ValueShuffle": value k of an octet lies at bit (k % 2) * 16 + (k / 2) * 4, so that neighbours lie 16 bits
// apart, where the two halves of a half2 want them:
//
//     bit   28   24   20   16   12    8    4    0
//         | v7 | v5 | v3 | v1 | v6 | v4 | v2 | v0 |
//
// Layout 2, "fragment": the same words, in the order in which the lanes of a warp hold the A fragment of `mma`: see
// csrc/int4_gemm.cu.
#pragma once
#include "bits.cuh"
#include "format.cuh"
#include "types.cuh"

__device__ __forceinline__ __half2 as_half2(unsigned word) { return *reinterpret_cast<const __half2*>(&word); }
__device__ __forceinline__ unsigned as_word(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }

// Value k, by shifts: up until its sign is bit 31, and down again, which copies the sign.
__device__ __forceinline__ int nibble(unsigned word, int k) {
    const int bit = k % 2 * 16 + k / 2 * 4;
    return static_cast<int>(word << (28 - bit)) >> 28;
}

// The octet as floats, by shifts and a conversion from int: four instructions a value with the product, and no GPU
// converts at the rate at which it adds.
__device__ __forceinline__ void unpack_shift(unsigned word, float (&v)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = static_cast<float>(nibble(word, k));
}

// The octet as floats, by byte permutes. `^ 8` turns the two's complement -8...7 into 0...15 (this and the 8 taken off
// below are the sign extension); a permute puts that byte under the exponent of 2^23, where a float counts in ones.
__device__ __forceinline__ void unpack_prmt(unsigned word, float (&v)[8]) {
    constexpr unsigned TWO_23 = 0x4b000000u;
    constexpr float OFFSET = 8388608.0f + 8.0f;
    const unsigned a = (word & 0x0f0f0f0fu) ^ 0x08080808u;         // bytes v0, v4, v1, v5
    const unsigned b = ((word >> 4) & 0x0f0f0f0fu) ^ 0x08080808u;  // bytes v2, v6, v3, v7
    v[0] = __uint_as_float(prmt(a, TWO_23, 0x7650u)) - OFFSET;
    v[4] = __uint_as_float(prmt(a, TWO_23, 0x7651u)) - OFFSET;
    v[1] = __uint_as_float(prmt(a, TWO_23, 0x7652u)) - OFFSET;
    v[5] = __uint_as_float(prmt(a, TWO_23, 0x7653u)) - OFFSET;
    v[2] = __uint_as_float(prmt(b, TWO_23, 0x7650u)) - OFFSET;
    v[6] = __uint_as_float(prmt(b, TWO_23, 0x7651u)) - OFFSET;
    v[3] = __uint_as_float(prmt(b, TWO_23, 0x7652u)) - OFFSET;
    v[7] = __uint_as_float(prmt(b, TWO_23, 0x7653u)) - OFFSET;
}

// The octet as signed bytes, *sixteen times too large*: a nibble in the upper half of a byte has its sign where the
// byte has it, so there is nothing to extend. first: v0, v4, v1, v5; second: v2, v6, v3, v7, lowest byte first.
__device__ __forceinline__ void unpack_bytes(unsigned word, int& first, int& second) {
    first = static_cast<int>((word << 4) & 0xf0f0f0f0u);
    second = static_cast<int>(word & 0xf0f0f0f0u);
}

// The octet as four half2, value k divided by 64, all exact: pair j is (v[2j], v[2j + 1]) / 64.
// A nibble put under the exponent of 1024 makes 1024 + q, and four bits higher, under that of 64, 64 + q: one lop3 a
// pair, which also does the `^ 8`. One fma takes the offset off and divides.
// Why divided by 64: then no sum of four products of an octet can pass 65504, whatever finite halves x holds.
__device__ __forceinline__ void unpack_magic(unsigned word, __half2 (&pairs)[4]) {
    constexpr int AND_XOR = (0xf0 & 0xcc) ^ 0xaa;
    const unsigned upper = word >> 8;
    const __half2 sixtyfourth = __float2half2_rn(1.0f / 64);
    const __half2 low = __float2half2_rn(-1032.0f / 64), high = __float2half2_rn(-72.0f / 64);
    pairs[0] = __hfma2(as_half2(lop3<AND_XOR>(word, 0x000f000fu, 0x64086408u)), sixtyfourth, low);
    pairs[1] = __hfma2(as_half2(lop3<AND_XOR>(word, 0x00f000f0u, 0x54805480u)), sixtyfourth, high);
    pairs[2] = __hfma2(as_half2(lop3<AND_XOR>(upper, 0x000f000fu, 0x64086408u)), sixtyfourth, low);
    pairs[3] = __hfma2(as_half2(lop3<AND_XOR>(upper, 0x00f000f0u, 0x54805480u)), sixtyfourth, high);
}

// The octet as four half2 *with offsets*: pairs 0 and 2 hold 1024 + q, pairs 1 and 3 hold 64 + q, where q = v + 8: what
// unpack_magic has before its fma.
constexpr unsigned MINUS_1032 = 0xe408e408u, MINUS_72 = 0xd480d480u;  // each twice, as halves
__device__ __forceinline__ void unpack_offset(unsigned word, unsigned (&pairs)[4]) {
    constexpr int AND_XOR = (0xf0 & 0xcc) ^ 0xaa;
    const unsigned upper = word >> 8;
    pairs[0] = lop3<AND_XOR>(word, 0x000f000fu, 0x64086408u);
    pairs[1] = lop3<AND_XOR>(word, 0x00f000f0u, 0x54805480u);
    pairs[2] = lop3<AND_XOR>(upper, 0x000f000fu, 0x64086408u);
    pairs[3] = lop3<AND_XOR>(upper, 0x00f000f0u, 0x54805480u);
}
