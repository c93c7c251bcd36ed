// Attention of one query over a paged KV cache: one warp fetches pages, six compute.      lesson 05
//
//   o[h] = sum over t < length + appended of softmax_t(q[h] . k[t] * scale) v[t]      GROUP heads h share a KV head
//
//   q (heads, HEAD_DIM); pages, table, length, appended: see include/kv_page.cuh
//   partial (splits, heads, HEAD_DIM) and lse (splits, heads) float: a split's result, and the logarithm of its weight
//   timestamps (fills_stamped, CONSUMERS + 1, 3) or null: when each warp of the first block began to wait, had, was done
//
// Must move:  length * kv_heads * 2 * HEAD_DIM elements, each once.
// Launch:     (kv_heads, splits) blocks of 256 threads, two blocks to a multiprocessor, and STAGES * CONSUMERS * 32 *
//             HEAD_DIM bytes of dynamic shared memory. Then combine_splits of paged_attention.cu.
// Teaches:    a pipeline of specialised warps: one is up to three fills ahead, and the others think of no address.
//
//   fill        0: K of pages 0..5    1: V of pages 0..5    2: K of pages 6..11    3: V of pages 6..11
//   stage       0                     1                     2                      0, once all have read fill 0
//
// The page at place w of a fill belongs to consumer warp w. full[stage] ends a phase when the bytes of a fill have
// landed, empty[stage] when all consumers have read it. A warp without a page waits and arrives like the others: it
// would lose count of the phases otherwise.
//
// BULK: one lane starts the copy of half a page, and its bytes report to the barrier (sm_90). Otherwise all lanes of
// the producer copy 16 bytes at a time with cp.async, and arrive for them (sm_80).

#include "async_copy.cuh"
#include "kv_page.cuh"
#include "mbarrier.cuh"
#include "pack.cuh"
#include "sync.cuh"
#include "warp.cuh"

constexpr int CONSUMERS = 6, WARPS = 8;  // of which one is the producer, and one has nothing to do: see `warp` below
constexpr int STAGES = 3;
constexpr float LAG = 8.0f;       // powers of two that a score may lie above the reference of its exponential
constexpr float LOWEST = -1e30f;  // below every score, and finite
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr unsigned ALL = 0xffffffffu;  // lanes of a warp
extern __shared__ __align__(128) unsigned char ring[];

// Where a warp is in the ring. A barrier that has just been initialised lets a wait for parity 1 pass.
struct Turn {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Copies pages [first, last) of this block's KV head.
template <typename T, int HEAD_DIM, bool BULK, typename Stamp>
__device__ __forceinline__ void produce(const T* pages, const int* table, int first, int last, mbarrier_t* full,
                                        mbarrier_t* empty, const Stamp& stamp) {
    constexpr int HALF = PAGE_SIZE * HEAD_DIM, BYTES = HALF * sizeof(T);  // the keys of a page, or its values
    const int lane = threadIdx.x % 32;
    Turn turn, landed;
    int begin = first, page = first + lane < last ? table[first + lane] : 0, next_page = 0;
    for (int fill = 0; begin < last; ++fill) {
        const bool values = fill % 2;
        const int count = min(CONSUMERS, last - begin);
        // The table is read a fill ahead: its answer takes as long as a page.
        if (!values) next_page = begin + CONSUMERS + lane < last ? table[begin + CONSUMERS + lane] : 0;
        stamp(fill, 0);
        mbarrier_wait(&empty[turn.stage], turn.parity ^ 1);
        stamp(fill, 1);
        unsigned char* to = ring + turn.stage * CONSUMERS * BYTES;
        const T* from = kv_page<HEAD_DIM>(pages, page, blockIdx.x, gridDim.x) + values * HALF;  // this lane's page
        if constexpr (BULK) {
            if (lane == 0) mbarrier_arrive_expect_bytes(&full[turn.stage], count * BYTES);
            __syncwarp();  // the bytes are expected before they come
            if (lane < count) bulk_copy(to + lane * BYTES, from, BYTES, &full[turn.stage]);
        } else {
            for (int i = 0; i < count; ++i) {
                const T* source = reinterpret_cast<const T*>(__shfl_sync(ALL, reinterpret_cast<size_t>(from), i));
#pragma unroll
                for (int piece = lane; piece < BYTES / 16; piece += 32) {
                    cp_async_16(to + i * BYTES + piece * 16, source + piece * Pack<T>::size);
                }
            }
            cp_async_commit();
            if (fill >= STAGES - 1) {
                cp_async_wait<STAGES - 1>();
                mbarrier_arrive(&full[landed.stage]);
                landed.next();
            }
        }
        stamp(fill, 2);
        turn.next();
        if (values) {
            begin += CONSUMERS;
            page = next_page;
        }
    }
    if constexpr (!BULK) {
        cp_async_wait<0>();
        for (; landed.stage != turn.stage; landed.next()) mbarrier_arrive(&full[landed.stage]);
    }
}

template <typename T, int HEAD_DIM, int GROUP, bool BULK>
__global__ void __launch_bounds__(32 * WARPS, 2)
    paged_attention_ring(const T* q, const T* pages, const int* table, const int* length, float* partial, float* lse,
                         long long* timestamps, float scale, int appended, int max_pages, int fills_stamped) {
    static_assert((HEAD_DIM == 64 || HEAD_DIM == 128) && GROUP >= 1 && GROUP <= 8, "no code for such heads");
    constexpr int HALF_BYTES = PAGE_SIZE * HEAD_DIM * sizeof(T);
    constexpr int SHARE = (GROUP + 1) / 2;   // heads whose softmax a lane keeps
    constexpr int ROW_LANES = HEAD_DIM / 8;  // that read a row of V, 16 bytes each
    constexpr int ROWS = 32 / ROW_LANES;     // of V that a warp reads at once
    __shared__ mbarrier_t full[STAGES], empty[STAGES];
    // A lane's eighth of q in pieces of 16 bytes, those of the eight lanes side by side: no two in one bank.
    __shared__ float4 query[GROUP][HEAD_DIM / 32][8];
    __shared__ float4 weights[CONSUMERS][PAGE_SIZE][2];  // of a page's tokens, for up to eight heads
    __shared__ float references[CONSUMERS][2 * SHARE], sums[CONSUMERS][2 * SHARE];

    const int kv_head = blockIdx.x, kv_heads = gridDim.x, split = blockIdx.y, splits = gridDim.y;
    // A multiprocessor deals its warps out to four schedulers, and of six consumers two of them get one each. So its
    // second block, which comes from the second half of the grid, counts its warps from another: then all have three.
    const int shift = 2 * split >= splits ? 2 : 0;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32 + shift) % WARPS;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(&full[stage], BULK ? 1 : 32);
            mbarrier_init(&empty[stage], CONSUMERS);
        }
        mbarrier_init_fence();
    }
    wait_for_predecessor();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += blockDim.x) {
        const int h = i / HEAD_DIM, d = i % HEAD_DIM;
        float* piece = &query[h][d / 64 * 2 + d % 8 / 4][d / 8 % 8].x;
        piece[d % 4] = to_float(q[kv_head * GROUP * HEAD_DIM + i]) * (scale * LOG2_E);
    }
    // The pages are divided among as many splits as get a page for each warp; the others are empty.
    const int tokens = cached_tokens(length, appended, max_pages), count = ceil_div(tokens, PAGE_SIZE);
    const int active = min(splits, ceil_div(count, CONSUMERS));
    const int each = split < active ? count / active : 0, extra = split < active ? count % active : 0;
    const int first = split * each + min(split, extra), last = first + each + (split < extra);
    const bool stamping = timestamps && lane == 0 && kv_head == 0 && split == 0;
    const auto stamp = [&](int fill, int event) {
        if (stamping && fill < fills_stamped) timestamps[(fill * (CONSUMERS + 1) + warp) * 3 + event] = clock64();
    };
    __syncthreads();

    if (warp > CONSUMERS) return;
    if (warp == CONSUMERS) {
        produce<T, HEAD_DIM, BULK>(pages, table, first, last, full, empty, stamp);
        return;
    }

    // Scores: eight lanes share a token, each an eighth of the head. A lane adds up four tokens, its own first: slot s
    // is token s ^ (lane % 4) of its four, so that lanes which exchange sums need not choose what to send.
    // Softmax: a lane keeps one token of the page, for the first half of the heads or, if bit 2 is set, for the second.
    // Output: a lane keeps eight columns of V, for all heads.
    const int eighth = lane % 8, quad = lane % 4, row = lane / 8 * 4 + quad, second = lane / 4 % 2;
    float out[GROUP][8] = {}, sum[SHARE] = {}, reference[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; ++i) reference[i] = LOWEST;
    Turn turn;
    int fill = 0;
    for (int begin = first; begin < last; begin += CONSUMERS) {
        const int page = begin + warp, rows = page < last ? min(PAGE_SIZE, tokens - page * PAGE_SIZE) : 0;
        stamp(fill, 0);
        mbarrier_wait(&full[turn.stage], turn.parity);
        stamp(fill, 1);
        float score[4][2 * SHARE] = {};
        if (rows) {
            const T* keys = reinterpret_cast<const T*>(ring + (turn.stage * CONSUMERS + warp) * HALF_BYTES);
#pragma unroll
            for (int chunk = 0; chunk < HEAD_DIM / 64; ++chunk) {
                uint4 k[4];
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    k[s] = load_pack(keys + (row - quad + (s ^ quad)) * HEAD_DIM + chunk * 64 + eighth * 8).bits;
                }
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    float2 a[4], b[4];
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        a[s] = word_to_float2<T>(part ? k[s].z : k[s].x);
                        b[s] = word_to_float2<T>(part ? k[s].w : k[s].y);
                    }
#pragma unroll
                    for (int h = 0; h < GROUP; ++h) {
                        const float4 x = query[h][chunk * 2 + part][eighth];
#pragma unroll
                        for (int s = 0; s < 4; ++s) {
                            score[s][h] = fmaf(x.y, a[s].y, fmaf(x.x, a[s].x, score[s][h]));
                            score[s][h] = fmaf(x.w, b[s].y, fmaf(x.z, b[s].x, score[s][h]));
                        }
                    }
                }
            }
        }
        __syncwarp();  // all lanes have read the keys
        if (lane == 0) mbarrier_arrive(&empty[turn.stage]);
        stamp(fill++, 2);
        turn.next();

        if (rows) {
#pragma unroll
            for (int h = 0; h < GROUP; ++h) {
                score[0][h] += __shfl_xor_sync(ALL, score[1][h], 1);
                score[2][h] += __shfl_xor_sync(ALL, score[3][h], 1);
                score[0][h] += __shfl_xor_sync(ALL, score[2][h], 2);
            }
            float mine[SHARE];
            bool high = false;
#pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                const float a = score[0][i], b = score[0][SHARE + i];
                mine[i] = (second ? b : a) + __shfl_xor_sync(ALL, second ? a : b, 4);
                if (row >= rows) mine[i] = minus_infinity();  // whatever lies past the length weighs nothing
                high |= mine[i] > reference[i] + LAG;
            }
            // The reference keeps the exponentials in range and cancels out in the end. It need not be the maximum: it
            // is raised when a score is far above it, in the first page and seldom again.
            if (__any_sync(ALL, high)) {
#pragma unroll
                for (int i = 0; i < SHARE; ++i) {
                    float highest = mine[i];
#pragma unroll
                    for (int d = 16; d > 0; d /= 2) {
                        if (d != 4) highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, d));
                    }
                    highest = fmaxf(highest, reference[i]);
                    const float shrink = exp2f(reference[i] - highest);
                    reference[i] = highest;
                    sum[i] *= shrink;
                    const float a = __shfl_sync(ALL, shrink, 0), b = __shfl_sync(ALL, shrink, 4);
#pragma unroll
                    for (int d = 0; d < 8; ++d) {
                        out[i][d] *= a;
                        if (SHARE + i < GROUP) out[SHARE + i][d] *= b;
                    }
                }
            }
            float weight[4] = {};
#pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                weight[i] = exp2f(mine[i] - reference[i]);
                sum[i] += weight[i];
            }
            weights[warp][row][second] = make_float4(weight[0], weight[1], weight[2], weight[3]);
        }
        __syncwarp();

        stamp(fill, 0);
        mbarrier_wait(&full[turn.stage], turn.parity);
        stamp(fill, 1);
        if (rows) {
            T* values = reinterpret_cast<T*>(ring + (turn.stage * CONSUMERS + warp) * HALF_BYTES);
            values += lane / ROW_LANES * HEAD_DIM + lane % ROW_LANES * 8;
            if (rows < PAGE_SIZE) {  // 0 * NaN is NaN: past the length V must be finite too
                for (int r = 0; r < PAGE_SIZE; r += ROWS) {
                    if (r + lane / ROW_LANES >= rows) *reinterpret_cast<uint4*>(values + r * HEAD_DIM) = uint4{};
                }
            }
#pragma unroll
            for (int r = 0; r < PAGE_SIZE; r += ROWS) {
                const uint4 bits = load_pack(values + r * HEAD_DIM).bits;
                const float4 a = weights[warp][r + lane / ROW_LANES][0], b = weights[warp][r + lane / ROW_LANES][1];
                const float w[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
                const float2 v[4] = {word_to_float2<T>(bits.x), word_to_float2<T>(bits.y), word_to_float2<T>(bits.z),
                                     word_to_float2<T>(bits.w)};
#pragma unroll
                for (int h = 0; h < GROUP; ++h) {
#pragma unroll
                    for (int d = 0; d < 4; ++d) {
                        out[h][2 * d] = fmaf(w[h / SHARE][h % SHARE], v[d].x, out[h][2 * d]);
                        out[h][2 * d + 1] = fmaf(w[h / SHARE][h % SHARE], v[d].y, out[h][2 * d + 1]);
                    }
                }
            }
        }
        __syncwarp();  // all lanes have read the values, and the weights
        if (lane == 0) mbarrier_arrive(&empty[turn.stage]);
        stamp(fill++, 2);
        turn.next();
    }

    // The six warps' results become the split's. Each puts its own where its pages of stage 0 were: nobody else reads
    // there before the barrier, which is one for the consumers alone, since the producer has gone.
    constexpr int PLACE = HALF_BYTES / sizeof(float);  // GROUP * HEAD_DIM is at most that
    float* outs = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
#pragma unroll
        for (int d = 0; d < 8; ++d) {
#pragma unroll
            for (int other = ROW_LANES; other < 32; other *= 2) out[h][d] += __shfl_xor_sync(ALL, out[h][d], other);
        }
        if (lane < ROW_LANES) {
            float4* mine = reinterpret_cast<float4*>(outs + warp * PLACE + h * HEAD_DIM + lane * 8);
            mine[0] = make_float4(out[h][0], out[h][1], out[h][2], out[h][3]);
            mine[1] = make_float4(out[h][4], out[h][5], out[h][6], out[h][7]);
        }
    }
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
#pragma unroll
        for (int d = 16; d > 0; d /= 2) {
            if (d != 4) sum[i] += __shfl_xor_sync(ALL, sum[i], d);
        }
        if (lane % 4 == 0 && lane < 8) {
            references[warp][second * SHARE + i] = reference[i];
            sums[warp][second * SHARE + i] = sum[i];
        }
    }
    named_barrier_sync(1, 32 * CONSUMERS);
    const bool empty_split = first == last;
    const int place = (split * kv_heads + kv_head) * GROUP;  // of the first head
    for (int i = warp * 32 + lane; i < GROUP * HEAD_DIM; i += 32 * CONSUMERS) {
        const int h = i / HEAD_DIM;
        float highest = LOWEST, total = 0.0f, value = 0.0f;
        for (int w = 0; w < CONSUMERS; ++w) highest = fmaxf(highest, references[w][h]);
        for (int w = 0; w < CONSUMERS; ++w) {
            const float share = exp2f(references[w][h] - highest);
            total = fmaf(share, sums[w][h], total);
            value = fmaf(share, outs[w * PLACE + i], value);
        }
        partial[static_cast<size_t>(place) * HEAD_DIM + i] = empty_split ? 0.0f : value / total;
        if (i % HEAD_DIM == 0) lse[place + h] = empty_split ? minus_infinity() : (highest + log2f(total)) * LN_2;
    }
}
