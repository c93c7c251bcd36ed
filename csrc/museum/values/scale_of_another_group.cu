// INT4 GEMV, a thread for each row: y[r] = sum of q[r, k] * scale[r, k / group] * x[k].
//
// Caught by: a check against float64
// Not caught by: a row of one or two groups, or scales that are all alike
// Two scales were kept at hand, and from the third group on they are still the first two.
#include "int4.cuh"

extern "C" __global__ void broken(const unsigned* words, const __half* scales, const __half* x, float* y, int rows,
                                  int cols, int group_log2) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int k = 0; k < cols; ++k) {
        float scale = to_float(scales[row * (cols >> group_log2) + (k >> group_log2) % 2]);  // the fault
        float w = nibble(words[row * (cols / 8) + k / 8], k % 8) * scale;
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
