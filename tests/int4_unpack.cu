// Each unpack of csrc/include/int4.cuh on its own, for tests/test_int4_kernels.py: word i to the eight values 8i ... 8i+7
// of `out`, in the order of the columns, with divisors and offsets taken off. Valid CUDA too.
#include "int4.cuh"

extern "C" __global__ void by_shift(const unsigned* words, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v[8];
    if (i < n) unpack_shift(words[i], v);
    for (int k = 0; k < 8 && i < n; ++k) out[8 * i + k] = v[k];
}
extern "C" __global__ void by_prmt(const unsigned* words, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v[8];
    if (i < n) unpack_prmt(words[i], v);
    for (int k = 0; k < 8 && i < n; ++k) out[8 * i + k] = v[k];
}
extern "C" __global__ void by_bytes(const unsigned* words, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int from[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
    int both[2];
    if (i < n) unpack_bytes(words[i], both[0], both[1]);
    for (int k = 0; k < 8 && i < n; ++k) {
        out[8 * i + from[k / 4][k % 4]] = static_cast<float>(both[k / 4] << (24 - k % 4 * 8) >> 24) / 16;
    }
}
extern "C" __global__ void by_magic(const unsigned* words, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    __half2 pairs[4];
    if (i < n) unpack_magic(words[i], pairs);
    for (int k = 0; k < 8 && i < n; ++k) {
        out[8 * i + k] = 64 * (k % 2 ? __high2float(pairs[k / 2]) : __low2float(pairs[k / 2]));
    }
}
extern "C" __global__ void by_offset(const unsigned* words, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned pairs[4];
    if (i < n) unpack_offset(words[i], pairs);
    for (int k = 0; k < 8 && i < n; ++k) {
        const __half2 pair = as_half2(pairs[k / 2]);
        out[8 * i + k] = (k % 2 ? __high2float(pair) : __low2float(pair)) - (k / 2 % 2 ? 72.0f : 1032.0f);
    }
}
