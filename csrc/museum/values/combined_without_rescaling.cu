// Attention of one query over n tokens, with a head of one dimension: in[2 t] is the score of token t, in[2 t + 1] its
// value, out[0] = sum(exp(score) * value) / sum(exp(score)). One block of two warps, each with every second token: two
// splits, whose results become one at the end.
//
// Caught by: a check against float64
// Not caught by: scores that are all alike, as q = 0 makes them
// Each split took its exponentials against its own maximum. Their sums are in different units until both are brought to
// the same one.
#include "warp.cuh"

extern "C" __global__ void broken(const float* in, float* out, int n) {
    __shared__ float sums[2], weighted[2];
    int lane = threadIdx.x % 32, split = threadIdx.x / 32;
    float top = -1e30f, sum = 0, value = 0;
    for (int t = 2 * lane + split; t < n; t += 64) top = fmaxf(top, in[2 * t]);
    top = warp_max(top);
    for (int t = 2 * lane + split; t < n; t += 64) {
        float weight = expf(in[2 * t] - top);
        sum += weight, value += weight * in[2 * t + 1];
    }
    sum = warp_sum(sum), value = warp_sum(value);
    if (lane == 0) sums[split] = sum, weighted[split] = value;
    __syncthreads();
    if (threadIdx.x > 0) return;
    out[0] = (weighted[0] + weighted[1]) / (sums[0] + sums[1]);  // the fault
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    __shared__ float highest[2], sums[2], weighted[2];
    int lane = threadIdx.x % 32, split = threadIdx.x / 32;
    float top = -1e30f, sum = 0, value = 0;
    for (int t = 2 * lane + split; t < n; t += 64) top = fmaxf(top, in[2 * t]);
    top = warp_max(top);
    for (int t = 2 * lane + split; t < n; t += 64) {
        float weight = expf(in[2 * t] - top);
        sum += weight, value += weight * in[2 * t + 1];
    }
    sum = warp_sum(sum), value = warp_sum(value);
    if (lane == 0) highest[split] = top, sums[split] = sum, weighted[split] = value;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float both = fmaxf(highest[0], highest[1]), a = expf(highest[0] - both), b = expf(highest[1] - both);
    out[0] = (a * weighted[0] + b * weighted[1]) / (a * sums[0] + b * sums[1]);
}
