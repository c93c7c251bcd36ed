// Attention of one query over n tokens in pages of 16, with a head of one dimension: in[2 t] is the score of token t,
// in[2 t + 1] its value, out[0] = sum(exp(score) * value) / sum(exp(score)). One block of two warps: warp 0 copies a
// page to shared memory, warp 1 consumes it.
//
// Caught by: synccheck
// Only a partial page takes the branch, and in it only warp 0 stands at a barrier meant for the block. Warp 1 stands at
// the next one; a GPU may count both as one meeting, and lets warp 1 read a page whose tail is still to be filled. With
// 48 tokens all is well, with 49 it is not. What the author wanted to wait for is the warp.
#include "warp.cuh"

extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ float2 page[16];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0, weighted = 0;
    for (int first = 0; first < n; first += 16) {
        int tokens = min(16, n - first);
        if (warp == 0 && lane < tokens) page[lane] = reinterpret_cast<const float2*>(in)[first + lane];
        if (warp == 0 && tokens < 16) {  // what the page before left in the other slots must weigh nothing
            __syncthreads();  // the fault
            if (lane >= tokens && lane < 16) page[lane] = make_float2(-1e30f, 0.0f);
        }
        __syncthreads();
        if (warp == 1 && lane < 16) {
            float weight = expf(page[lane].x);
            sum += weight, weighted += weight * page[lane].y;
        }
        __syncthreads();
    }
    sum = warp_sum(sum), weighted = warp_sum(weighted);
    if (threadIdx.x == 32) out[0] = weighted / sum;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ float2 page[16];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0, weighted = 0;
    for (int first = 0; first < n; first += 16) {
        int tokens = min(16, n - first);
        if (warp == 0 && lane < tokens) page[lane] = reinterpret_cast<const float2*>(in)[first + lane];
        if (warp == 0 && tokens < 16) {  // what the page before left in the other slots must weigh nothing
            __syncwarp();
            if (lane >= tokens && lane < 16) page[lane] = make_float2(-1e30f, 0.0f);
        }
        __syncthreads();
        if (warp == 1 && lane < 16) {
            float weight = expf(page[lane].x);
            sum += weight, weighted += weight * page[lane].y;
        }
        __syncthreads();
    }
    sum = warp_sum(sum), weighted = warp_sum(weighted);
    if (threadIdx.x == 32) out[0] = weighted / sum;
}
