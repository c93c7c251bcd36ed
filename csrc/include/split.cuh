// x as whole numbers of 16 bits, in two signed bytes, for the integer tensor cores.
//
//   x[k] = scale * (256 * high[k] + low[k]),   scale a power of two, the smallest with which the group's largest fits
//
// The largest becomes 16320 to 32639. A half has 11 bits, so whatever is at least 1/15 of its group's largest is kept
// exactly, and the rest to within 1/32640 of it. The products with INT4 weights are then whole numbers too, and their
// sum over a group is exact.
//
// A piece of 64 columns is 128 bytes, in the order in which `mma` wants them: 64 high bytes, 64 low bytes. Of each,
// lane t of four reads 16: octet t of the first 32 columns, octet t of the last 32. An octet is in the order of the
// nibbles of a word, x0 x4 x1 x5 and x2 x6 x3 x7.
#pragma once
#include "bits.cuh"
#include "types.cuh"
#include "warp.cuh"

// Eight halves.
__device__ __forceinline__ void unpack_halves(uint4 bits, float (&x)[8]) {
    const float2 a = half2_to_float2(bits.x), b = half2_to_float2(bits.y);
    const float2 c = half2_to_float2(bits.z), d = half2_to_float2(bits.w);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

// A group's scale, with the 1/16 that unpack_bytes asks for, and the sum of its whole numbers, if wanted.
struct SplitGroup {
    float scale;
    int sum;
};

// Where the high bytes of an octet lie; the low ones are 64 bytes further.
__device__ __forceinline__ size_t octet_place(int octet) {
    return octet / 8 * 128 + octet % 4 * 16 + octet / 4 % 2 * 8;
}

struct SplitOctet {
    uint2 high, low;
    SplitGroup group;
};

// An octet of each lane; GROUP / 8 neighbouring lanes make a group. All lanes of the warp call.
template <int GROUP, bool SUM>
__device__ __forceinline__ SplitOctet split_octet(const float (&x)[8]) {
    constexpr int LANES = GROUP / 8;
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: a float there counts in ones, its low bits are the number
    unsigned most = 0;  // the largest magnitude, its bits as a whole number: so NaN is larger than all others
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    // Its exponent, one more where 2^14 times its fraction would pass 32639, which is 256 * 127 + 127: from 32639.5 on,
    // which a float's 24 bits reach and rounding takes up. The carry comes from 2^15 - 32639.5, in steps of 2^-9.
    const unsigned exponent = max((most + 0x00010100u) >> 23, 19u);
    const float inverse = __uint_as_float((268 - exponent) << 23);
    const float scale = __uint_as_float(exponent == 255 ? 0x7fffffffu : (exponent - 18) << 23);  // NaN; or with 1/16
    unsigned v[8], up[8];  // the byte above: rounded, since the low byte is -128 ... 127
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        v[i] = __float_as_uint(fmaf(x[i], inverse, SHIFT));
        up[i] = v[i] + 128;
        if constexpr (SUM) sum += static_cast<int>(v[i] - __float_as_uint(SHIFT));
    }
    if constexpr (SUM) sum = warp_sum<LANES>(sum);
    return {make_uint2(prmt(prmt(up[0], up[4], 0x0051u), prmt(up[1], up[5], 0x0051u), 0x5410u),
                       prmt(prmt(up[2], up[6], 0x0051u), prmt(up[3], up[7], 0x0051u), 0x5410u)),
            make_uint2(prmt(prmt(v[0], v[4], 0x0040u), prmt(v[1], v[5], 0x0040u), 0x5410u),
                       prmt(prmt(v[2], v[6], 0x0040u), prmt(v[3], v[7], 0x0040u), 0x5410u)),
            {scale, sum}};
}

template <int GROUP>
__device__ __forceinline__ void store_octet(const SplitOctet& split, int octet, unsigned char* bytes,
                                            SplitGroup* groups) {
    unsigned char* to = bytes + octet_place(octet);
    *reinterpret_cast<uint2*>(to) = split.high;
    *reinterpret_cast<uint2*>(to + 64) = split.low;
    if (octet % (GROUP / 8) == 0) groups[octet / (GROUP / 8)] = split.group;
}
