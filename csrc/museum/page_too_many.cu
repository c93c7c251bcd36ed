// Adds up n numbers that lie in whole pages of 16: out[0] = sum(in[0] ... in[n - 1]). One warp.
//
// Caught by: memcheck
// n / 16 + 1 pages hold n numbers, but when n is a multiple of 16 they are one too many: one behind the last. What is
// read there is not used, so a GPU gives the right sum, until the page after the last is nobody's.
#include "warp.cuh"

extern "C" __global__ void broken(const float* in, float* out, int n) {
    int lane = threadIdx.x, pages = n / 16 + 1;
    float sum = 0;
    for (int p = 0; p < pages; ++p) {
        float x = lane < 16 ? in[16 * p + lane] : 0.0f;  // the fault
        if (16 * p + lane < n) sum += x;
    }
    sum = warp_sum(sum);
    if (lane == 0) out[0] = sum;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    int lane = threadIdx.x, pages = (n + 15) / 16;
    float sum = 0;
    for (int p = 0; p < pages; ++p) {
        float x = lane < 16 ? in[16 * p + lane] : 0.0f;
        if (16 * p + lane < n) sum += x;
    }
    sum = warp_sum(sum);
    if (lane == 0) out[0] = sum;
}
