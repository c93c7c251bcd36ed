// Attention of one new token over a paged cache, on tensor cores and in one launch.             lesson 05
//
//   out[h] = sum over t of softmax_t(q[h] . k[t] * scale) v[t]        q, out (heads, HEAD_DIM)
//   pages, table, length, appended: see include/kv_page.cuh; head h reads KV head h / group, group is at most 8
//
//   ROPE: what csrc/rope_append.cu does, too. q and the new token's k and v come from qkv, of (heads + 2 kv_heads) *
//   HEAD_DIM floats; q and k are turned, k and v stored in their page. Position, cos, sin and rounding as there.
//
// Must move:  kv_heads * tokens * 2 * HEAD_DIM elements, each once.
// Launch:     (splits, kv_heads) blocks of 256 threads.
// Sums:       fp32; exp(s - m) is rounded to T before it meets V.
// Teaches:    one query is too few for a tensor core; the query heads of a group are up to eight, which is its N.
//
// How: csrc/include/attention_mma.cuh, which csrc/decode_layers.cu shares.

#include "attention_mma.cuh"
#include "sync.cuh"

struct AfterPredecessor {
    static constexpr int ANSWERS_AHEAD = 34;
    __device__ __forceinline__ void wait() const { wait_for_predecessor(); }
    // Not before: the next kernel asks for its weights, of the same memory.
    __device__ __forceinline__ void has_query() const { launch_dependents(); }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

template <typename T, int HEAD_DIM, bool ROPE>
__global__ void __launch_bounds__(ATTENTION_THREADS, ROPE ? 1 : 2)
    paged_attention_mma(const T* q, const float* qkv, const float* cos, const float* sin, T* pages, const int* table,
                        const int* length, T* out, uint2* partial, float* lse, unsigned* arrivals, float scale_log2,
                        int appended, int group, int max_pages, int positions) {
    __shared__ AttentionShared<HEAD_DIM> shared;
    const Attention<T> attention = {q, qkv, cos, sin, pages, table, length, out, partial, lse, arrivals,
                                    scale_log2, appended, group, max_pages, positions};
    const Split split = find_split<HEAD_DIM, ROPE>(attention, blockIdx.x, gridDim.x, blockIdx.y, gridDim.y);
    attend<T, HEAD_DIM, ROPE>(attention, split, shared, AfterPredecessor());
}
