// Pack<T>: the 16 bytes that one lane loads at once, and what a GEMV does with them.
// 16 bytes is the widest load a thread has: 4 float, or 8 half or bfloat16.
#pragma once
#include "types.cuh"

template <typename T>
struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    uint4 bits;
};

// One 16-byte load that is served by the L1 cache: for x, which every row reads again.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
    return {*reinterpret_cast<const uint4*>(p)};
}

// One 16-byte load that leaves the L1 cache alone: for weights, which nobody reads twice.
template <typename T>
__device__ __forceinline__ Pack<T> stream_pack(const T* p) {
#ifdef NANOQWEN_SIMT
    return load_pack(p);
#else
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return {v};
#endif
}

template <typename T>
__device__ __forceinline__ Pack<T> zero_pack() {
    return {make_uint4(0u, 0u, 0u, 0u)};
}

// The two values in a 32-bit word, as float. A bfloat16 is the upper half of a float: no arithmetic.
__device__ __forceinline__ float2 unpack2(unsigned word, __nv_bfloat16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

__device__ __forceinline__ float2 unpack2(unsigned word, __half) {
    __half2 pair;
    *reinterpret_cast<unsigned*>(&pair) = word;
    return __half22float2(pair);
}

template <typename T>
__device__ __forceinline__ float dot_word(unsigned w, unsigned x, float sum) {
    const float2 a = unpack2(w, T());
    const float2 b = unpack2(x, T());
    return fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
}

template <>
__device__ __forceinline__ float dot_word<float>(unsigned w, unsigned x, float sum) {
    return fmaf(__uint_as_float(w), __uint_as_float(x), sum);
}

// sum + w · x over the pack, in the order in which the elements lie in memory.
template <typename T>
__device__ __forceinline__ float dot(Pack<T> w, Pack<T> x, float sum) {
    sum = dot_word<T>(w.bits.x, x.bits.x, sum);
    sum = dot_word<T>(w.bits.y, x.bits.y, sum);
    sum = dot_word<T>(w.bits.z, x.bits.z, sum);
    return dot_word<T>(w.bits.w, x.bits.w, sum);
}
