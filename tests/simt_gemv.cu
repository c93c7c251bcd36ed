#include "types.cuh"
#include "warp.cuh"

// One thread a row.
template <typename T>
__global__ void gemv_naive(const T* __restrict__ w, const T* __restrict__ x, float* y, int rows, int cols) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int i = 0; i < cols; ++i) sum = fmaf(to_float(w[row * cols + i]), to_float(x[i]), sum);
    y[row] = sum;
}

// One warp a row, 16 bytes a load.
extern "C" __global__ void gemv_warp(const float* w, const float* x, float* y, int rows, int cols) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float4* w4 = reinterpret_cast<const float4*>(w + row * cols);
    const float4* x4 = reinterpret_cast<const float4*>(x);
    float sum = 0;
    for (int i = lane; i < cols / 4; i += 32) {
        float4 a = w4[i], b = x4[i];
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
        sum = fmaf(a.z, b.z, sum);
        sum = fmaf(a.w, b.w, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}
