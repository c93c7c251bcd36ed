// Attention of one new token over a paged cache, on tensor cores and in one launch.             lesson 05
//
//   out[h] = sum over t of softmax_t(q[h] . k[t] * scale) v[t]        q, out (heads, HEAD_DIM)
//   pages, table, length, appended: see include/kv_page.cuh; head h reads KV head h / group, group is at most 8
//
// Must move:  kv_heads * tokens * 2 * HEAD_DIM elements, each once.
// Launch:     (splits, kv_heads) blocks of 256 threads.
// Sums:       fp32; exp(s - m) is rounded to T before it meets V.
// Teaches:    one query is too few for a tensor core; the query heads of a group are up to eight, which is its N.
//
// A page is 16 tokens, the M of mma.m16n8k16. Nothing of it passes through shared memory: lane (g, t), g = lane / 4 and
// t = lane % 4, loads from the page what it will hold as a piece of the tile, 16 bytes at a time.
//
//   S = K q       A: tokens x 16 dimensions. A sum does not mind the order of its terms, so of each 32 dimensions the
//                 lane takes the eight neighbours 8t ... 8t + 7, of tokens g and g + 8, and of q as many of head g.
//   P = exp(S)    lies with the tokens in rows; B wants them in columns of heads: one movmatrix for eight tokens.
//   O = V^T P     A: 16 dimensions x tokens. Rows may be named as one likes, so the lane takes the eight neighbours
//                 8g ... 8g + 7 of each 64, of tokens 2t, 2t + 1, 2t + 8, 2t + 9; a byte permute pairs two tokens.
//
// Each step of a warp takes PAGES pages. The loads of the next keys leave as soon as S has been computed, those of the
// next values as soon as O has: while the one is computed, the other is on its way, and no register waits for both.

#include "bits.cuh"
#include "kv_page.cuh"
#include "mma.cuh"
#include "pack.cuh"
#include "sync.cuh"

constexpr int WARPS = 8, HEADS = 8;  // HEADS: the columns of a tile, of which `group` are used

__device__ __forceinline__ unsigned word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
    mma_16x8x16_f16(d, a, b);
}
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                         __nv_bfloat16) {
    mma_16x8x16_bf16(d, a, b);
}
// Two neighbours in a word, the first at the lower address.
template <typename T> __device__ __forceinline__ unsigned word_from(float first, float second);
template <> __device__ __forceinline__ unsigned word_from<__half>(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}
template <> __device__ __forceinline__ unsigned word_from<__nv_bfloat16>(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}
// What the warps of a block tell each other.
template <int TILES>
struct Board {
    float4 tiles[WARPS][TILES][32];
    float maximum[WARPS][HEADS], sum[WARPS][HEADS];
    bool is_last;
};

// The warps' answers become one. A lane brings its tiles of O, and m and l of heads 2t and 2t + 1 (l of its
// own tokens); it gets tile `warp` of the block's answer, normalised, and the block's m and l.
// The tiles keep the order in which the registers have them, so that neither stores nor loads conflict.
template <int TILES>
__device__ __forceinline__ void add_warps(Board<TILES>& board, const float (&o)[TILES][4], float (&m)[2], float (&l)[2],
                                          float (&answer)[4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) l[h] += __shfl_xor_sync(0xffffffffu, l[h], d);
        if (lane < 4) {
            board.maximum[warp][2 * t + h] = m[h];
            board.sum[warp][2 * t + h] = l[h];
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) board.tiles[warp][i][lane] = make_float4(o[i][0], o[i][1], o[i][2], o[i][3]);
    __syncthreads();

    float weight[WARPS][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        m[h] = minus_infinity();
        l[h] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) m[h] = fmaxf(m[h], board.maximum[w][2 * t + h]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float theirs = board.maximum[w][2 * t + h];  // a warp without tokens weighs nothing
            weight[w][h] = theirs == minus_infinity() ? 0.0f : exp2f(theirs - m[h]);
            l[h] = fmaf(weight[w][h], board.sum[w][2 * t + h], l[h]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) answer[i] = 0.0f;
    if (warp >= TILES) return;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float4 piece = board.tiles[w][warp][lane];
        answer[0] = fmaf(weight[w][0], piece.x, answer[0]);
        answer[1] = fmaf(weight[w][1], piece.y, answer[1]);
        answer[2] = fmaf(weight[w][0], piece.z, answer[2]);
        answer[3] = fmaf(weight[w][1], piece.w, answer[3]);
    }
    const float scale[2] = {l[0] == 0.0f ? 0.0f : 1.0f / l[0], l[1] == 0.0f ? 0.0f : 1.0f / l[1]};
#pragma unroll
    for (int i = 0; i < 4; ++i) answer[i] *= scale[i % 2];
}

// The answers of the splits become one, in the order of the splits: the same bits whoever arrives last.
template <int TILES>
__device__ __forceinline__ void add_splits(float* weights, const float4* partial, const float* lse, int splits,
                                           float (&answer)[4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    constexpr int AHEAD = 16;  // answers on their way: nothing else hides their latency now
    float4 piece[AHEAD];
    const auto ask = [&](int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i < splits) piece[i] = partial[((first + i) * TILES + warp) * 32 + lane];
        }
    };
    if (warp < TILES) ask(0);
    for (int i = threadIdx.x; i < splits * HEADS; i += 32 * WARPS) weights[i] = lse[i];
    __syncthreads();
    if (warp >= TILES) return;
    float top[2] = {minus_infinity(), minus_infinity()}, whole[2] = {};
    for (int other = 0; other < splits; ++other) {
        top[0] = fmaxf(top[0], weights[other * HEADS + 2 * t]);
        top[1] = fmaxf(top[1], weights[other * HEADS + 2 * t + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) answer[i] = 0.0f;
    for (int first = 0; first < splits; first += AHEAD) {
        if (first > 0) ask(first);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= splits) break;
            const float w0 = exp2f(weights[(first + i) * HEADS + 2 * t] - top[0]);
            const float w1 = exp2f(weights[(first + i) * HEADS + 2 * t + 1] - top[1]);
            whole[0] += w0;
            whole[1] += w1;
            answer[0] = fmaf(w0, piece[i].x, answer[0]);
            answer[1] = fmaf(w1, piece[i].y, answer[1]);
            answer[2] = fmaf(w0, piece[i].z, answer[2]);
            answer[3] = fmaf(w1, piece[i].w, answer[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) answer[i] /= whole[i % 2];
}

template <typename T, int HEAD_DIM, int PAGES>
__global__ void __launch_bounds__(32 * WARPS, 1)
    paged_attention_mma(const T* q, const T* pages, const int* table, const int* length, T* out, float4* partial,
                        float* lse, unsigned* arrivals, float scale_log2, int appended, int group, int max_pages,
                        int least_steps) {
    constexpr int BLOCKS = HEAD_DIM / 32;  // of 32 dimensions, in K
    constexpr int HALVES = HEAD_DIM / 64;  // of 64 dimensions, in V
    constexpr int TILES = HEAD_DIM / 16;   // of 16 dimensions, in O
    launch_dependents();
    wait_for_predecessor();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y;
    const int tokens = cached_tokens(length, appended, max_pages);
    const int last_page = ceil_div(tokens, PAGE_SIZE) - 1;
    // A split has a run of steps, not too short: each answer costs the last split a read. Splits past the length have
    // none, and nobody waits for them.
    const int steps = ceil_div(last_page + 1, PAGES), run = max(least_steps, ceil_div(steps, gridDim.x));
    const int live_splits = max(1, ceil_div(steps, run));
    if (split >= live_splits) return;
    const int end = min((split + 1) * run, steps);

    uint4 query[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const T* from = q + (kv_head * group + min(g, group - 1)) * HEAD_DIM + 32 * b + 8 * t;
        query[b] = g < group ? load_pack(from).bits : zero_pack<T>().bits;
    }

    // What lies past the length is never read: the last token stands in for those after it, and weighs nothing there.
    uint4 k[PAGES][BLOCKS][2], v[PAGES][HALVES][4];
    int numbers[PAGES];  // of the pages that are asked for next
    const auto page_of = [&](int step, int p) { return min(step * PAGES + p, last_page); };
    const auto look_up = [&](int step) {
#pragma unroll
        for (int p = 0; p < PAGES; ++p) numbers[p] = table[page_of(step, p)];
    };
    const auto ask_keys = [&](int step) {
#pragma unroll
        for (int p = 0; p < PAGES; ++p) {
            const T* page = kv_page<HEAD_DIM>(pages, numbers[p], kv_head, kv_heads) + 8 * t;
            const int last = tokens - 1 - page_of(step, p) * PAGE_SIZE;
            const int top = min(g, last) * HEAD_DIM, bottom = min(g + 8, last) * HEAD_DIM;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                k[p][b][0] = stream_page(page + top + 32 * b);
                k[p][b][1] = stream_page(page + bottom + 32 * b);
            }
        }
    };
    const auto ask_values = [&](int step) {
#pragma unroll
        for (int p = 0; p < PAGES; ++p) {
            const T* page = kv_page<HEAD_DIM>(pages, numbers[p], kv_head, kv_heads) + PAGE_SIZE * HEAD_DIM + 8 * g;
            const int last = tokens - 1 - page_of(step, p) * PAGE_SIZE;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = min(2 * t + i % 2 + i / 2 * 8, last) * HEAD_DIM;
#pragma unroll
                for (int h = 0; h < HALVES; ++h) v[p][h][i] = stream_page(page + row + 64 * h);
            }
        }
    };

    float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {};  // of heads 2t and 2t + 1; l of this lane's tokens
    float o[TILES][4] = {};
    int step = split * run + warp;
    if (step < end) {
        look_up(step);
        ask_keys(step);
        ask_values(step);
        look_up(step + WARPS);
    }
    for (; step < end; step += WARPS) {
        float s[PAGES][4] = {};  // tokens g and g + 8 of the page; of each, heads 2t and 2t + 1
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {  // pages inside: a product need not wait for the one before it
#pragma unroll
            for (int p = 0; p < PAGES; ++p) {
                const uint4 top = k[p][b][0], bottom = k[p][b][1];
                const unsigned a[4] = {top.x, bottom.x, top.y, bottom.y}, x[2] = {query[b].x, query[b].y};
                multiply(s[p], a, x, T());
            }
#pragma unroll
            for (int p = 0; p < PAGES; ++p) {
                const uint4 top = k[p][b][0], bottom = k[p][b][1];
                const unsigned a[4] = {top.z, bottom.z, top.w, bottom.w}, x[2] = {query[b].z, query[b].w};
                multiply(s[p], a, x, T());
            }
        }
        if (step + WARPS < end) ask_keys(step + WARPS);

#pragma unroll
        for (int p = 0; p < PAGES; ++p) {
            const int token = (step * PAGES + p) * PAGE_SIZE + g;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[p][i] = token + i / 2 * 8 < tokens ? s[p][i] * scale_log2 : minus_infinity();
            }
        }
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float new_m = m[h];
#pragma unroll
            for (int p = 0; p < PAGES; ++p) new_m = fmaxf(new_m, fmaxf(s[p][h], s[p][2 + h]));
#pragma unroll
            for (int d = 4; d < 32; d *= 2) new_m = fmaxf(new_m, __shfl_xor_sync(0xffffffffu, new_m, d));
            keep[h] = exp2f(m[h] - new_m);
            m[h] = new_m;
            l[h] *= keep[h];
#pragma unroll
            for (int p = 0; p < PAGES; ++p) {
                s[p][h] = exp2f(s[p][h] - new_m);
                s[p][2 + h] = exp2f(s[p][2 + h] - new_m);
                l[h] += s[p][h] + s[p][2 + h];
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) o[i / 4][i % 4] *= keep[i % 2];
#pragma unroll
        for (int p = 0; p < PAGES; ++p) {
            const unsigned b[2] = {transpose_8x8(word_from<T>(s[p][0], s[p][1])),
                                   transpose_8x8(word_from<T>(s[p][2], s[p][3]))};
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {  // dimensions 8g + 2j and 8g + 2j + 1 of 64, for all g
                const uint4* four = v[p][tile / 4];
                const int j = tile % 4;
                const unsigned a[4] = {prmt(word_of(four[0], j), word_of(four[1], j), 0x5410u),
                                       prmt(word_of(four[0], j), word_of(four[1], j), 0x7632u),
                                       prmt(word_of(four[2], j), word_of(four[3], j), 0x5410u),
                                       prmt(word_of(four[2], j), word_of(four[3], j), 0x7632u)};
                multiply(o[tile], a, b, T());
            }
        }
        if (step + WARPS < end) ask_values(step + WARPS);
        look_up(step + 2 * WARPS);
    }

    __shared__ Board<TILES> board;
    float answer[4];  // of tile `warp`: two dimensions, and of each, heads 2t and 2t + 1
    add_warps(board, o, m, l, answer);
    if (live_splits > 1) {
        float4* answers = partial + static_cast<size_t>(kv_head * gridDim.x) * TILES * 32;
        float* lses = lse + kv_head * gridDim.x * HEADS;
        if (warp < TILES) {
            answers[(split * TILES + warp) * 32 + lane] = make_float4(answer[0], answer[1], answer[2], answer[3]);
        }
        if (threadIdx.x < 4) {
            lses[split * HEADS + 2 * t] = m[0] + log2f(l[0]);
            lses[split * HEADS + 2 * t + 1] = m[1] + log2f(l[1]);
        }
        __syncthreads();
        if (threadIdx.x == 0) {  // whoever arrives last finds all the others there
            board.is_last = atomic_add_acq_rel(&arrivals[kv_head], 1u) == static_cast<unsigned>(live_splits - 1);
            if (board.is_last) arrivals[kv_head] = 0u;  // for the next launch
        }
        __syncthreads();
        if (!board.is_last) return;
        add_splits<TILES>(reinterpret_cast<float*>(board.tiles), answers, lses, live_splits, answer);
    }
    if (warp >= TILES) return;
    const int dim = 64 * (warp / 4) + 8 * g + 2 * (warp % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (2 * t + h < group) {
            T* to = out + (kv_head * group + 2 * t + h) * HEAD_DIM + dim;
            *reinterpret_cast<unsigned*>(to) = word_from<T>(answer[h], answer[2 + h]);
        }
    }
}
