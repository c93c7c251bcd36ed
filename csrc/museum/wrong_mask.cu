// Adds up n numbers with one warp, n at most 32: out[0] = sum(in).
//
// Caught by: synccheck
// The mask of a shuffle says who takes part, and each lane that it names must come. Here all 32 are named, but only
// the lanes that have a number enter the branch. What happens then is undefined: the sum may be right, or wrong, or
// the warp may hang.
extern "C" __global__ void broken(const float* in, float* out, int n) {
    int lane = threadIdx.x;
    float sum = 0;
    if (lane < n) {
        sum = in[lane];
        for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);  // the fault
    }
    __syncwarp();
    if (lane == 0) out[0] = sum;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    int lane = threadIdx.x;
    float sum = lane < n ? in[lane] : 0.0f;
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
    __syncwarp();
    if (lane == 0) out[0] = sum;
}
