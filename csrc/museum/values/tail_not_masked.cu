// Attention of one query over n tokens in pages of 16, with a head of one dimension: in[2 t] is the score of token t,
// in[2 t + 1] its value, out[0] = sum(exp(score) * value) / sum(exp(score)). One warp.
//
// Caught by: a check against float64
// Not caught by: a length that is a multiple of 16
// The last page is taken whole: what its free slots hold counts like tokens, and even a slot of zeros has a weight.
#include "warp.cuh"

extern "C" __global__ void broken(const float* in, float* out, int n) {
    int lane = threadIdx.x;
    float sum = 0, weighted = 0;
    for (int page = 0; 16 * page < n; ++page) {
        int token = 16 * page + lane;
        if (lane >= 16) continue;  // the fault
        float weight = expf(in[2 * token]);
        sum += weight;
        weighted += weight * in[2 * token + 1];
    }
    sum = warp_sum(sum), weighted = warp_sum(weighted);
    if (lane == 0) out[0] = weighted / sum;
}

extern "C" __global__ void mended(const float* in, float* out, int n) {
    int lane = threadIdx.x;
    float sum = 0, weighted = 0;
    for (int page = 0; 16 * page < n; ++page) {
        int token = 16 * page + lane;
        if (lane >= 16 || token >= n) continue;
        float weight = expf(in[2 * token]);
        sum += weight;
        weighted += weight * in[2 * token + 1];
    }
    sum = warp_sum(sum), weighted = warp_sum(weighted);
    if (lane == 0) out[0] = weighted / sum;
}
