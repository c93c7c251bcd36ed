// Neighbouring lanes read neighbouring elements, so that each request is one run of 128 bytes: 4 sectors.
__global__ void my_gemv(const float* w, const float* x, float* y, int rows, int cols) {
    int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    float sum = 0;
    for (int k = lane; k < cols; k += 32) sum += w[(long long)row * cols + k] * x[k];
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}
