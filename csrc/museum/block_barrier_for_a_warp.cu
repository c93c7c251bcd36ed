// Adds up each of n pages of 16 numbers: out[p] = sum(in[16 p] ... in[16 p + 15]). One block; its warps take pages in
// turn, and each has a place of its own in shared memory.
//
// Caught by: synccheck
// The lanes of a warp wait for each other and for nobody else: that is __syncwarp. A block barrier wants all warps each
// time, and those that have no page in the last round have left. A GPU may go on without them, as if all were well.
extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ float page[4][16];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int p = warp; p < n; p += warps) {
        if (lane < 16) page[warp][lane] = in[16 * p + lane];
        __syncthreads();  // the fault
        if (lane == 0) {
            float sum = 0;
            for (int i = 0; i < 16; ++i) sum += page[warp][i];
            out[p] = sum;
        }
        __syncwarp();
    }
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ float page[4][16];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int p = warp; p < n; p += warps) {
        if (lane < 16) page[warp][lane] = in[16 * p + lane];
        __syncwarp();
        if (lane == 0) {
            float sum = 0;
            for (int i = 0; i < 16; ++i) sum += page[warp][i];
            out[p] = sum;
        }
        __syncwarp();
    }
}
