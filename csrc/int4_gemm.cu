// INT4 weights times up to eight tokens, on tensor cores.                           lesson 04
//
//   y[n, r] = sum over k of (q[r, k] - z[r, k / group]) * scale[r, k / group] * x[n, k]  (+ bias[r]) (+ residual[n, r])
//
//   words: layout 2; scales (rows / 16, cols / group, 16) half, place 2 g + h of a sixteen is row g + 8 h;
//   zero-points z, where there are any (ZEROS), as the scales, whole numbers -8 ... 7;
//   x (tokens, cols) half; bias (rows), residual and y (tokens, rows) float
//
// Must move:  rows * cols / 2 + rows * cols / group * 2 (4 with zero-points) + tokens * (cols * 2 + rows * 4) bytes,
//             each once.
// Launch:     ceil(rows / (16 * TILES)) blocks of 32 * WARPS threads. cols is a multiple of 64 and of GROUP.
// Sums:       fp32, in the tensor cores within a group and by hand across groups.
// Teaches:    who multiplies matters less than who unpacks: a tensor core takes halves as they come, 512 weights in two
//             instructions, and two more take the offsets off. To unpack them is ten, 5/8 of one for a weight of a lane.
//
// Layout 2. The weights are the mma's A, 16 rows x 16 columns; the tokens are its B, 16 x 8. The sum does not mind in
// which order the columns are taken, as long as A and B agree, so lane (g, t) takes of every 32 columns the eight
// neighbours 8t ... 8t + 7: one word of row g, one of row g + 8, and of x one 16-byte load in its natural order.
//
//                 columns of a block of 32                     a lane's 16 bytes, for two blocks of 32 columns
//            0 ... 7   8 ... 15  16 ... 23  24 ... 31
//   row 0   | lane 0  | lane 1  | lane 2   | lane 3  |         word 0   block 0, row g
//   row 1   | lane 4  | lane 5  | lane 6   | lane 7  |         word 1   block 0, row g + 8
//    ...                                                       word 2   block 1, row g
//   row 7   | lane 28 | lane 29 | lane 30  | lane 31 |         word 3   block 1, row g + 8
//   row 8   | lane 0  | lane 1  |  ...     (words 1, 3)
//
// A tile of 16 rows x 64 columns is 512 bytes, which a warp loads in one request, and the tiles of 16 rows follow one
// another along the columns. Rows that fill the last tile are zeros.

#include "int4_mma.cuh"
#include "pack.cuh"

// A warp takes TILES tiles of 16 rows, which share each load of x and the mma that takes the offsets off; the WARPS of a
// block share the columns.
// A zero-point is the same for a whole group: it is taken off times the sum of x over the group, which two more mma give.
template <int GROUP, int WARPS, int TILES, bool ZEROS>
__global__ void __launch_bounds__(32 * WARPS)
    int4_gemm_mma(const unsigned* __restrict__ words, const __half* __restrict__ scales,
                  const __half* __restrict__ zeros, const __half* __restrict__ x, const float* bias,
                  const float* residual, float* y, int tokens, int rows, int cols) {
    static_assert(is_group_size<GROUP>, "scales of this group size are not what the packer writes");
    constexpr int STEP = GROUP < 64 ? 64 : GROUP;  // columns that a warp takes at a time
    constexpr int LOADS = STEP / 64;
    constexpr int AHEAD = 8 / (LOADS * TILES) > 0 ? 8 / (LOADS * TILES) : 1;  // steps in flight: eight loads or so
    constexpr int SCALES = STEP / GROUP;                                      // of a row in a step
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int row_tiles = (rows + 15) / 16, first_tile = blockIdx.x * TILES;
    const int steps = cols / STEP;
    const bool has_token = g < tokens;
    const __half* x_lane = x + static_cast<size_t>(has_token ? g : 0) * cols + 8 * t;

    float sum[TILES][4] = {};
    for (int s0 = warp; s0 < steps; s0 += WARPS * AHEAD) {
        uint4 w[AHEAD][TILES][LOADS];
        unsigned scale[AHEAD][TILES][SCALES], zero[AHEAD][TILES][SCALES];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int s = s0 + a * WARPS;
            if (s >= steps) break;
#pragma unroll
            for (int r = 0; r < TILES; ++r) {
                const size_t tile = min(first_tile + r, row_tiles - 1);
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    w[a][r][i] = stream_pack(words + tile * (cols * 2) + (s * LOADS + i) * 128 + lane * 4).bits;
                }
#pragma unroll
                for (int i = 0; i < SCALES; ++i) {
                    const size_t both = (tile * (cols / GROUP) + s * SCALES + i) * 16 + 2 * g;
                    scale[a][r][i] = *reinterpret_cast<const unsigned*>(scales + both);
                    if constexpr (ZEROS) zero[a][r][i] = *reinterpret_cast<const unsigned*>(zeros + both);
                }
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int s = s0 + a * WARPS;
            if (s >= steps) break;
            Pack<__half> xs[2 * LOADS];
#pragma unroll
            for (int block = 0; block < 2 * LOADS; ++block) {
                xs[block] = has_token ? load_pack(x_lane + s * STEP + block * 32) : zero_pack<__half>();
            }
            float c[4], d[TILES][4], total[4];
#pragma unroll
            for (int block = 0; block < 2 * LOADS; ++block) {  // of 32 columns
                if (block * 32 % GROUP == 0) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) c[i] = total[i] = 0.0f;
#pragma unroll
                    for (int i = 0; i < 4 * TILES; ++i) d[i / 4][i % 4] = 0.0f;
                }
                offsets_mma(c, xs[block].bits);
                if constexpr (ZEROS) total_mma(total, xs[block].bits);
#pragma unroll
                for (int r = 0; r < TILES; ++r) {
                    const uint4 four = w[a][r][block / 2];
                    fragment_mma(d[r], block % 2 ? four.z : four.x, block % 2 ? four.w : four.y, xs[block].bits);
                }
                if ((block + 1) * 32 % GROUP == 0) {
#pragma unroll
                    for (int r = 0; r < TILES; ++r) {
                        const float2 both = half2_to_float2(scale[a][r][block * 32 / GROUP]);
                        if constexpr (ZEROS) {
                            const float2 z = half2_to_float2(zero[a][r][block * 32 / GROUP]);
                            d[r][0] = fmaf(-z.x, total[0], d[r][0]);
                            d[r][1] = fmaf(-z.x, total[1], d[r][1]);
                            d[r][2] = fmaf(-z.y, total[2], d[r][2]);
                            d[r][3] = fmaf(-z.y, total[3], d[r][3]);
                        }
                        sum[r][0] = fmaf(both.x, c[0] + d[r][0], sum[r][0]);  // row g
                        sum[r][1] = fmaf(both.x, c[1] + d[r][1], sum[r][1]);
                        sum[r][2] = fmaf(both.y, c[2] + d[r][2], sum[r][2]);  // row g + 8
                        sum[r][3] = fmaf(both.y, c[3] + d[r][3], sum[r][3]);
                    }
                }
            }
        }
    }

    // The warps have shared the columns among them; now their sums meet.
    __shared__ float partial[WARPS][TILES][16][8];
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
        *reinterpret_cast<float2*>(&partial[warp][r][g][2 * t]) = make_float2(sum[r][0], sum[r][1]);
        *reinterpret_cast<float2*>(&partial[warp][r][g + 8][2 * t]) = make_float2(sum[r][2], sum[r][3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 16 * tokens; i += 32 * WARPS) {
        const int token = i / (TILES * 16), r = i / 16 % TILES, row = (first_tile + r) * 16 + i % 16;
        if (row >= rows) continue;
        float total = bias ? bias[row] : 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) total += partial[other][r][i % 16][token];
        const size_t place = static_cast<size_t>(token) * rows + row;
        y[place] = residual ? residual[place] + total : total;
    }
}
