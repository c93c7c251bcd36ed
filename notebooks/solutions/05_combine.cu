// Each split's weight is its log-sum-exp against the largest; the weights' sum puts all splits into the same unit.
__global__ void my_combine(const float* partial, const float* lse, float* out, int splits, int dims) {
    float top = lse[0], total = 0, sum = 0;
    for (int s = 1; s < splits; ++s) top = fmaxf(top, lse[s]);
    for (int s = 0; s < splits; ++s) {
        float weight = expf(lse[s] - top);
        total += weight;
        sum += weight * partial[s * dims + threadIdx.x];
    }
    out[threadIdx.x] = sum / total;
}
