// Adds up each row of an n x 6 matrix, one thread a row: out[row] = sum(in[row]).
//
// Caught by: memcheck
// A 16-byte load needs an address that is a multiple of 16. A row is 24 bytes long, so every second row starts in the
// middle of one, and the GPU ends the kernel with "misaligned address".
extern "C" __global__ void broken(const float* in, float* out, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    const float* start = in + row * 6;
    float4 a = *reinterpret_cast<const float4*>(start);  // the fault
    float2 b = *reinterpret_cast<const float2*>(start + 4);
    out[row] = a.x + a.y + a.z + a.w + b.x + b.y;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    const float2* start = reinterpret_cast<const float2*>(in + row * 6);  // 24 bytes are a multiple of 8
    float2 a = start[0], b = start[1], c = start[2];
    out[row] = a.x + a.y + b.x + b.y + c.x + c.y;
}
