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
// A page is 16 tokens, the M of mma.m16n8k16. Nothing of it passes through shared memory: lane (g, t), g = lane / 4 and
// t = lane % 4, loads from the page what it will hold as a piece of the tile, 16 bytes at a time.
//
//   S = K q       A: tokens x 16 dimensions. A sum does not mind the order of its terms, so of each 32 dimensions the
//                 lane takes the eight neighbours 8t ... 8t + 7, of tokens g and g + 8, and of q as many of head g.
//   P = exp(S)    lies with the tokens in rows; B wants them in columns of heads: one movmatrix for eight tokens.
//   O = V^T P     A: 16 dimensions x tokens. Rows may be named as one likes, so the lane takes the eight neighbours
//                 8g ... 8g + 7 of each 64, of tokens 2t, 2t + 1, 2t + 8, 2t + 9; a byte permute pairs two tokens.
//
// A warp takes a page at a time: page 8 * split + warp, and from there every 8 * splits-th, whatever the length, so
// that the numbers of its pages are asked for together with the length. The loads of the next keys leave as soon as S
// has been computed, those of the next values as soon as O has.
//
// With `appended`, pages before the last are of earlier steps: they are on their way before this kernel's turn comes.
// With ROPE so is all but the new token itself, whose k and v every block makes for itself.

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

// The answers of the splits become one, in the order of the splits: the same bits whoever arrives last. Where the warps
// are more than the tiles, several share a tile's splits.
template <typename T, int TILES>
__device__ __forceinline__ void add_splits(Board<TILES>& board, const uint2* partial, const float* lse, int splits,
                                           float (&answer)[4]) {
    constexpr int SHARES = WARPS / TILES;
    constexpr int AHEAD = 34;  // answers on their way: nothing else hides their latency now
    const int lane = threadIdx.x % 32, t = lane % 4, tile = threadIdx.x / 32 % TILES, share = threadIdx.x / 32 / TILES;
    float* weights = reinterpret_cast<float*>(board.tiles);
    uint2 piece[AHEAD];
    const auto ask = [&](int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int split = first + i * SHARES;
            if (split < splits) piece[i] = partial[(split * TILES + tile) * 32 + lane];
        }
    };
    ask(share);
    for (int i = threadIdx.x; i < splits * HEADS; i += 32 * WARPS) weights[i] = lse[i];
    __syncthreads();
    float top[2] = {minus_infinity(), minus_infinity()}, whole[2] = {};
#pragma unroll 8
    for (int other = 0; other < splits; ++other) {
        const float2 both = *reinterpret_cast<const float2*>(weights + other * HEADS + 2 * t);
        top[0] = fmaxf(top[0], both.x);
        top[1] = fmaxf(top[1], both.y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) answer[i] = 0.0f;
    for (int first = share; first < splits; first += AHEAD * SHARES) {
        if (first > share) ask(first);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int split = first + i * SHARES;
            if (split >= splits) break;
            const float2 both = *reinterpret_cast<const float2*>(weights + split * HEADS + 2 * t);
            const float w0 = exp2f(both.x - top[0]), w1 = exp2f(both.y - top[1]);
            const float2 low = word_to_float2<T>(piece[i].x), high = word_to_float2<T>(piece[i].y);
            whole[0] += w0;
            whole[1] += w1;
            answer[0] = fmaf(w0, low.x, answer[0]);
            answer[1] = fmaf(w1, low.y, answer[1]);
            answer[2] = fmaf(w0, high.x, answer[2]);
            answer[3] = fmaf(w1, high.y, answer[3]);
        }
    }
    if constexpr (SHARES > 1) {
        static_assert(SHARES <= 2, "one other warp has a share of the tile");
        __syncthreads();  // all have read the weights, which lie where these go
        if (share > 0) {
            board.tiles[0][tile][lane] = make_float4(answer[0], answer[1], answer[2], answer[3]);
            board.tiles[1][tile][lane] = make_float4(whole[0], whole[1], 0.0f, 0.0f);
        }
        __syncthreads();
        if (share > 0) return;
        const float4 other = board.tiles[0][tile][lane], others = board.tiles[1][tile][lane];
        answer[0] += other.x, answer[1] += other.y, answer[2] += other.z, answer[3] += other.w;
        whole[0] += others.x, whole[1] += others.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) answer[i] /= whole[i % 2];
}

// Two neighbours of the first half of a head and two of the second, turned.
__device__ __forceinline__ void turn(float2& first, float2& second, float2 c, float2 s) {
    const float2 a = first, b = second;
    first.x = __fadd_rn(__fmul_rn(a.x, c.x), __fmul_rn(-b.x, s.x));
    first.y = __fadd_rn(__fmul_rn(a.y, c.y), __fmul_rn(-b.y, s.y));
    second.x = __fadd_rn(__fmul_rn(b.x, c.x), __fmul_rn(a.x, s.x));
    second.y = __fadd_rn(__fmul_rn(b.y, c.y), __fmul_rn(a.y, s.y));
}

template <typename T, int HEAD_DIM, bool ROPE>
__global__ void __launch_bounds__(32 * WARPS, ROPE ? 1 : 2)
    paged_attention_mma(const T* q, const float* qkv, const float* cos, const float* sin, T* pages, const int* table,
                        const int* length, T* out, uint2* partial, float* lse, unsigned* arrivals, float scale_log2,
                        int appended, int group, int max_pages, int positions) {
    constexpr int BLOCKS = HEAD_DIM / 32;  // of 32 dimensions, in K
    constexpr int HALVES = HEAD_DIM / 64;  // of 64 dimensions, in V
    constexpr int TILES = HEAD_DIM / 16;   // of 16 dimensions, in O
    __shared__ uint4 query[BLOCKS][32];        // as the lanes want it
    __shared__ uint4 fresh[2][HEAD_DIM / 8];  // ROPE: the new token's k and v

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y, stride = gridDim.x * WARPS;
    // Ordered loads: others the compiler moves behind the branch that waits for the length.
    const auto first_number = [&](int page) {
        return static_cast<int>(ld_relaxed(reinterpret_cast<const unsigned*>(table) + min(page, max_pages - 1)));
    };
    int page = split * WARPS + warp, number = first_number(page), next_number = first_number(page + stride);
    const int tokens = cached_tokens(length, appended, max_pages);
    const int page_count = ceil_div(tokens, PAGE_SIZE);
    // Nobody waits for splits that have no page.
    const int live_splits = max(1, min(static_cast<int>(gridDim.x), ceil_div(page_count, WARPS)));
    if (split >= live_splits) {
        wait_for_predecessor();  // a block of the next launch would take this place, and others not find theirs
        return;
    }

    // What lies past the length is never read: the last token stands in for those after it, and weighs nothing there.
    const int stored = ROPE ? tokens - 1 : tokens;
    uint4 k[BLOCKS][2], v[HALVES][4];
    // Through the L1 cache: a request for keys takes half of eight lines, and the next one the other half.
    const auto ask_keys = [&] {
        const T* from = kv_page<HEAD_DIM>(pages, number, kv_head, kv_heads) + 8 * t;
        const int last = stored - 1 - page * PAGE_SIZE;
        const int top = min(g, last) * HEAD_DIM, bottom = min(g + 8, last) * HEAD_DIM;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            k[b][0] = (ROPE && last < 0 ? zero_pack<T>() : load_pack(from + top + 32 * b)).bits;
            k[b][1] = (ROPE && last < 0 ? zero_pack<T>() : load_pack(from + bottom + 32 * b)).bits;
        }
    };
    const auto ask_values = [&] {
        const T* from = kv_page<HEAD_DIM>(pages, number, kv_head, kv_heads) + PAGE_SIZE * HEAD_DIM + 8 * g;
        const int last = stored - 1 - page * PAGE_SIZE;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = min(2 * t + i % 2 + i / 2 * 8, last) * HEAD_DIM;
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                v[h][i] = (ROPE && last < 0 ? zero_pack<T>() : load_pack(from + row + 64 * h)).bits;
            }
        }
    };
    const bool early = page < page_count && (ROPE || (appended > 0 && page < page_count - 1));
    if (early) {
        ask_keys();
        ask_values();
    }
    if constexpr (ROPE) {
        constexpr int QUARTER = HEAD_DIM / 4, ROWS = 32 * WARPS / QUARTER;  // threads of a head, heads at a time
        constexpr int ROUNDS = (HEADS + 2 + ROWS - 1) / ROWS;
        const int position = *length, i = threadIdx.x % QUARTER, heads = group * kv_heads;
        const bool fits = position >= 0 && position < positions && position < max_pages * PAGE_SIZE;
        float2 c = make_float2(__uint_as_float(0x7fffffffu), __uint_as_float(0x7fffffffu)), s = c;
        T* home = nullptr;  // of the new token, for the one block that stores it
        if (fits) {
            c = reinterpret_cast<const float2*>(cos + static_cast<size_t>(position) * HEAD_DIM)[i];
            s = reinterpret_cast<const float2*>(sin + static_cast<size_t>(position) * HEAD_DIM)[i];
            if (split == position / PAGE_SIZE / WARPS % live_splits) {
                home = kv_page<HEAD_DIM>(pages, table[position / PAGE_SIZE], kv_head, kv_heads) +
                       position % PAGE_SIZE * HEAD_DIM;
            }
        }
        // Dimensions 2i and 2i + 1 of a query head, and further on those of its second half.
        const auto words_of = [&](int row) {
            return reinterpret_cast<unsigned*>(query) + i / 16 * 128 + row * 16 + i % 16;
        };
        for (int row = threadIdx.x / QUARTER; row < HEADS; row += ROWS) {  // heads that do not exist
            if (row >= group) words_of(row)[0] = words_of(row)[BLOCKS * 64] = 0;
        }
        wait_for_predecessor();
        float2 first[ROUNDS], second[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int row = r * ROWS + threadIdx.x / QUARTER;  // the query heads, the key, the value
            if (row >= group + 2) break;
            const int head = row < group ? kv_head * group + row : heads + (row - group) * kv_heads + kv_head;
            const float2* from = reinterpret_cast<const float2*>(qkv + head * HEAD_DIM);
            first[r] = from[i];
            second[r] = from[QUARTER + i];
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int row = r * ROWS + threadIdx.x / QUARTER;
            if (row >= group + 2) break;
            if (row <= group) turn(first[r], second[r], c, s);
            const unsigned a = word_from<T>(first[r].x, first[r].y), b = word_from<T>(second[r].x, second[r].y);
            if (row < group) {
                words_of(row)[0] = a;
                words_of(row)[BLOCKS * 64] = b;
                continue;
            }
            unsigned* to = reinterpret_cast<unsigned*>(fresh[row - group]) + i;
            to[0] = a;
            to[QUARTER] = b;
            if (home != nullptr) {
                to = reinterpret_cast<unsigned*>(home + (row - group) * PAGE_SIZE * HEAD_DIM) + i;
                to[0] = a;
                to[QUARTER] = b;
            }
        }
    } else {
        wait_for_predecessor();
        if (!early && page < page_count) {
            ask_keys();
            ask_values();
        }
        if (warp < BLOCKS) {
            const T* from = q + (kv_head * group + min(g, group - 1)) * HEAD_DIM + 32 * warp + 8 * t;
            query[warp][lane] = g < group ? load_pack(from).bits : zero_pack<T>().bits;
        }
    }
    launch_dependents();  // not before: the next kernel asks for its weights, of the same memory
    __syncthreads();

    float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {};  // of heads 2t and 2t + 1; l of this lane's tokens
    float o[TILES][4] = {};
    while (page < page_count) {
        if (ROPE && page == page_count - 1) {
            const int last = stored - page * PAGE_SIZE;  // the new token's row
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                if (g + i % 2 * 8 == last) k[i / 2][i % 2] = fresh[0][i / 2 * 4 + t];
            }
#pragma unroll
            for (int i = 0; i < 4 * HALVES; ++i) {
                if (2 * t + i % 2 + i / 2 % 2 * 8 == last) v[i / 4][i % 4] = fresh[1][i / 4 * 8 + g];
            }
        }
        float s[4] = {};  // tokens g and g + 8 of the page; of each, heads 2t and 2t + 1
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const uint4 top = k[b][0], bottom = k[b][1], x = query[b][lane];
            const unsigned a0[4] = {top.x, bottom.x, top.y, bottom.y}, x0[2] = {x.x, x.y};
            const unsigned a1[4] = {top.z, bottom.z, top.w, bottom.w}, x1[2] = {x.z, x.w};
            multiply(s, a0, x0, T());
            multiply(s, a1, x1, T());
        }
        const int token = page * PAGE_SIZE + g;
        page += stride;
        number = next_number;
        if (page < page_count) ask_keys();
        next_number = table[min(page + stride, max_pages - 1)];

#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = token + i / 2 * 8 < tokens ? s[i] * scale_log2 : minus_infinity();
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float new_m = fmaxf(m[h], fmaxf(s[h], s[2 + h]));
#pragma unroll
            for (int d = 4; d < 32; d *= 2) new_m = fmaxf(new_m, __shfl_xor_sync(0xffffffffu, new_m, d));
            keep[h] = exp2f(m[h] - new_m);
            m[h] = new_m;
            s[h] = exp2f(s[h] - new_m);
            s[2 + h] = exp2f(s[2 + h] - new_m);
            l[h] = l[h] * keep[h] + (s[h] + s[2 + h]);
        }
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) o[i / 4][i % 4] *= keep[i % 2];
        const unsigned b[2] = {transpose_8x8(word_from<T>(s[0], s[1])), transpose_8x8(word_from<T>(s[2], s[3]))};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {  // dimensions 8g + 2j and 8g + 2j + 1 of 64, for all g
            const uint4* four = v[tile / 4];
            const int j = tile % 4;
            const unsigned a[4] = {prmt(word_of(four[0], j), word_of(four[1], j), 0x5410u),
                                   prmt(word_of(four[0], j), word_of(four[1], j), 0x7632u),
                                   prmt(word_of(four[2], j), word_of(four[3], j), 0x5410u),
                                   prmt(word_of(four[2], j), word_of(four[3], j), 0x7632u)};
            multiply(o[tile], a, b, T());
        }
        if (page < page_count) ask_values();
    }

    __shared__ Board<TILES> board;
    float answer[4];  // of tile `warp`: two dimensions, and of each, heads 2t and 2t + 1
    add_warps(board, o, m, l, answer);
    if (live_splits > 1) {
        uint2* answers = partial + static_cast<size_t>(kv_head * gridDim.x) * TILES * 32;
        float* lses = lse + kv_head * gridDim.x * HEADS;
        if (warp < TILES) {
            answers[(split * TILES + warp) * 32 + lane] =
                make_uint2(word_from<T>(answer[0], answer[1]), word_from<T>(answer[2], answer[3]));
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
        add_splits<T>(board, answers, lses, live_splits, answer);
    }
    if (warp >= TILES) return;
    if (ROPE && tokens < 1) answer[0] = answer[1] = answer[2] = answer[3] = __uint_as_float(0x7fffffffu);  // no position
    const int dim = 64 * (warp / 4) + 8 * g + 2 * (warp % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (2 * t + h < group) {
            T* to = out + (kv_head * group + 2 * t + h) * HEAD_DIM + dim;
            *reinterpret_cast<unsigned*>(to) = word_from<T>(answer[h], answer[2 + h]);
        }
    }
}
