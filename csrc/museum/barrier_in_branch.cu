// Divides each of n numbers by their sum: out[i] = in[i] / sum(in). One block.
//
// Caught by: synccheck
// A block barrier is a meeting of all threads of the block. Here it stands inside the branch of warp 0, so the other
// warps never come to it: they run on and read `total` before it is there. On a GPU the barrier lets warp 0 through
// once the others have returned, so nothing hangs; the quotients are wrong, and not on every run.
#include "warp.cuh"

extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ float partial[32];
    __shared__ float total;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += in[i];
    sum = warp_sum(sum);
    if (lane == 0) partial[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        float all = warp_sum(lane < warps ? partial[lane] : 0.0f);
        if (lane == 0) total = all;
        __syncthreads();  // the fault
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i] / total;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ float partial[32];
    __shared__ float total;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += in[i];
    sum = warp_sum(sum);
    if (lane == 0) partial[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        float all = warp_sum(lane < warps ? partial[lane] : 0.0f);
        if (lane == 0) total = all;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i] / total;
}
