// INT4 GEMV, a thread for each row: y[r] = sum of q[r, k] * scale[r, k / group] * x[k].
//
// Caught by: a check against float64
// Not caught by: an x whose values are all alike
// Every octet of weights meets the x of its neighbour. No address is wrong, so no observer has anything to say.
#include "int4.cuh"

extern "C" __global__ void broken(const unsigned* words, const __half* scales, const __half* x, float* y, int rows,
                                  int cols, int group_log2) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int k = 0; k < cols; ++k) {
        float w = nibble(words[row * (cols / 8) + k / 8], k % 8) * to_float(scales[(row * cols + k) >> group_log2]);
        sum = fmaf(w, to_float(x[k ^ 8]), sum);  // the fault
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
