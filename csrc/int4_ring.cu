// INT4 weights times up to eight tokens, streamed by bulk copies to integer tensor cores (sm_90).      lesson 04
//
//   y[n, r] = sum over k of (q[r, k] - z[r, k / group]) * scale[r, k / group] * x[n, k]  (+ bias[r]) (+ residual[n, r])
//
//   words, scales, zero-points z (ZEROS): as in csrc/int4_gemm.cu; bias (rows), residual and y (tokens, rows) float
//   x      HALF_X   half (tokens, cols), times `factor`
//          NORM_X   float (cols), normalised: x * norm / sqrt(mean of x^2 + factor), norm (cols) half; one token
//          SPLIT_X  what split_x makes of HALF_X, where that does not fit into shared memory
//   SWIGLU: rows alternate, 16 of a gate and 16 that it multiplies; y (tokens, rows / 2) half is
//           gate / (1 + exp(-gate)) * up * y_factor
//
// Must move:  the same bytes as csrc/int4_gemm.cu.
// Launch:     at most a block for each multiprocessor and for each 16 rows (SWIGLU 32), of RING_WARPS warps. Dynamic
//             shared memory: rings, `slots` tiles of partial sums, groups of x, x; see nanoqwen/kernels/int4_ring.py.
// Sums:       whole numbers within a group, exact; fp32 across groups.
// Teaches:    bytes in flight without registers, and bytes that are already on their way when the kernel's turn comes.
//
// A block has neighbouring tiles of 16 rows, in chunks of 512 columns: 4 KB of words that lie together. Chunk c of
// the block belongs to warp c % RING_WARPS, and each warp has a ring of its own that its lane 0 fills: nobody waits for
// another warp but at the end.
//
//     warp 0   | stage 0: chunk  0 | stage 1: chunk 16 |        chunk 32 comes into stage 0 when chunk 0 has been read
//     warp 1   | stage 0: chunk  1 | stage 1: chunk 17 |
//      ...
//
// Weights depend on no kernel before this one, so the rings are filled first, and only then the kernel waits for its
// turn. Then x becomes whole numbers (csrc/include/split.cuh). A word of weights becomes two words of signed bytes by
// one shift and two masks, where halves need a shift and four, and bytes leave no offsets to take off.

#include "int4_mma.cuh"
#include "mbarrier.cuh"
#include "pack.cuh"
#include "split.cuh"
#include "sync.cuh"

constexpr int RING_STAGES = 2, RING_WARPS = 16, RING_THREADS = 32 * RING_WARPS;
constexpr int RING_CHUNK = 512;   // columns of a stage
constexpr int NORM_COLS = 16384;  // of x at most, with a norm
enum Input { HALF_X, NORM_X, SPLIT_X };
template <int n> struct Count { static constexpr int value = n; };
extern __shared__ __align__(128) unsigned char ring[];

// A stage: the words of a chunk, then its scales, then its zero-points.
template <int GROUP, bool ZEROS>
struct Stage {
    static constexpr int SCALE_BYTES = RING_CHUNK / GROUP * 32, ZEROS_AT = RING_CHUNK * 8 + SCALE_BYTES;
    static constexpr int BYTES = RING_CHUNK * 8 + (ZEROS ? 2 : 1) * SCALE_BYTES;
};

// One thread starts the copies of `columns` columns of a tile's 16 rows, from column `from` on.
template <int GROUP, bool ZEROS>
__device__ __forceinline__ void fill_stage(unsigned char* to, mbarrier_t* landed, const unsigned* words,
                                           const __half* scales, const __half* zeros, int tile, unsigned from,
                                           unsigned cols) {
    const unsigned columns = min(cols - from, static_cast<unsigned>(RING_CHUNK)), scale_bytes = columns / GROUP * 32;
    const size_t place = static_cast<size_t>(tile) * cols + from;
    mbarrier_arrive_expect_bytes(landed, columns * 8 + (ZEROS ? 2 : 1) * scale_bytes);
    bulk_copy(to, words + place * 2, columns * 8, landed);
    bulk_copy(to + RING_CHUNK * 8, scales + place / GROUP * 16, scale_bytes, landed);
    if constexpr (ZEROS) bulk_copy(to + Stage<GROUP, ZEROS>::ZEROS_AT, zeros + place / GROUP * 16, scale_bytes, landed);
}

template <int GROUP>
struct Steps {  // of columns that are taken as one: at least two mma
    static constexpr int COLS = GROUP < 64 ? 64 : GROUP, PAIRS = COLS / 64, GROUPS = COLS / GROUP;
};

// What a lane reads of a stage.
template <int GROUP, bool ZEROS>
struct StageWords {
    const uint4* words;
    const unsigned* lines;

    __device__ __forceinline__ explicit StageWords(const unsigned char* stage)
        : words(reinterpret_cast<const uint4*>(stage) + threadIdx.x % 32),
          lines(reinterpret_cast<const unsigned*>(stage + RING_CHUNK * 8) + threadIdx.x % 32 / 4) {}
    __device__ __forceinline__ uint4 word(int i) const { return words[i * 32]; }  // of the i-th 64 columns
    __device__ __forceinline__ unsigned scale(int group) const { return lines[group * 8]; }
    __device__ __forceinline__ unsigned zero(int group) const {
        return lines[Stage<GROUP, ZEROS>::SCALE_BYTES / 4 + group * 8];
    }
};

// COUNT steps from step `first` on.
template <int GROUP, bool ZEROS, int COUNT, int MMAS, class Word, class X, class Scale, class Zero, class OfX>
__device__ __forceinline__ void multiply_steps(int first, const Word& word, const X& x, const Scale& scale,
                                               const Zero& zero, const OfX& of_x, float (&sum)[MMAS][2]) {
    constexpr int PAIRS = Steps<GROUP>::PAIRS, GROUPS = Steps<GROUP>::GROUPS;
    int d[COUNT][GROUPS][MMAS][4] = {};
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        uint4 b[COUNT][MMAS];
#pragma unroll
        for (int i = 0; i < COUNT * MMAS; ++i) {
            b[i / MMAS][i % MMAS] = x((first + i / MMAS) * PAIRS + pair, i % MMAS);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const uint4 w = word((first + i) * PAIRS + pair);
                int a[4];
                unpack_bytes(half ? w.z : w.x, a[0], a[2]);  // row g
                unpack_bytes(half ? w.w : w.y, a[1], a[3]);  // row g + 8
#pragma unroll
                for (int m = 0; m < MMAS; ++m) {
                    const uint4 v = b[i][m];
                    mma_16x8x32_s8(d[i][half % GROUPS][m], a, half ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y));
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT * GROUPS; ++i) {
        const int group = first * GROUPS + i;
        const float2 of_rows = half2_to_float2(scale(group));
#pragma unroll
        for (int m = 0; m < MMAS; ++m) {
            const SplitGroup its_x = of_x(group, m);
            const int(&p)[4] = d[i / GROUPS][i % GROUPS][m];
            int top = 256 * p[0] + p[1], bottom = 256 * p[2] + p[3];
            if constexpr (ZEROS) {
                const float2 z = half2_to_float2(zero(group));
                top -= static_cast<int>(16.0f * z.x) * its_x.sum;
                bottom -= static_cast<int>(16.0f * z.y) * its_x.sum;
            }
            sum[m][0] = fmaf(of_rows.x * its_x.scale, static_cast<float>(top), sum[m][0]);     // row g
            sum[m][1] = fmaf(of_rows.y * its_x.scale, static_cast<float>(bottom), sum[m][1]);  // row g + 8
        }
    }
}

// sum += a full stage times x: of rows g and g + 8, and for each mma of token t of its four.
//   x(i, m)     this lane's columns of B, of the i-th 64 columns; of_x(i, m)  the i-th group of its token
//   has_read    called by all lanes as soon as the stage may be filled again
//
// All words are asked for at first, and groups take turns: a mma waits for the one before it of the same group.
template <int GROUP, bool ZEROS, int MMAS, class X, class OfX, class HasRead>
__device__ __forceinline__ void multiply_stage(const unsigned char* stage, const X& x, const OfX& of_x,
                                               float (&sum)[MMAS][2], const HasRead& has_read) {
    constexpr int STEP = Steps<GROUP>::COLS, ALL = RING_CHUNK / STEP;
    constexpr int TURNS = ALL < 4 / MMAS ? ALL : 4 / MMAS;  // steps that take turns
    uint4 word[RING_CHUNK / 64];
    unsigned scale[RING_CHUNK / GROUP], zero[ZEROS ? RING_CHUNK / GROUP : 1];
    const StageWords<GROUP, ZEROS> words(stage);
#pragma unroll
    for (int i = 0; i < RING_CHUNK / 64; ++i) word[i] = words.word(i);
#pragma unroll
    for (int i = 0; i < RING_CHUNK / GROUP; ++i) {
        scale[i] = words.scale(i);
        if constexpr (ZEROS) zero[i] = words.zero(i);
    }
    has_read();
#pragma unroll
    for (int first = 0; first < ALL; first += TURNS) {
        multiply_steps<GROUP, ZEROS, TURNS>(first, [&](int i) { return word[i]; }, x, [&](int i) { return scale[i]; },
                                            [&](int i) { return zero[ZEROS ? i : 0]; }, of_x, sum);
    }
}

// The same of a stage that has `columns` columns, a multiple of 64 and of GROUP.
template <int GROUP, bool ZEROS, int MMAS, class X, class OfX>
__device__ __forceinline__ void multiply_part(const unsigned char* stage, unsigned columns, const X& x, const OfX& of_x,
                                              float (&sum)[MMAS][2]) {
    const StageWords<GROUP, ZEROS> words(stage);
#pragma unroll 1
    for (unsigned step = 0; step < columns / Steps<GROUP>::COLS; ++step) {
        multiply_steps<GROUP, ZEROS, 1>(step, [&](int i) { return words.word(i); }, x,
                                        [&](int i) { return words.scale(i); }, [&](int i) { return words.zero(i); },
                                        of_x, sum);
    }
}

// Which octet of x a lane takes: a warp has 32 at a time, the i-th time those of piece i * RING_WARPS + warp. Blocks
// begin at different pieces, else all would ask for the same at once.
struct Octets {
    int count, pieces, turn;

    __device__ __forceinline__ explicit Octets(int count)
        : count(count), pieces((count + 31) / 32), turn((count + 31) / 32 * blockIdx.x / gridDim.x) {}
    __device__ __forceinline__ int piece(int i) const {
        const int mine = i * RING_WARPS + threadIdx.x / 32, turned = mine + turn;
        return mine >= pieces ? pieces : turned < pieces ? turned : turned - pieces;
    }
    // `count` and more: none
    __device__ __forceinline__ int octet(int i) const { return piece(i) * 32 + threadIdx.x % 32; }
};

// x, halves in global memory, as whole numbers. All threads of the block call.
template <int GROUP, bool SUM, int MOST>
__device__ __forceinline__ void split_halves(const Octets& octets, const __half* x, unsigned char* bytes,
                                             SplitGroup* groups) {
    const auto split = [&](auto count) {  // loads of so many pieces in flight
        constexpr int COUNT = decltype(count)::value;
        for (int i0 = 0; i0 * RING_WARPS < octets.pieces; i0 += COUNT) {
            Pack<__half> pack[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int octet = octets.octet(i0 + i);
                pack[i] = zero_pack<__half>();
                if (octet < octets.count) pack[i] = load_pack(x + octet * 8);
            }
            SplitOctet made[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                float v[8];
                unpack_halves(pack[i].bits, v);
                made[i] = split_octet<GROUP, SUM>(v);
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int octet = octets.octet(i0 + i);
                if (octet < octets.count) store_octet<GROUP>(made[i], octet, bytes, groups);
            }
        }
    };
    if (octets.pieces <= RING_WARPS) split(Count<1>());
    else if (octets.pieces <= 2 * RING_WARPS) split(Count<2>());
    else split(Count<MOST>());
}

// h * norm as whole numbers, h in fp32 in global memory. All threads of the block call.
//   weights(i, octet)  eight of the norm, of the octet that the lane takes the i-th time
//   squares            gets the sum of each piece's squares
template <int GROUP, bool SUM, class Weights>
__device__ __forceinline__ void split_normed(const Octets& octets, const float* h, const Weights& weights,
                                             unsigned char* bytes, SplitGroup* groups, float* squares) {
    const auto split = [&](auto count) {  // loads of so many pieces in flight
        constexpr int COUNT = decltype(count)::value;
        for (int i0 = 0; i0 * RING_WARPS < octets.pieces; i0 += COUNT) {
            float4 eight[COUNT][2] = {};
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int octet = octets.octet(i0 + i);
                if (octet >= octets.count) continue;
                eight[i][0] = reinterpret_cast<const float4*>(h)[octet * 2];
                eight[i][1] = reinterpret_cast<const float4*>(h)[octet * 2 + 1];
            }
            SplitOctet made[COUNT];
            float square[COUNT] = {};
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int octet = octets.octet(i0 + i);
                const float4 a = eight[i][0], b = eight[i][1];
                const float values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
                float v[8];
                unpack_halves(octet < octets.count ? weights(i0 + i, octet) : zero_pack<__half>().bits, v);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    square[i] = fmaf(values[j], values[j], square[i]);
                    v[j] *= values[j];
                }
                made[i] = split_octet<GROUP, SUM>(v);
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int octet = octets.octet(i0 + i), piece = octets.piece(i0 + i);
                square[i] = warp_sum(square[i]);
                if (octet < octets.count) store_octet<GROUP>(made[i], octet, bytes, groups);
                if (threadIdx.x % 32 == 0 && piece < octets.pieces) squares[piece] = square[i];
            }
        }
    };
    if (octets.pieces <= RING_WARPS) split(Count<1>());
    else split(Count<2>());
}

// 1 / sqrt(mean of h^2 + eps) from the sums of its pieces, added in their order: the same bits in every block.
__device__ __forceinline__ float norm_factor(const float* squares, int pieces, int cols, float eps) {
    float square = 0.0f;
#pragma unroll 8
    for (int i = 0; i < pieces; ++i) square += squares[i];
    return 1.0f / sqrtf(square / cols + eps);
}

// A row's sum over the chunks, which lie `stride` apart. Four sums, always the same ones, so that an addition need not
// wait for the one before it.
__device__ __forceinline__ float add_chunks(const float* sums, int chunks, int stride) {
    float four[4] = {};
    for (int i = 0; i < chunks; i += 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (i + j < chunks) four[j] += sums[(i + j) * stride];
        }
    }
    return (four[0] + four[1]) + (four[2] + four[3]);
}

// x (tokens, cols) as whole numbers, for SPLIT_X. Launch: a thread for each eight columns of all tokens.
template <int GROUP>
__global__ void split_x(const __half* x, unsigned char* bytes, SplitGroup* groups, int octets) {
    launch_dependents();
    wait_for_predecessor();
    const int octet = blockIdx.x * blockDim.x + threadIdx.x;
    float v[8];
    unpack_halves((octet < octets ? load_pack(x + octet * 8) : zero_pack<__half>()).bits, v);
    const SplitOctet split = split_octet<GROUP, true>(v);
    if (octet < octets) store_octet<GROUP>(split, octet, bytes, groups);
}

template <int GROUP, int TOKENS, Input INPUT, bool SWIGLU, bool ZEROS>
__global__ void __launch_bounds__(RING_THREADS, 1)
    int4_gemm_ring(const unsigned* words, const __half* scales, const __half* zeros, const void* x, const __half* norm,
                   const SplitGroup* groups, const float* bias, const float* residual, void* y, int tokens, int rows,
                   unsigned cols, int slots, float factor, float y_factor) {
    static_assert(is_group_size<GROUP>, "scales of this group size are not what the packer writes");
    static_assert(INPUT != NORM_X || TOKENS == 1, "each token has a norm of its own");
    constexpr int MMAS = (TOKENS + 3) / 4;  // a mma has eight columns: the bytes of four tokens
    constexpr int STAGE_BYTES = Stage<GROUP, ZEROS>::BYTES;
    constexpr int UNIT = SWIGLU ? 2 : 1;  // tiles that stay together
    __shared__ mbarrier_t full[RING_WARPS][RING_STAGES];
    __shared__ float squares[INPUT == NORM_X ? NORM_COLS / 256 : 1];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int chunks = (cols + RING_CHUNK - 1) / RING_CHUNK;  // of a tile
    const long long units = (rows + 16 * UNIT - 1) / (16 * UNIT);
    const int first_tile = units * blockIdx.x / gridDim.x * UNIT;
    const int end_tile = units * (blockIdx.x + 1) / gridDim.x * UNIT;

    unsigned char* stages = ring + warp * RING_STAGES * STAGE_BYTES;
    // [slots][chunks][TOKENS][16]
    float* partial = reinterpret_cast<float*>(ring + RING_WARPS * RING_STAGES * STAGE_BYTES);
    SplitGroup* x_groups = reinterpret_cast<SplitGroup*>(partial + slots * chunks * 16 * TOKENS);
    unsigned char* x_bytes = ring + RING_WARPS * RING_STAGES * STAGE_BYTES + slots * chunks * 64 * TOKENS +
                             (tokens * (cols / GROUP) + 1) / 2 * 16;

    int next_tile = first_tile + warp / chunks, next_chunk = warp % chunks;
    const auto fill = [&](int stage) {
        if (next_tile >= end_tile) return;
        fill_stage<GROUP, ZEROS>(stages + stage * STAGE_BYTES, &full[warp][stage], words, scales, zeros, next_tile,
                                 next_chunk * RING_CHUNK, cols);
        for (next_chunk += RING_WARPS; next_chunk >= chunks; ++next_tile) next_chunk -= chunks;
    };

    if (lane == 0) {
        for (int stage = 0; stage < RING_STAGES; ++stage) mbarrier_init(&full[warp][stage], 1);
        mbarrier_init_fence();
        for (int stage = 0; stage < RING_STAGES; ++stage) fill(stage);
    }
    __syncwarp();
    const Octets octets(tokens * (cols / 8));
    if constexpr (INPUT == NORM_X) {  // nor does the norm depend on anyone; it waits where its octet of x will lie
        for (int i = 0; i * RING_WARPS < octets.pieces; ++i) {
            const int octet = octets.octet(i);
            if (octet >= octets.count) continue;
            const uint4 eight = load_pack(norm + octet * 8).bits;
            *reinterpret_cast<uint2*>(x_bytes + octet_place(octet)) = make_uint2(eight.x, eight.y);
            *reinterpret_cast<uint2*>(x_bytes + octet_place(octet) + 64) = make_uint2(eight.z, eight.w);
        }
    }
    // What is added to a row in the end is asked for long before.
    const bool early = TOKENS == 1 && !SWIGLU && threadIdx.x < (min(first_tile + slots, end_tile) - first_tile) * 16 &&
                       first_tile * 16 + threadIdx.x < rows;
    const float early_bias = early && bias ? bias[first_tile * 16 + threadIdx.x] : 0.0f;
    wait_for_predecessor();
    const float early_residual = early && residual ? residual[first_tile * 16 + threadIdx.x] : 0.0f;

    if constexpr (INPUT == HALF_X) {
        split_halves<GROUP, ZEROS, (TOKENS > 4 ? 7 : 5)>(octets, static_cast<const __half*>(x), x_bytes, x_groups);
        __syncthreads();
    }
    if constexpr (INPUT == NORM_X) {
        const auto weights = [&](int, int octet) {
            const uint2 low = *reinterpret_cast<const uint2*>(x_bytes + octet_place(octet));
            const uint2 high = *reinterpret_cast<const uint2*>(x_bytes + octet_place(octet) + 64);
            return make_uint4(low.x, low.y, high.x, high.y);
        };
        split_normed<GROUP, ZEROS>(octets, static_cast<const float*>(x), weights, x_bytes, x_groups, squares);
        __syncthreads();
        factor = norm_factor(squares, octets.pieces, cols, factor);
    }

    // Not before x is here: the next kernel's rings would be filled by the same memory.
    launch_dependents();

    // The columns of B: token 0 high, token 0 low, token 1 high ... The tokens beyond the last repeat it.
    const unsigned char* x_lane[MMAS];
    const SplitGroup* group_lane[MMAS];
#pragma unroll
    for (int m = 0; m < MMAS; ++m) {
        const unsigned mine = min(TOKENS == 1 ? 0 : 4 * m + g / 2, tokens - 1);
        const unsigned theirs = min(TOKENS == 1 ? 0 : 4 * m + t, tokens - 1);
        const unsigned char* bytes = INPUT == SPLIT_X ? static_cast<const unsigned char*>(x) : x_bytes;
        x_lane[m] = bytes + mine * cols * 2 + g % 2 * 64 + t * 16;
        group_lane[m] = (INPUT == SPLIT_X ? groups : x_groups) + theirs * (cols / GROUP);
    }

    int tile = first_tile + warp / chunks, chunk = warp % chunks, stage = 0, parity = 0;
    for (int first = first_tile; first < end_tile; first += slots) {
        const int last = min(first + slots, end_tile);
        while (tile < last) {
            float sum[MMAS][2] = {};
            mbarrier_wait(&full[warp][stage], parity);
            const unsigned char* here = stages + stage * STAGE_BYTES;
            const unsigned from = chunk * RING_CHUNK;
            const auto x_at = [&](int i, int m) {
                return *reinterpret_cast<const uint4*>(x_lane[m] + (from + i * 64) * 2);
            };
            const auto of_x = [&](int group, int m) { return group_lane[m][from / GROUP + group]; };
            const auto refill = [&] {
                __syncwarp();  // all lanes have read
                if (lane == 0) fill(stage);
            };
            if (cols - from >= RING_CHUNK) {
                uint4 held[TOKENS == 1 ? RING_CHUNK / 64 : 1];
                if constexpr (TOKENS == 1) {
#pragma unroll
                    for (int i = 0; i < RING_CHUNK / 64; ++i) held[i] = x_at(i, 0);
                }
                const auto x_held = [&](int i, int m) { return TOKENS == 1 ? held[i] : x_at(i, m); };
                multiply_stage<GROUP, ZEROS>(here, x_held, of_x, sum, refill);
            } else {
                multiply_part<GROUP, ZEROS>(here, cols - from, x_at, of_x, sum);
                refill();
            }
            if (++stage == RING_STAGES) {
                stage = 0;
                parity ^= 1;
            }
            float* to = partial + ((tile - first) * chunks + chunk) * TOKENS * 16;
#pragma unroll
            for (int m = 0; m < MMAS; ++m) {
                if (TOKENS > 1 || t == 0) {
                    to[(4 * m + t) * 16 + g] = sum[m][0];
                    to[(4 * m + t) * 16 + g + 8] = sum[m][1];
                }
            }
            for (chunk += RING_WARPS; chunk >= chunks; ++tile) chunk -= chunks;
        }
        __syncthreads();

        const auto total = [&](int place, int token) {  // of a row of the tiles first ... last
            const float* of_row = partial + (place / 16 * chunks * TOKENS + token) * 16 + place % 16;
            return add_chunks(of_row, chunks, TOKENS * 16) * factor;
        };
        const int count = (last - first) * 16 / UNIT;
        for (int i = threadIdx.x; i < count * tokens; i += RING_THREADS) {
            const int token = i / count, r = i % count;
            if constexpr (SWIGLU) {
                const int place = r / 16 * 32 + r % 16;
                const float gate = total(place, token), up = total(place + 16, token);
                static_cast<__half*>(y)[static_cast<size_t>(token) * (rows / 2) + first * 8 + r] =
                    __float2half_rn(gate / (1.0f + expf(-gate)) * up * y_factor);
            } else {
                const int row = first * 16 + r;
                if (row >= rows) continue;
                const size_t place = static_cast<size_t>(token) * rows + row;
                float value = total(r, token);
                const bool is_early = TOKENS == 1 && first == first_tile && i == threadIdx.x;
                if (bias) value += is_early ? early_bias : bias[row];
                if (residual) value += is_early ? early_residual : residual[place];
                static_cast<float*>(y)[place] = value;
            }
        }
        if (last < end_tile) __syncthreads();  // before the next sums take the places of these
    }
}
