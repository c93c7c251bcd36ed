// Pack<T>: the 16 bytes that one lane loads at once, and what a GEMV does with them.
// 16 bytes is the widest load that a thread has: 4 float, or 8 half or bfloat16.
#pragma once
#include "types.cuh"

template <typename T>
struct Pack {
    static constexpr int size = 16 / sizeof(T);
    uint4 bits;
};

// A load that goes through the L1 cache: for x, which every row reads again.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
    return {*reinterpret_cast<const uint4*>(p)};
}

// A load that leaves the L1 cache to others: for weights, which nobody reads twice.
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

// sum + w · x over the elements of one 32-bit word, the one at the lower address first.
template <typename T> __device__ __forceinline__ float dot_word(unsigned w, unsigned x, float sum);

template <>
__device__ __forceinline__ float dot_word<float>(unsigned w, unsigned x, float sum) {
    return fmaf(__uint_as_float(w), __uint_as_float(x), sum);
}

template <>
__device__ __forceinline__ float dot_word<__half>(unsigned w, unsigned x, float sum) {
    const float2 a = half2_to_float2(w), b = half2_to_float2(x);
    return fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
}

template <>
__device__ __forceinline__ float dot_word<__nv_bfloat16>(unsigned w, unsigned x, float sum) {
    const float2 a = bfloat162_to_float2(w), b = bfloat162_to_float2(x);
    return fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
}

// sum + w · x over the pack, in the order in which the elements lie in memory.
template <typename T>
__device__ __forceinline__ float dot(Pack<T> w, Pack<T> x, float sum) {
    sum = dot_word<T>(w.bits.x, x.bits.x, sum);
    sum = dot_word<T>(w.bits.y, x.bits.y, sum);
    sum = dot_word<T>(w.bits.z, x.bits.z, sum);
    return dot_word<T>(w.bits.w, x.bits.w, sum);
}
