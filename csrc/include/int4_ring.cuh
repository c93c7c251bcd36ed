// What kernels share that stream INT4 weights through rings of shared memory; csrc/int4_ring.cu says how they work.
#pragma once
#include "int4_mma.cuh"
#include "mbarrier.cuh"
#include "pack.cuh"
#include "split.cuh"

constexpr int RING_CHUNK = 512;   // columns of a stage
constexpr int NORM_COLS = 16384;  // of x at most, with a norm
template <int n> struct Count { static constexpr int value = n; };

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

// Which octet of x a lane takes: a warp has 32 at a time, the i-th time those of piece i * WARPS + warp. Blocks begin at
// different pieces, else all would ask for the same at once.
template <int WARPS>
struct Octets {
    int count, pieces, turn;

    __device__ __forceinline__ explicit Octets(int count)
        : count(count), pieces((count + 31) / 32), turn((count + 31) / 32 * blockIdx.x / gridDim.x) {}
    __device__ __forceinline__ int piece(int i) const {
        const int mine = i * WARPS + threadIdx.x / 32, turned = mine + turn;
        return mine >= pieces ? pieces : turned < pieces ? turned : turned - pieces;
    }
    // `count` and more: none
    __device__ __forceinline__ int octet(int i) const { return piece(i) * 32 + threadIdx.x % 32; }
};

// x, halves in global memory, as whole numbers. All threads of the block call.
template <int GROUP, bool SUM, int MOST, int WARPS>
__device__ __forceinline__ void split_halves(const Octets<WARPS>& octets, const __half* x, unsigned char* bytes,
                                             SplitGroup* groups) {
    const auto split = [&](auto count) {  // loads of so many pieces in flight
        constexpr int COUNT = decltype(count)::value;
        for (int i0 = 0; i0 * WARPS < octets.pieces; i0 += COUNT) {
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
    if (octets.pieces <= WARPS) split(Count<1>());
    else if (octets.pieces <= 2 * WARPS) split(Count<2>());
    else split(Count<MOST>());
}

// h * norm as whole numbers, h in fp32 in global memory. All threads of the block call.
//   weights(i, octet)  eight of the norm, of the octet that the lane takes the i-th time
//   squares            gets the sum of each piece's squares
template <int GROUP, bool SUM, int WARPS, class Weights>
__device__ __forceinline__ void split_normed(const Octets<WARPS>& octets, const float* h, const Weights& weights,
                                             unsigned char* bytes, SplitGroup* groups, float* squares) {
    const auto split = [&](auto count) {  // loads of so many pieces in flight
        constexpr int COUNT = decltype(count)::value;
        for (int i0 = 0; i0 * WARPS < octets.pieces; i0 += COUNT) {
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
    if (octets.pieces <= WARPS) split(Count<1>());
    else split(Count<2>());
}

// 1 / sqrt(mean of h^2 + eps) from the sums of its pieces, added in their order: the same bits in every block.
__device__ __forceinline__ float norm_factor(const float* squares, int pieces, int cols, float eps) {
    float square = 0.0f;
#pragma unroll 8
    for (int i = 0; i < pieces; ++i) square += squares[i];
    return 1.0f / sqrtf(square / cols + eps);
}

// A row's sum over the chunks, which lie `stride` apart. Four sums, so that an addition need not wait for the one before
// it; always the same four.
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
