// A page of the KV cache: PAGE_SIZE tokens of one KV head, all their keys and then all their values, one run of memory.
//
//   pages (pages, kv_heads, 2, PAGE_SIZE, HEAD_DIM) of one layer; table (max_pages): the page of each 16 tokens
//
// Lengths lie in the GPU's memory, so that a captured graph sees them grow. `length` counts the tokens of steps that
// have ended; a kernel that comes after rope_append attends to one more, which is what its `appended` says.
#pragma once
#include "format.cuh"
#include "types.cuh"

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A length past the table would read page numbers of somebody else.
__device__ __forceinline__ int cached_tokens(const int* length, int appended, int max_pages) {
    return min(*length + appended, max_pages * PAGE_SIZE);
}

// The keys; the values follow, PAGE_SIZE * HEAD_DIM elements on.
template <int HEAD_DIM, typename T>
__device__ __forceinline__ T* kv_page(T* pages, int page, int kv_head, int kv_heads) {
    return pages + (static_cast<size_t>(page) * kv_heads + kv_head) * (2 * PAGE_SIZE * HEAD_DIM);
}

// Two neighbours in a 32-bit word, as floats.
template <typename T> __device__ __forceinline__ float2 word_to_float2(unsigned word);
template <> __device__ __forceinline__ float2 word_to_float2<__half>(unsigned word) { return half2_to_float2(word); }
template <> __device__ __forceinline__ float2 word_to_float2<__nv_bfloat16>(unsigned word) {
    return bfloat162_to_float2(word);
}
