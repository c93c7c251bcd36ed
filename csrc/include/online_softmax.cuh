// Online softmax (Milakov & Gimelshein, 2018): attention in one pass over the tokens, whatever their scores will be.
//
// After some tokens with scores s and values v:   m = max s,   l = sum of exp(s - m),   o = sum of exp(s - m) v.
// The next score may be a new maximum; then what is there was taken against the old one, and shrinks by exp(m - new m).
// At the end o / l is the answer. l and m together are its weight beside other answers: log-sum-exp, m + log l.
#pragma once
#include "kv_page.cuh"

template <int DIMS>
struct OnlineSoftmax {
    float m = minus_infinity(), l = 0.0f, o[DIMS] = {};

    __device__ __forceinline__ void add(float score, const float (&v)[DIMS]) {
        const float new_m = fmaxf(m, score);
        const float keep = expf(m - new_m), p = expf(score - new_m);
        l = l * keep + p;
#pragma unroll
        for (int i = 0; i < DIMS; ++i) o[i] = fmaf(p, v[i], o[i] * keep);
        m = new_m;
    }
    // The other lane's tokens too: both lanes hold the same dimensions, and the same sums afterwards.
    __device__ __forceinline__ void merge_lane(int distance) {
        const float other = __shfl_xor_sync(0xffffffffu, m, distance);
        const float new_m = fmaxf(m, other);
        // Nobody has seen a token: minus infinity less itself is no number.
        const float keep = new_m == minus_infinity() ? 0.0f : expf(m - new_m);
        l *= keep;
        l += __shfl_xor_sync(0xffffffffu, l, distance);
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            o[i] *= keep;
            o[i] += __shfl_xor_sync(0xffffffffu, o[i], distance);
        }
        m = new_m;
    }
    // 0 where there was no token.
    __device__ __forceinline__ float normalised(int i) const { return l == 0.0f ? 0.0f : o[i] / l; }
    __device__ __forceinline__ float log_sum_exp() const { return l == 0.0f ? minus_infinity() : m + logf(l); }
};
