// A word is shifted up until the sign of value k is the highest bit, and down as a signed number. Its eight columns are
// of one group, so the scale comes in once, and it is looked up for each word.
__global__ void my_int4(const unsigned* words, const float* scales, const float* x, float* y, int rows, int cols,
                        int group) {
    int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    float sum = 0;
    for (int i = lane; i < cols / 8; i += 32) {
        unsigned word = words[(long long)row * (cols / 8) + i];
        float part = 0;
        for (int k = 0; k < 8; ++k) part += (static_cast<int>(word << (28 - 4 * k)) >> 28) * x[8 * i + k];
        sum += scales[row * (cols / group) + 8 * i / group] * part;
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}
