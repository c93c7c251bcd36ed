// The same product, the weights streamed by bulk copies through a ring in shared memory (sm_90).      lesson 04
//
//   y[n, r] = sum over k of q[r, k] * scale[r, k / group] * x[n, k]  (+ bias[r]) (+ residual[n, r])
//
//   tensors as in csrc/int4_gemm.cu
//
// Must move:  the same bytes.
// Launch:     two blocks for each multiprocessor (one if TILES is 2), at most one for each 16 * TILES rows, of 32 to 256
//             threads, and RING_STAGES stages for each warp of dynamic shared memory. A block takes every gridDim.x-th
//             piece of 16 * TILES rows.
// Teaches:    bytes in flight without registers. A load holds a register for each word from the moment it leaves; a
//             bulk copy holds nothing, so a block can be several tiles ahead of what it multiplies.
//
// The warps of a block share the columns of their rows, each a run of neighbours, and each warp has a ring of its own that
// its lane 0 fills: nobody waits for another warp but at the end of the rows, and the copies run on through that.
//
//     warp 0   | stage 0 | stage 1 | stage 2 |      a stage: up to 16 rows x 512 columns or 32 x 256, and their scales
//     warp 1   | stage 0 | stage 1 | stage 2 |
//      ...

#include "int4_mma.cuh"
#include "mbarrier.cuh"
#include "pack.cuh"
#include "sync.cuh"

constexpr int RING_STAGES = 3;
constexpr int RING_WARPS = 8;  // at most
constexpr int RING_COLS = 512;  // of a stage, divided by TILES
extern __shared__ __align__(128) unsigned char ring[];

template <int GROUP, int TILES>
__global__ void __launch_bounds__(32 * RING_WARPS, TILES == 1 ? 2 : 1)
    int4_gemm_ring(const unsigned* words, const __half* scales, const __half* x, const float* bias,
                   const float* residual, float* y, int tokens, int rows, int cols) {
    static_assert(is_group_size<GROUP>, "scales of this group size are not what the packer writes");
    constexpr int STEP = GROUP < 64 ? 64 : GROUP;  // columns taken at a time
    constexpr int STEPS = RING_COLS / TILES / STEP;  // of a stage
    constexpr int BLOCKS = STEP / 32;                // of a step
    constexpr int WORD_BYTES = 8 * STEP, SCALE_BYTES = STEP / GROUP * 32;  // of a step
    constexpr int STAGE_BYTES = TILES * STEPS * (WORD_BYTES + SCALE_BYTES);
    __shared__ mbarrier_t full[RING_WARPS][RING_STAGES];
    __shared__ float partial[2][RING_WARPS][TILES][16][8];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int row_tiles = (rows + 15) / 16, pieces = (row_tiles + TILES - 1) / TILES, steps = cols / STEP;
    const int first = steps * warp / warps, last = steps * (warp + 1) / warps;  // this warp's
    unsigned char* stages = ring + warp * RING_STAGES * STAGE_BYTES;

    // What lane 0 copies next, up to the end of its last piece.
    int next_piece = first < last ? static_cast<int>(blockIdx.x) : pieces, next_step = first;
    const auto fill = [&](int stage) {
        if (next_piece >= pieces) return;
        const int count = min(STEPS, last - next_step);
        unsigned char* to = stages + stage * STAGE_BYTES;
        mbarrier_t* landed = &full[warp][stage];
        mbarrier_arrive_expect_bytes(landed, TILES * count * (WORD_BYTES + SCALE_BYTES));
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            const size_t tile = min(next_piece * TILES + r, row_tiles - 1), from = tile * steps + next_step;
            bulk_copy(to + r * STEPS * WORD_BYTES, words + from * (WORD_BYTES / 4), count * WORD_BYTES, landed);
            bulk_copy(to + (TILES * WORD_BYTES + r * SCALE_BYTES) * STEPS, scales + from * (SCALE_BYTES / 2),
                      count * SCALE_BYTES, landed);
        }
        next_step += STEPS;
        if (next_step >= last) {
            next_step = first;
            next_piece += gridDim.x;
        }
    };

    launch_dependents();
    if (lane == 0) {
        for (int stage = 0; stage < RING_STAGES; ++stage) mbarrier_init(&full[warp][stage], 1);
        mbarrier_init_fence();
        for (int stage = 0; stage < RING_STAGES; ++stage) fill(stage);
    }
    __syncwarp();
    // Weights are nobody's output, but x is. It is not __restrict__: a compiler may take what that promises to be
    // constant for the whole kernel, and read it before the wait.
    wait_for_predecessor();

    const bool has_token = g < tokens;
    const __half* x_lane = x + static_cast<size_t>(has_token ? g : 0) * cols + 8 * t;
    int stage = 0, parity = 0, buffer = 0;
    for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += STEPS) {
            mbarrier_wait(&full[warp][stage], parity);
            const unsigned char* here = stages + stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                if (step + i >= last) break;
                Pack<__half> xs[BLOCKS];
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    const int k = (step + i) * STEP + block * 32;
                    xs[block] = has_token ? load_pack(x_lane + k) : zero_pack<__half>();
                }
                float c[4], d[TILES][4];
                uint4 four[TILES];
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    if (block * 32 % GROUP == 0) {
#pragma unroll
                        for (int j = 0; j < 4; ++j) c[j] = 0.0f;
#pragma unroll
                        for (int j = 0; j < 4 * TILES; ++j) d[j / 4][j % 4] = 0.0f;
                    }
                    offsets_mma(c, xs[block].bits);
#pragma unroll
                    for (int r = 0; r < TILES; ++r) {
                        const unsigned char* tile = here + (r * STEPS + i) * WORD_BYTES;
                        if (block % 2 == 0) four[r] = reinterpret_cast<const uint4*>(tile + block / 2 * 512)[lane];
                        const uint4 w = four[r];
                        fragment_mma(d[r], block % 2 ? w.z : w.x, block % 2 ? w.w : w.y, xs[block].bits);
                    }
                    if ((block + 1) * 32 % GROUP == 0) {
#pragma unroll
                        for (int r = 0; r < TILES; ++r) {
                            const unsigned char* line = here + TILES * STEPS * WORD_BYTES +
                                                        (r * STEPS + i) * SCALE_BYTES + block * 32 / GROUP * 32;
                            const float2 both = half2_to_float2(reinterpret_cast<const unsigned*>(line)[g]);
                            sum[r][0] = fmaf(both.x, c[0] + d[r][0], sum[r][0]);  // row g
                            sum[r][1] = fmaf(both.x, c[1] + d[r][1], sum[r][1]);
                            sum[r][2] = fmaf(both.y, c[2] + d[r][2], sum[r][2]);  // row g + 8
                            sum[r][3] = fmaf(both.y, c[3] + d[r][3], sum[r][3]);
                        }
                    }
                }
            }
            __syncwarp();  // all lanes have read the stage
            if (lane == 0) fill(stage);
            if (++stage == RING_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }

        // Two buffers, so one barrier is enough: whoever writes into a buffer again has met, at the barrier between,
        // everyone who still had to read it.
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            *reinterpret_cast<float2*>(&partial[buffer][warp][r][g][2 * t]) = make_float2(sum[r][0], sum[r][1]);
            *reinterpret_cast<float2*>(&partial[buffer][warp][r][g + 8][2 * t]) = make_float2(sum[r][2], sum[r][3]);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TILES * 16 * tokens; i += blockDim.x) {
            const int token = i / (TILES * 16), r = i / 16 % TILES, row = (piece * TILES + r) * 16 + i % 16;
            if (row >= rows) continue;
            float total = bias ? bias[row] : 0.0f;
            for (int other = 0; other < warps; ++other) total += partial[buffer][other][r][i % 16][token];
            const size_t place = static_cast<size_t>(token) * rows + row;
            y[place] = residual ? residual[place] + total : total;
        }
        buffer ^= 1;
    }
}
