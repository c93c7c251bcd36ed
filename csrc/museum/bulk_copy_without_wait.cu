// Adds up each of n pages of 16 numbers: out[p] = sum(in[16 p] ... in[16 p + 15]). n blocks of two warps: warp 0 has
// the page copied, warp 1 consumes it.
//
// Caught by: racecheck
// A bulk copy is done by another unit of the GPU, and a barrier of threads says nothing of it: both warps have come and
// the bytes have not. Only the mbarrier that counts them knows.
#include "mbarrier.cuh"
#include "warp.cuh"

extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ __align__(16) float page[16];
    __shared__ mbarrier_t full;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect_bytes(&full, sizeof page);
        bulk_copy(page, in + 16 * blockIdx.x, sizeof page, &full);
    }
    __syncthreads();
    float sum = warp_sum(warp == 1 && lane < 16 ? page[lane] : 0.0f);  // the fault
    if (threadIdx.x == 32) out[blockIdx.x] = sum;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ __align__(16) float page[16];
    __shared__ mbarrier_t full;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect_bytes(&full, sizeof page);
        bulk_copy(page, in + 16 * blockIdx.x, sizeof page, &full);
    }
    __syncthreads();
    if (warp == 1) mbarrier_wait(&full, 0);
    float sum = warp_sum(warp == 1 && lane < 16 ? page[lane] : 0.0f);
    if (threadIdx.x == 32) out[blockIdx.x] = sum;
}
