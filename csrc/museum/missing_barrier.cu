// Reverses n numbers through shared memory: out[i] = in[n - 1 - i]. One block of n threads, n at most 256.
//
// Caught by: racecheck
// Each thread reads what another one wrote, and nothing makes it wait for that. Within one warp it often works by
// luck; across warps it does not.
extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ float tile[256];
    tile[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = tile[n - 1 - threadIdx.x];  // the fault
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ float tile[256];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[n - 1 - threadIdx.x];
}
