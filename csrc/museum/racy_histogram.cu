// Counts how often each of the numbers 0 to 15 occurs: out[k] += how many in[i] == k. Any grid.
//
// Caught by: racecheck
// Adding one is three steps: read, add, write. Two threads that do them at once both read the old count, and one
// addition is lost.
extern "C" __global__ void broken(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[int(in[i])] += 1.0f;  // the fault
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&out[int(in[i])], 1.0f);
}
