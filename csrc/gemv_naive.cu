// Naive GEMV: one thread for each row.                                              lesson 02
//
//   y[r] = sum over k of w[r, k] * x[k]        w (rows, cols) row-major, x (cols), y (rows)
//
// Must move:  rows * cols + cols + rows elements, each once.
// Does move:  a warp's 32 threads read 32 rows, `cols` elements apart, at every step: 32 sectors
//             of 32 bytes for 32 elements. Whatever of a sector the L1 cannot keep until the
//             thread's next elements are due is fetched again.
// Launch:     ceil(rows / blockDim.x) blocks of blockDim.x threads.
// Teaches:    right is not enough; count sectors per request before you time anything.

#include "types.cuh"

template <typename T>
__global__ void gemv_naive(const T* w, const T* x, T* y, int rows, int cols) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const T* w_row = w + static_cast<size_t>(row) * cols;
    float sum = 0.0f;
    for (int k = 0; k < cols; ++k) {
        sum = fmaf(to_float(w_row[k]), to_float(x[k]), sum);
    }
    y[row] = from_float<T>(sum);
}
