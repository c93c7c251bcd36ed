// GEMV, one step at a time, from coalesced to the bandwidth limit.                  lesson 03
//
//   y[r] = sum over k of w[r, k] * x[k]        w (rows, cols) row-major, x (cols), y (rows)
//
// Must move:  rows * cols + cols + rows elements, each once.
// Launch:     blocks of 128 threads; each kernel says how many rows a block takes.
// Sums:       fp32, whatever the type of w, x and y.
//
//   gemv_coalesced    a warp for each row: 32 lanes read 32 neighbours
//   gemv_vectorized   the same, 16 bytes a lane: fewer, wider requests
//   gemv_unrolled     the same, four loads in flight before the first is used
//   gemv_rows         the same, two rows a warp: x is read once for both
//   gemv              lanes per row and loads in flight chosen for the shape

#include "pack.cuh"
#include "types.cuh"
#include "warp.cuh"

// Step 1. Neighbouring lanes read neighbouring elements, so a warp's request is one run of memory.
// The 32 partial sums meet in five shuffles. blockDim.x / 32 rows a block.
template <typename T>
__global__ void gemv_coalesced(const T* w, const T* x, T* y, int rows, int cols) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;  // the whole warp leaves: the shuffles below still have all their lanes
    const T* w_row = w + static_cast<size_t>(row) * cols;
    float sum = 0.0f;
    for (int k = lane; k < cols; k += 32) {
        sum = fmaf(to_float(w_row[k]), to_float(x[k]), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = from_float<T>(sum);
}

// Step 2. Changed: a lane loads 16 bytes at once, so a warp's request is 512 bytes instead of 64 (bf16)
// and there are an eighth as many of them. cols must be a multiple of 16 bytes.
template <typename T>
__global__ void gemv_vectorized(const T* w, const T* x, T* y, int rows, int cols) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const T* w_row = w + static_cast<size_t>(row) * cols;
    constexpr int N = Pack<T>::size;
    float sum = 0.0f;
    for (int k = lane * N; k < cols; k += 32 * N) {
        sum = dot(stream_pack(w_row + k), load_pack(x + k), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = from_float<T>(sum);
}

// Step 3. Changed: four loads of w leave before the first of them is needed. Bandwidth is bytes in
// flight over latency; a warp that waits for each load has 512 bytes in flight, this one 2,048.
template <typename T>
__global__ void gemv_unrolled(const T* w, const T* x, T* y, int rows, int cols) {
    constexpr int LOADS = 4;
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const T* w_row = w + static_cast<size_t>(row) * cols;
    constexpr int N = Pack<T>::size;
    float sum = 0.0f;
    for (int k0 = lane * N; k0 < cols; k0 += LOADS * 32 * N) {
        Pack<T> packs[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int k = k0 + i * 32 * N;
            packs[i] = k < cols ? stream_pack(w_row + k) : zero_pack<T>();
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int k = k0 + i * 32 * N;
            const Pack<T> xs = k < cols ? load_pack(x + k) : zero_pack<T>();
            sum = dot(packs[i], xs, sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = from_float<T>(sum);
}

// Step 4. Changed: a warp takes two rows at once, so that each pack of x serves two packs of w. The last
// row of an odd matrix is read twice and stored once, which keeps the loop free of a branch.
template <typename T>
__global__ void gemv_rows(const T* w, const T* x, T* y, int rows, int cols) {
    constexpr int ROWS = 2;
    constexpr int LOADS = 4;
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * ROWS;
    if (row >= rows) return;
    constexpr int N = Pack<T>::size;
    float sum[ROWS] = {};
    for (int k0 = lane * N; k0 < cols; k0 += LOADS * 32 * N) {
        Pack<T> packs[ROWS][LOADS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const T* w_row = w + static_cast<size_t>(min(row + r, rows - 1)) * cols;
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int k = k0 + i * 32 * N;
                packs[r][i] = k < cols ? stream_pack(w_row + k) : zero_pack<T>();
            }
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int k = k0 + i * 32 * N;
            const Pack<T> xs = k < cols ? load_pack(x + k) : zero_pack<T>();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = dot(packs[r][i], xs, sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0 && row + r < rows) y[row + r] = from_float<T>(sum[r]);
    }
}

// Step 5. Changed: how many lanes share a row and how many loads each has in flight are chosen for the
// shape (nanoqwen/kernels/gemv.py says how). A matrix of few rows gives a warp each too little to fill
// the GPU, so up to four warps share one; then the loads are as many as a row has for each
// lane, seven at most. Blocks of 128 threads, 128 / LANES rows each.
template <typename T, int LANES, int LOADS>
__global__ void __launch_bounds__(128) gemv(const T* __restrict__ w, const T* __restrict__ x, T* y, int rows, int cols) {
    constexpr int N = Pack<T>::size;
    constexpr int WARPS = LANES / 32;  // of one row
    const int lane = threadIdx.x % LANES;
    const int row = blockIdx.x * (128 / LANES) + threadIdx.x / LANES;
    float sum = 0.0f;
    if (row < rows) {  // no early return: where WARPS > 1, all threads must reach the barrier
        const T* w_row = w + static_cast<size_t>(row) * cols;
        for (int k0 = lane * N; k0 < cols; k0 += LOADS * LANES * N) {
            Pack<T> packs[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int k = k0 + i * LANES * N;
                packs[i] = k < cols ? stream_pack(w_row + k) : zero_pack<T>();
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int k = k0 + i * LANES * N;
                const Pack<T> xs = k < cols ? load_pack(x + k) : zero_pack<T>();
                sum = dot(packs[i], xs, sum);
            }
        }
    }
    sum = warp_sum(sum);
    if constexpr (WARPS > 1) {
        __shared__ float partial[128 / 32];
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += partial[threadIdx.x / LANES * WARPS + i];
    }
    if (lane == 0 && row < rows) y[row] = from_float<T>(sum);
}
