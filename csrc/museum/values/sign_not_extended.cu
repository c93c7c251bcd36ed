// INT4 GEMV, a thread for each row: y[r] = sum of q[r, k] * scale[r, k / group] * x[k].
//
// Caught by: a check against float64
// Not caught by: weights that are never negative
// A nibble is cut out and taken for a number from 0 to 15: -1 becomes 15.
#include "int4.cuh"

extern "C" __global__ void broken(const unsigned* words, const __half* scales, const __half* x, float* y, int rows,
                                  int cols, int group_log2) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int k = 0; k < cols; ++k) {
        unsigned word = words[row * (cols / 8) + k / 8], q = (word >> (k % 2 * 16 + k % 8 / 2 * 4)) & 15;  // the fault
        float w = static_cast<float>(q) * to_float(scales[(row * cols + k) >> group_log2]);
        sum = fmaf(w, to_float(x[k]), sum);
    }
    y[row] = sum;
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
