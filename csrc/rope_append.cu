// From a token's q, k and v to what attention reads: q and k turned by the token's position, k and v in their page.
//
//   x[i], x[i + D/2]  ->  x[i] cos[i] - x[i + D/2] sin[i],  x[i + D/2] cos[i] + x[i] sin[i]          D = HEAD_DIM
//
//   qkv ((heads + 2 kv_heads) * HEAD_DIM): the query heads, the keys, the values, biases added
//   cos, sin (positions, HEAD_DIM) float, both halves of a row alike; q (heads, HEAD_DIM); pages: include/kv_page.cuh
//
// The position is *length, which stays as it is: all layers of a step read the same. Attention then has appended = 1.
// Launch:     a block of HEAD_DIM / 2 threads for each head of qkv, a pair a thread.
// Sums:       fp32, each product rounded as torch rounds it, and once more to T.

#include "kv_page.cuh"
#include "sync.cuh"

template <typename In, typename T, int HEAD_DIM>
__global__ void __launch_bounds__(HEAD_DIM / 2)
    rope_append(const In* qkv, const float* cos, const float* sin, const int* length, const int* table, T* q, T* pages,
                int heads, int kv_heads, int positions, int max_pages) {
    launch_dependents();
    wait_for_predecessor();
    constexpr int HALF = HEAD_DIM / 2;
    const int head = blockIdx.x, i = threadIdx.x, position = *length;
    const bool is_q = head < heads, is_v = head >= heads + kv_heads;
    float first = to_float(qkv[head * HEAD_DIM + i]), second = to_float(qkv[head * HEAD_DIM + HALF + i]);
    const bool fits = position >= 0 && position < positions && position < max_pages * PAGE_SIZE;
    if (fits && !is_v) {
        const float c = cos[static_cast<size_t>(position) * HEAD_DIM + i];
        const float s = sin[static_cast<size_t>(position) * HEAD_DIM + i];
        const float turned = __fadd_rn(__fmul_rn(first, c), __fmul_rn(-second, s));
        second = __fadd_rn(__fmul_rn(second, c), __fmul_rn(first, s));
        first = turned;
    }
    // No room: nobody else's page is written, and an answer made of NaN cannot be missed.
    if (!fits && !is_q) return;
    if (!fits) first = second = __uint_as_float(0x7fffffffu);
    T* to = q + head * HEAD_DIM;
    if (!is_q) {
        const int kv_head = (head - heads) % kv_heads;
        to = kv_page<HEAD_DIM>(pages, table[position / PAGE_SIZE], kv_head, kv_heads) +
             (is_v ? PAGE_SIZE : 0) * HEAD_DIM + position % PAGE_SIZE * HEAD_DIM;
    }
    to[i] = from_float<T>(first);
    to[HALF + i] = from_float<T>(second);
}
