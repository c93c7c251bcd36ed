// What kernels share that stream INT4 weights through rings of shared memory; csrc/int4_ring.cu says how they work.
#pragma once
#include "int4_mma.cuh"
#include "mbarrier.cuh"
#include "pack.cuh"
#include "split.cuh"

constexpr int RING_STAGES = 2, RING_WARPS = 16, RING_THREADS = 32 * RING_WARPS;
constexpr int RING_CHUNK = 512;  // columns of a stage
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

// sum += the stage times x: of rows g and g + 8, and for each mma of token t of its four.
// x_lane, group_lane: where this lane's columns of B and its token's groups lie, see csrc/include/split.cuh.
template <int GROUP, bool ZEROS, int MMAS>
__device__ __forceinline__ void multiply_stage(const unsigned char* stage, unsigned from, unsigned cols,
                                               const unsigned char* const (&x_lane)[MMAS],
                                               const SplitGroup* const (&group_lane)[MMAS], float (&sum)[MMAS][2]) {
    constexpr int STEP = GROUP < 64 ? 64 : GROUP;  // columns taken at a time
    const int lane = threadIdx.x % 32, g = lane / 4;
    const unsigned columns = min(cols - from, static_cast<unsigned>(RING_CHUNK));
    const auto add_group = [&](unsigned group, const int (&d)[MMAS][4]) {
        const unsigned* line = reinterpret_cast<const unsigned*>(stage + RING_CHUNK * 8 + group * 32);
        const float2 scale = half2_to_float2(line[g]);
#pragma unroll
        for (int m = 0; m < MMAS; ++m) {
            const SplitGroup of_x = group_lane[m][from / GROUP + group];
            int top = 256 * d[m][0] + d[m][1], bottom = 256 * d[m][2] + d[m][3];
            if constexpr (ZEROS) {
                const float2 z = half2_to_float2(line[Stage<GROUP, ZEROS>::SCALE_BYTES / 4 + g]);
                top -= static_cast<int>(16.0f * z.x) * of_x.sum;
                bottom -= static_cast<int>(16.0f * z.y) * of_x.sum;
            }
            sum[m][0] = fmaf(scale.x * of_x.scale, static_cast<float>(top), sum[m][0]);     // row g
            sum[m][1] = fmaf(scale.y * of_x.scale, static_cast<float>(bottom), sum[m][1]);  // row g + 8
        }
    };
    const auto take = [&](unsigned k0) {  // STEP columns
        int d[MMAS][4];
#pragma unroll
        for (int k = 0; k < STEP; k += 64) {
            const uint4 w = reinterpret_cast<const uint4*>(stage + (k0 + k) * 8)[lane];
            uint4 b[MMAS];
#pragma unroll
            for (int m = 0; m < MMAS; ++m) b[m] = *reinterpret_cast<const uint4*>(x_lane[m] + (from + k0 + k) * 2);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if ((k + 32 * half) % GROUP == 0) {
#pragma unroll
                    for (int i = 0; i < 4 * MMAS; ++i) d[i / 4][i % 4] = 0;
                }
                int a[4];
                unpack_bytes(half ? w.z : w.x, a[0], a[2]);  // row g
                unpack_bytes(half ? w.w : w.y, a[1], a[3]);  // row g + 8
#pragma unroll
                for (int m = 0; m < MMAS; ++m) {
                    mma_16x8x32_s8(d[m], a, half ? make_uint2(b[m].z, b[m].w) : make_uint2(b[m].x, b[m].y));
                }
                if ((k + 32 * half + 32) % GROUP == 0) add_group((k0 + k + 32 * half) / GROUP, d);
            }
        }
    };
    if (columns == RING_CHUNK) {
#pragma unroll
        for (unsigned k0 = 0; k0 < RING_CHUNK; k0 += STEP) take(k0);
    } else {
#pragma unroll 1
        for (unsigned k0 = 0; k0 < columns; k0 += STEP) take(k0);
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
    else split(Count<MOST>());
}

// An octet of h * norm as whole numbers; h in fp32 in global memory, eight of the norm in `weights`. All lanes call.
// Returns the sum of the octet's squares.
template <int GROUP, bool SUM>
__device__ __forceinline__ float split_normed(const Octets& octets, int octet, const float* h, const uint4& weights,
                                              unsigned char* bytes, SplitGroup* groups) {
    float v[8] = {}, square = 0.0f;
    if (octet < octets.count) {
        const float4 a = reinterpret_cast<const float4*>(h)[octet * 2];
        const float4 b = reinterpret_cast<const float4*>(h)[octet * 2 + 1];
        const float eight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        unpack_halves(weights, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            square = fmaf(eight[j], eight[j], square);
            v[j] *= eight[j];
        }
    }
    const SplitOctet split = split_octet<GROUP, SUM>(v);
    if (octet < octets.count) store_octet<GROUP>(split, octet, bytes, groups);
    return square;
}

// 1 / sqrt(mean of h^2 + eps) from the sums of its pieces, added in their order: the same bits in every block.
__device__ __forceinline__ float norm_factor(const float* squares, int pieces, int cols, float eps) {
    float square = 0.0f;
#pragma unroll 8
    for (int i = 0; i < pieces; ++i) square += squares[i];
    return 1.0f / sqrtf(square / cols + eps);
}
