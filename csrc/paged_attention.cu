// Attention of one new token over a paged cache, one step at a time, on the ordinary cores.   lesson 05
//
//   out[h] = sum over t of softmax_t(q[h] . k[t] * scale) v[t]        q, out (heads, HEAD_DIM)
//   pages, table, length, appended: see include/kv_page.cuh; head h reads KV head h / group, group is at most 8
//
// Must move:  kv_heads * tokens * 2 * HEAD_DIM elements, each once.
//
//   paged_attention            a block for each KV head, with all its query heads: a page is read once for all of them
//   paged_attention_split      the same, the pages shared among `splits` blocks: four KV heads do not fill a GPU
//   paged_attention_prefetch   the same, 16 bytes a load, and the next page on its way while this one is computed
//   combine_splits             their second launch, and paged_attention_ring's: partial answers to one
//
// A split leaves its answer, normalised, and the log-sum-exp of its scores: partial (splits, heads, HEAD_DIM),
// lse (splits, heads). One whose pages lie past the length leaves 0 and minus infinity, which weigh nothing; so the
// number of splits may stay what it was when a graph was captured.

#include "online_softmax.cuh"
#include "pack.cuh"
#include "types.cuh"
#include "warp.cuh"

// The pages [first, last) of a KV head, for the query head of this warp. The block copies a page to shared memory, then
// each warp reads all of it.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ OnlineSoftmax<HEAD_DIM / 32> attend(const T* q, const T* pages, const int* table, int tokens,
                                                               int first, int last, float scale, int kv_heads) {
    constexpr int DIMS = HEAD_DIM / 32, VALUES = PAGE_SIZE * HEAD_DIM;
    __shared__ T tile[2 * VALUES];
    const int lane = threadIdx.x % 32;
    float query[DIMS];
#pragma unroll
    for (int i = 0; i < DIMS; ++i) query[i] = to_float(q[lane + 32 * i]) * scale;

    OnlineSoftmax<DIMS> softmax;
    for (int p = first; p < last; ++p) {
        const T* page = kv_page<HEAD_DIM>(pages, table[p], blockIdx.x, kv_heads);
        const int here = min(PAGE_SIZE, tokens - p * PAGE_SIZE);  // the last page may be partial
        for (int i = threadIdx.x; i < here * HEAD_DIM; i += blockDim.x) {
            tile[i] = page[i];
            tile[VALUES + i] = page[VALUES + i];
        }
        __syncthreads();
        for (int t = 0; t < here; ++t) {
            const T* row = tile + t * HEAD_DIM + lane;
            float score = 0.0f, value[DIMS];
#pragma unroll
            for (int i = 0; i < DIMS; ++i) {
                score = fmaf(query[i], to_float(row[32 * i]), score);
                value[i] = to_float(row[VALUES + 32 * i]);
            }
            softmax.add(warp_sum(score), value);
        }
        __syncthreads();  // before the next page is written over this one
    }
    return softmax;
}

// Step 1. kv_heads blocks of 32 * group threads: a warp for each query head.
template <typename T, int HEAD_DIM>
__global__ void paged_attention(const T* q, const T* pages, const int* table, const int* length, T* out, float scale,
                                int appended, int max_pages) {
    const int group = blockDim.x / 32, head = blockIdx.x * group + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tokens = cached_tokens(length, appended, max_pages);
    const auto softmax = attend<T, HEAD_DIM>(q + head * HEAD_DIM, pages, table, tokens, 0, ceil_div(tokens, PAGE_SIZE),
                                             scale, gridDim.x);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; ++i) {
        out[head * HEAD_DIM + lane + 32 * i] = from_float<T>(softmax.normalised(i));
    }
}

// Step 2. Changed: (kv_heads, splits) blocks, each with a run of the pages.
template <typename T, int HEAD_DIM>
__global__ void paged_attention_split(const T* q, const T* pages, const int* table, const int* length, float* partial,
                                      float* lse, float scale, int appended, int max_pages) {
    const int group = blockDim.x / 32, head = blockIdx.x * group + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tokens = cached_tokens(length, appended, max_pages);
    const int count = ceil_div(tokens, PAGE_SIZE), run = ceil_div(count, gridDim.y);
    const int first = min(blockIdx.y * run, count), last = min(first + run, count);
    const auto softmax =
        attend<T, HEAD_DIM>(q + head * HEAD_DIM, pages, table, tokens, first, last, scale, gridDim.x);
    const int place = blockIdx.y * gridDim.x * group + head;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; ++i) partial[place * HEAD_DIM + lane + 32 * i] = softmax.normalised(i);
    if (lane == 0) lse[place] = softmax.log_sum_exp();
}

// A block of HEAD_DIM threads for each query head.
template <typename T, int HEAD_DIM>
__global__ void combine_splits(const float* partial, const float* lse, T* out, int splits) {
    const int head = blockIdx.x, heads = gridDim.x, dim = threadIdx.x;
    float m = minus_infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll 16
    for (int s = 0; s < splits; ++s) m = fmaxf(m, lse[s * heads + head]);
    if (m == minus_infinity()) m = 0.0f;  // no split had a token
#pragma unroll 16
    for (int s = 0; s < splits; ++s) {  // with the maximum known, no load waits for the one before it
        const float weight = expf(lse[s * heads + head] - m);
        total += weight;
        sum = fmaf(weight, partial[(s * heads + head) * HEAD_DIM + dim], sum);
    }
    out[head * HEAD_DIM + dim] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
}

// Step 3. Changed: a lane takes 16 bytes of a row, so that a warp has two tokens at a time (four of 64 dimensions), and
// the block asks for page p + 1 before it computes page p. (kv_heads, splits) blocks of 256 threads; a warp past the
// group only helps to load.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(256)
    paged_attention_prefetch(const T* q, const T* pages, const int* table, const int* length, float* partial,
                             float* lse, float scale, int appended, int group, int max_pages) {
    constexpr int LANES = HEAD_DIM / 8, TOKENS = 32 / LANES;  // that share a row; rows at a time
    constexpr int VALUES = PAGE_SIZE * LANES, LOADS = 2 * VALUES / 256;
    __shared__ uint4 tile[2][2 * VALUES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % LANES;
    const int head = blockIdx.x * group + min(warp, group - 1);
    const int tokens = cached_tokens(length, appended, max_pages);
    const int count = ceil_div(tokens, PAGE_SIZE), run = ceil_div(count, gridDim.y);
    const int first = min(blockIdx.y * run, count), last = min(first + run, count);

    const Pack<T> query = load_pack(q + head * HEAD_DIM + 8 * column);
    uint4 next[LOADS];
    const auto ask = [&](int p) {
        const T* page = kv_page<HEAD_DIM>(pages, table[p], blockIdx.x, gridDim.x);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int pack = threadIdx.x + 256 * i, token = p * PAGE_SIZE + pack / LANES % PAGE_SIZE;
            next[i] = token < tokens ? load_pack(page + 8 * pack).bits : make_uint4(0u, 0u, 0u, 0u);
        }
    };
    if (first < last) ask(first);
    OnlineSoftmax<8> softmax;
    for (int p = first; p < last; ++p) {
        uint4* here = tile[p % 2];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) here[threadIdx.x + 256 * i] = next[i];
        if (p + 1 < last) ask(p + 1);
        __syncthreads();  // one is enough: who passes it has left the other tile behind
        if (warp < group) {
            for (int t = lane / LANES; t < PAGE_SIZE; t += TOKENS) {
                const float score = warp_sum<LANES>(dot(Pack<T>{here[t * LANES + column]}, query, 0.0f)) * scale;
                if (p * PAGE_SIZE + t >= tokens) continue;
                const uint4 row = here[VALUES + t * LANES + column];
                const float2 a = word_to_float2<T>(row.x), b = word_to_float2<T>(row.y);
                const float2 c = word_to_float2<T>(row.z), d = word_to_float2<T>(row.w);
                softmax.add(score, {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y});
            }
        }
    }
    if (warp >= group) return;
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2) softmax.merge_lane(distance);
    const int place = blockIdx.y * gridDim.x * group + head;
    if (lane < LANES) {
#pragma unroll
        for (int i = 0; i < 8; ++i) partial[place * HEAD_DIM + 8 * column + i] = softmax.normalised(i);
    }
    if (lane == 0) lse[place] = softmax.log_sum_exp();
}
