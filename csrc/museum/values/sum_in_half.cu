// INT4 GEMV, a thread for each row: y[r] = sum of q[r, k] * scale[r, k / group] * x[k].
//
// Caught by: a check against float64
// Not caught by: a short row of small activations
// The sum is kept in fp16. It is infinite once it passes 65,504, and long before that it no longer takes in what is small
// beside it.
#include "int4.cuh"

extern "C" __global__ void broken(const unsigned* words, const __half* scales, const __half* x, float* y, int rows,
                                  int cols, int group_log2) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    __half sum = __float2half_rn(0.0f);
    for (int k = 0; k < cols; ++k) {
        float w = nibble(words[row * (cols / 8) + k / 8], k % 8) * to_float(scales[(row * cols + k) >> group_log2]);
        sum = __hfma(__float2half_rn(w), x[k], sum);  // the fault
    }
    y[row] = to_float(sum);
}

extern "C" __global__ void mended(const unsigned* words, const __half* scales, const __half* x, float* y, int rows,
                                  int cols, int group_log2) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int k = 0; k < cols; ++k) {
        float w = nibble(words[row * (cols / 8) + k / 8], k % 8) * to_float(scales[(row * cols + k) >> group_log2]);
        sum = fmaf(w, to_float(x[k]), sum);
    }
    y[row] = sum;
}
