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
//     warp 0   | stage 0: chunk  0 | stage 1: chunk 16 |        chunk 32 comes into stage 0 when chunk 0 is used up
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
constexpr int RING_CHUNK = 512;  // columns of a stage
enum Input { HALF_X, NORM_X, SPLIT_X };
template <int n> struct Count { static constexpr int value = n; };
extern __shared__ __align__(128) unsigned char ring[];

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
    constexpr int STEP = GROUP < 64 ? 64 : GROUP;  // columns taken at a time
    constexpr int MMAS = (TOKENS + 3) / 4;         // a mma has eight columns: the bytes of four tokens
    constexpr int SCALE_BYTES = RING_CHUNK / GROUP * 32;
    constexpr int STAGE_BYTES = RING_CHUNK * 8 + (ZEROS ? 2 : 1) * SCALE_BYTES;
    constexpr int UNIT = SWIGLU ? 2 : 1;  // tiles that stay together
    __shared__ mbarrier_t full[RING_WARPS][RING_STAGES];
    __shared__ float squares[RING_WARPS];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int chunks = (cols + RING_CHUNK - 1) / RING_CHUNK;  // of a tile
    const long long units = (rows + 16 * UNIT - 1) / (16 * UNIT);
    const int first_tile = units * blockIdx.x / gridDim.x * UNIT;
    const int end_tile = units * (blockIdx.x + 1) / gridDim.x * UNIT;

    const int parts = min(chunks, RING_WARPS);  // of a tile's sum
    unsigned char* stages = ring + warp * RING_STAGES * STAGE_BYTES;
    // [slots][parts][TOKENS][16]
    float* partial = reinterpret_cast<float*>(ring + RING_WARPS * RING_STAGES * STAGE_BYTES);
    SplitGroup* x_groups = reinterpret_cast<SplitGroup*>(partial + slots * parts * 16 * TOKENS);
    unsigned char* x_bytes = ring + RING_WARPS * RING_STAGES * STAGE_BYTES + slots * parts * 64 * TOKENS +
                             (tokens * (cols / GROUP) + 1) / 2 * 16;

    int next_tile = first_tile + warp / chunks, next_chunk = warp % chunks;
    const auto fill = [&](int stage) {
        if (next_tile >= end_tile) return;
        const unsigned from = next_chunk * RING_CHUNK, columns = min(cols - from, static_cast<unsigned>(RING_CHUNK));
        const size_t place = static_cast<size_t>(next_tile) * cols + from;
        const unsigned scale_bytes = columns / GROUP * 32;
        unsigned char* to = stages + stage * STAGE_BYTES;
        mbarrier_t* landed = &full[warp][stage];
        mbarrier_arrive_expect_bytes(landed, columns * 8 + (ZEROS ? 2 : 1) * scale_bytes);
        bulk_copy(to, words + place * 2, columns * 8, landed);
        bulk_copy(to + RING_CHUNK * 8, scales + place / GROUP * 16, scale_bytes, landed);
        if constexpr (ZEROS) {
            bulk_copy(to + RING_CHUNK * 8 + SCALE_BYTES, zeros + place / GROUP * 16, scale_bytes, landed);
        }
        for (next_chunk += RING_WARPS; next_chunk >= chunks; ++next_tile) next_chunk -= chunks;
    };

    if (lane == 0) {
        for (int stage = 0; stage < RING_STAGES; ++stage) mbarrier_init(&full[warp][stage], 1);
        mbarrier_init_fence();
        for (int stage = 0; stage < RING_STAGES; ++stage) fill(stage);
    }
    __syncwarp();
    // A warp takes 32 octets of x at a time. Blocks begin at different ones, else all would ask for the same at once.
    const int octets = tokens * (cols / 8), pieces = (octets + 31) / 32;
    const auto octet_of = [&](int i) {
        const int piece = i * RING_WARPS + warp, turned = piece + pieces * blockIdx.x / gridDim.x;
        return piece < pieces ? (turned < pieces ? turned : turned - pieces) * 32 + lane : octets;
    };
    if constexpr (INPUT == NORM_X) {  // nor does the norm depend on anyone; it waits where its octet of x will lie
        for (int i = 0; i * RING_WARPS < pieces; ++i) {
            const int octet = octet_of(i);
            if (octet >= octets) continue;
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
        const auto split = [&](auto count) {  // loads of so many pieces in flight
            constexpr int COUNT = decltype(count)::value;
            for (int i0 = 0; i0 * RING_WARPS < pieces; i0 += COUNT) {
                Pack<__half> pack[COUNT];
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const int octet = octet_of(i0 + i);
                    pack[i] = zero_pack<__half>();
                    if (octet < octets) pack[i] = load_pack(static_cast<const __half*>(x) + octet * 8);
                }
                SplitOctet made[COUNT];
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    float v[8];
                    unpack_halves(pack[i].bits, v);
                    made[i] = split_octet<GROUP, ZEROS>(v);
                }
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const int octet = octet_of(i0 + i);
                    if (octet < octets) store_octet<GROUP>(made[i], octet, x_bytes, x_groups);
                }
            }
        };
        if (pieces <= RING_WARPS) split(Count<1>());
        else split(Count<(TOKENS > 4 ? 7 : 5)>());
        __syncthreads();
    }
    if constexpr (INPUT == NORM_X) {
        float square = 0.0f;
        for (int i = 0; i * RING_WARPS < pieces; ++i) {
            const int octet = octet_of(i);
            float v[8] = {};
            if (octet < octets) {
                const float4 a = static_cast<const float4*>(x)[octet * 2];
                const float4 b = static_cast<const float4*>(x)[octet * 2 + 1];
                const uint2 w = *reinterpret_cast<const uint2*>(x_bytes + octet_place(octet));
                const uint2 w4 = *reinterpret_cast<const uint2*>(x_bytes + octet_place(octet) + 64);
                const float h[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
                unpack_halves(make_uint4(w.x, w.y, w4.x, w4.y), v);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    square = fmaf(h[j], h[j], square);
                    v[j] *= h[j];
                }
            }
            const SplitOctet split = split_octet<GROUP, ZEROS>(v);
            if (octet < octets) store_octet<GROUP>(split, octet, x_bytes, x_groups);
        }
        square = warp_sum(square);
        if (lane == 0) squares[warp] = square;
        __syncthreads();
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < RING_WARPS; ++i) square += squares[i];
        factor = 1.0f / sqrtf(square / cols + factor);
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
        float sum[MMAS][2] = {};
        while (tile < last) {
            const unsigned char* here = stages + stage * STAGE_BYTES;
            const unsigned from = chunk * RING_CHUNK, columns = min(cols - from, static_cast<unsigned>(RING_CHUNK));
            const auto add_group = [&](unsigned group, const int (&d)[MMAS][4]) {
                const unsigned* line = reinterpret_cast<const unsigned*>(here + RING_CHUNK * 8 + group * 32);
                const float2 scale = half2_to_float2(line[g]);
#pragma unroll
                for (int m = 0; m < MMAS; ++m) {
                    const SplitGroup of_x = group_lane[m][from / GROUP + group];
                    int top = 256 * d[m][0] + d[m][1], bottom = 256 * d[m][2] + d[m][3];
                    if constexpr (ZEROS) {
                        const float2 z = half2_to_float2(line[SCALE_BYTES / 4 + g]);
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
                    const uint4 w = reinterpret_cast<const uint4*>(here + (k0 + k) * 8)[lane];
                    uint4 b[MMAS];
#pragma unroll
                    for (int m = 0; m < MMAS; ++m) {
                        b[m] = *reinterpret_cast<const uint4*>(x_lane[m] + (from + k0 + k) * 2);
                    }
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
            mbarrier_wait(&full[warp][stage], parity);
            if (columns == RING_CHUNK) {
#pragma unroll
                for (unsigned k0 = 0; k0 < RING_CHUNK; k0 += STEP) take(k0);
            } else {
#pragma unroll 1
                for (unsigned k0 = 0; k0 < columns; k0 += STEP) take(k0);
            }
            __syncwarp();  // all lanes have read the stage
            if (lane == 0) fill(stage);
            if (++stage == RING_STAGES) {
                stage = 0;
                parity ^= 1;
            }

            // A warp may have several chunks of a tile; every part of it is written once.
            const int this_tile = tile, part = chunks > RING_WARPS ? warp : chunk;
            for (chunk += RING_WARPS; chunk >= chunks; ++tile) chunk -= chunks;
            if (tile != this_tile) {
                float* to = partial + ((this_tile - first) * parts + part) * TOKENS * 16;
#pragma unroll
                for (int m = 0; m < MMAS; ++m) {
                    if (TOKENS > 1 || t == 0) {
                        to[(4 * m + t) * 16 + g] = sum[m][0];
                        to[(4 * m + t) * 16 + g + 8] = sum[m][1];
                    }
                    sum[m][0] = sum[m][1] = 0.0f;
                }
            }
        }
        __syncthreads();

        const auto total = [&](int place, int token) {  // of a row of the tiles first ... last
            float all = 0.0f;
            for (int part = 0; part < parts; ++part) {
                all += partial[((place / 16 * parts + part) * TOKENS + token) * 16 + place % 16];
            }
            return all * factor;
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
