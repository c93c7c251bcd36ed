// Adds up each row of an n x 32 matrix, one thread a row: out[row] = sum(in[row]).
//
// Caught by: memcheck
// The grid is rounded up to whole blocks, so the last block has threads without a row. They read behind the matrix.
// On a GPU that is often somebody else's memory, and nothing seems wrong.
extern "C" __global__ void broken(const float* in, float* out, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += in[row * 32 + i];  // the fault
    if (row < n) out[row] = sum;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += in[row * 32 + i];
    out[row] = sum;
}
