// INT4 GEMV, one step at a time: which instructions turn a nibble into a product.   lesson 04
//
//   y[r] = sum over k of q[r, k] * scale[r, k / group] * x[k]
//
//   words (rows, cols / 8), layout 1; scales (rows, cols / group) half; x (cols) half; y (rows) float
//
// Must move:  rows * cols / 2 + rows * cols / group * 2 + cols * 2 + rows * 4 bytes, each once: at group 128 a quarter
//             and a bit of what 16-bit weights need.
// Launch:     blocks of 128 threads; each kernel says how many rows a block takes. cols and group are multiples of 32,
//             so that the 32 weights that a lane loads at once share a scale. group = 1 << group_log2.
// Sums:       fp32. y is fp32 too: a large activation may take a row past 65504, the last finite half.
// Teaches:    with four times fewer bytes the instructions per weight decide, not the memory.
//
//   int4_gemv_naive    a thread for each row
//   int4_gemv_warp     a warp for each row, 16 bytes a lane, unpacked by shifts
//   int4_gemv_prmt     the same, unpacked by byte permutes instead of conversions
//   int4_gemv_dp4a     the same, x in INT8 (csrc/quantize_x.cu), four products an instruction
//   int4_gemv_magic    two rows a warp, unpacked into half2, two products an instruction
//
// The last step, on tensor cores, has its own layout and file: csrc/int4_gemm.cu.

#include "int4.cuh"
#include "pack.cuh"
#include "warp.cuh"

// Step 0. One thread for each row: 32 lanes read 32 rows, cols / 2 bytes apart.
extern "C" __global__ void int4_gemv_naive(const unsigned* words, const __half* scales, const __half* x, float* y,
                                           int rows, int cols, int group_log2) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const unsigned* w_row = words + static_cast<size_t>(row) * (cols / 8);
    const __half* s_row = scales + static_cast<size_t>(row) * (cols >> group_log2);
    float sum = 0.0f;
    for (int k = 0; k < cols; k += 8) {
        const unsigned word = w_row[k / 8];
        const float scale = to_float(s_row[k >> group_log2]);
        for (int i = 0; i < 8; ++i) {
            sum = fmaf(scale * static_cast<float>(nibble(word, i)), to_float(x[k + i]), sum);
        }
    }
    y[row] = sum;
}

// sum + v · x over an octet.
__device__ __forceinline__ float dot_octet(const float (&v)[8], Pack<__half> x, float sum) {
    const float2 a = half2_to_float2(x.bits.x), b = half2_to_float2(x.bits.y);
    const float2 c = half2_to_float2(x.bits.z), d = half2_to_float2(x.bits.w);
    sum = fmaf(v[1], a.y, fmaf(v[0], a.x, sum));
    sum = fmaf(v[3], b.y, fmaf(v[2], b.x, sum));
    sum = fmaf(v[5], c.y, fmaf(v[4], c.x, sum));
    return fmaf(v[7], d.y, fmaf(v[6], d.x, sum));
}

// Step 1. A warp for each row; a lane loads 16 bytes, 32 weights of one group, so the scale is applied once to their
// sum. blockDim.x / 32 rows a block.
extern "C" __global__ void __launch_bounds__(128)
    int4_gemv_warp(const unsigned* words, const __half* scales, const __half* x, float* y, int rows, int cols,
                   int group_log2) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;  // the whole warp leaves
    const unsigned* w_row = words + static_cast<size_t>(row) * (cols / 8);
    const __half* s_row = scales + static_cast<size_t>(row) * (cols >> group_log2);
    float sum = 0.0f;
    for (int k = lane * 32; k < cols; k += 32 * 32) {
        const uint4 w = stream_pack(w_row + k / 8).bits;
        const unsigned octets[4] = {w.x, w.y, w.z, w.w};
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[8];
            unpack_shift(octets[i], v);
            part = dot_octet(v, load_pack(x + k + 8 * i), part);
        }
        sum = fmaf(to_float(s_row[k >> group_log2]), part, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

// Step 2. Changed: unpacked by byte permutes, so no conversion from int is needed.
extern "C" __global__ void __launch_bounds__(128)
    int4_gemv_prmt(const unsigned* words, const __half* scales, const __half* x, float* y, int rows, int cols,
                   int group_log2) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const unsigned* w_row = words + static_cast<size_t>(row) * (cols / 8);
    const __half* s_row = scales + static_cast<size_t>(row) * (cols >> group_log2);
    float sum = 0.0f;
    for (int k = lane * 32; k < cols; k += 32 * 32) {
        const uint4 w = stream_pack(w_row + k / 8).bits;
        const unsigned octets[4] = {w.x, w.y, w.z, w.w};
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[8];
            unpack_prmt(octets[i], v);
            part = dot_octet(v, load_pack(x + k + 8 * i), part);
        }
        sum = fmaf(to_float(s_row[k >> group_log2]), part, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

// Step 3. Changed: x comes as INT8 with a scale for each 128 columns, in the order in which unpack_bytes gives the
// weights. An octet is two dp4a, exact in integers: 32 * 128 * 127 is far below 2^31. But x was rounded to 8 bits, by a
// kernel of its own.
extern "C" __global__ void __launch_bounds__(128)
    int4_gemv_dp4a(const unsigned* words, const __half* scales, const int* x, const float* x_scales, float* y, int rows,
                   int cols, int group_log2) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const unsigned* w_row = words + static_cast<size_t>(row) * (cols / 8);
    const __half* s_row = scales + static_cast<size_t>(row) * (cols >> group_log2);
    float sum = 0.0f;
    for (int k = lane * 32; k < cols; k += 32 * 32) {
        const uint4 w = stream_pack(w_row + k / 8).bits;
        const uint4 a = load_pack(x + k / 4).bits, b = load_pack(x + k / 4 + 4).bits;
        const unsigned octets[4] = {w.x, w.y, w.z, w.w};
        const unsigned xs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        int part = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int first, second;
            unpack_bytes(octets[i], first, second);
            part = __dp4a(first, static_cast<int>(xs[2 * i]), part);
            part = __dp4a(second, static_cast<int>(xs[2 * i + 1]), part);
        }
        const float scale = to_float(s_row[k >> group_log2]) * x_scales[k / 128] * (1.0f / 16);
        sum = fmaf(scale, static_cast<float>(part), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

// sum + v · x over an octet, the products in half2: four weights meet in each half before they join the fp32 sum.
__device__ __forceinline__ float dot_magic(unsigned word, Pack<__half> x, float sum) {
    __half2 pairs[4];
    unpack_magic(word, pairs);
    __half2 part = __hmul2(pairs[0], as_half2(x.bits.x));
    part = __hfma2(pairs[1], as_half2(x.bits.y), part);
    part = __hfma2(pairs[2], as_half2(x.bits.z), part);
    part = __hfma2(pairs[3], as_half2(x.bits.w), part);
    return sum + (__low2float(part) + __high2float(part));
}

// Step 4. Changed: x stays in half and so do the products; two rows a warp share each load of x; two loads of each row
// are in flight. The weights come divided by 64 (see unpack_magic), so the scale is taken 64-fold.
extern "C" __global__ void __launch_bounds__(128)
    int4_gemv_magic(const unsigned* __restrict__ words, const __half* __restrict__ scales, const __half* __restrict__ x,
                    float* y, int rows, int cols, int group_log2) {
    constexpr int ROWS = 2;
    constexpr int LOADS = 2;
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * ROWS;
    if (row >= rows) return;
    float sum[ROWS] = {};
    for (int k0 = lane * 32; k0 < cols; k0 += LOADS * 32 * 32) {
        uint4 w[ROWS][LOADS];
        float scale[ROWS][LOADS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const size_t from = min(row + r, rows - 1);  // the last row of an odd matrix: read twice, stored once
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int k = k0 + i * 32 * 32;
                const bool here = k < cols;
                w[r][i] = here ? stream_pack(words + from * (cols / 8) + k / 8).bits : make_uint4(0u, 0u, 0u, 0u);
                scale[r][i] = here ? 64.0f * to_float(scales[from * (cols >> group_log2) + (k >> group_log2)]) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int k = k0 + i * 32 * 32;
            if (k >= cols) break;
            Pack<__half> xs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) xs[j] = load_pack(x + k + 8 * j);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float part = dot_magic(w[r][i].x, xs[0], 0.0f);
                part = dot_magic(w[r][i].y, xs[1], part);
                part = dot_magic(w[r][i].z, xs[2], part);
                part = dot_magic(w[r][i].w, xs[3], part);
                sum[r] = fmaf(scale[r][i], part, sum[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0 && row + r < rows) y[row + r] = sum[r];
    }
}
