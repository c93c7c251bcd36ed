// Attention of one new token, over a contiguous cache.                               lesson 05
//
//   out[h] = sum over t of softmax_t(q[h] . k[t] * scale) v[t]        q, out (heads, HEAD_DIM)
//   k, v (kv_heads, capacity, HEAD_DIM), of which *length + appended tokens count; head h reads KV head h / group
//
// Must move:  kv_heads * tokens * 2 * HEAD_DIM elements. This kernel asks for `group` times as many.
// Launch:     a block of one warp for each query head.
// Teaches:    softmax needs no second pass.

#include "online_softmax.cuh"
#include "types.cuh"
#include "warp.cuh"

template <typename T, int HEAD_DIM>
__global__ void attention_online(const T* q, const T* k, const T* v, const int* length, T* out, float scale,
                                 int appended, int group, int capacity) {
    constexpr int DIMS = HEAD_DIM / 32;  // of a lane: lane, lane + 32, ...
    const int head = blockIdx.x, lane = threadIdx.x;
    const size_t first = static_cast<size_t>(head / group) * capacity * HEAD_DIM + lane;
    const int tokens = min(*length + appended, capacity);

    float query[DIMS];
#pragma unroll
    for (int i = 0; i < DIMS; ++i) query[i] = to_float(q[head * HEAD_DIM + lane + 32 * i]) * scale;

    OnlineSoftmax<DIMS> softmax;
    for (int t = 0; t < tokens; ++t) {
        const size_t row = first + static_cast<size_t>(t) * HEAD_DIM;
        float score = 0.0f, value[DIMS];
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            score = fmaf(query[i], to_float(k[row + 32 * i]), score);
            value[i] = to_float(v[row + 32 * i]);
        }
        softmax.add(warp_sum(score), value);
    }
#pragma unroll
    for (int i = 0; i < DIMS; ++i) out[head * HEAD_DIM + lane + 32 * i] = from_float<T>(softmax.normalised(i));
}
