// Copies n numbers through shared memory: out[i] = in[i]. Blocks of 64 threads, four numbers each; n a multiple of 256.
//
// Caught by: racecheck
// cp.async returns at once; the data comes later. A barrier does not wait for it: only cp_async_wait does. On a GPU
// this kernel is right whenever memory is quick enough.
#include "async_copy.cuh"

extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ float4 tile[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    cp_async_16(&tile[threadIdx.x], in + 4 * i);
    cp_async_commit();
    __syncthreads();
    reinterpret_cast<float4*>(out)[i] = tile[threadIdx.x];  // the fault
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ float4 tile[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    cp_async_16(&tile[threadIdx.x], in + 4 * i);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    reinterpret_cast<float4*>(out)[i] = tile[threadIdx.x];
}
