// Adds up n numbers with one block: out[0] = sum(in).
//
// Caught by: initcheck
// Shared memory is not zero at the start: it holds what the block before left there. The first run after a reset is
// often right, which makes this one hard to find.
extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ float total;
    for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&total, in[i]);  // the fault
    __syncthreads();
    if (threadIdx.x == 0) out[0] = total;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ float total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&total, in[i]);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = total;
}
