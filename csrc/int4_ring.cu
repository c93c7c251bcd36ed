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

#include "int4_ring.cuh"
#include "sync.cuh"

constexpr int RING_STAGES = 2, RING_WARPS = 16, RING_THREADS = 32 * RING_WARPS;
enum Input { HALF_X, NORM_X, SPLIT_X };
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
    const Octets<RING_WARPS> octets(tokens * (cols / 8));
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
