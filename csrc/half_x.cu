// Activations of any range to half and back, around a product that takes half.                     lesson 04
//
//   half_x:    out[n, k] = x[n, k] * 2^p[n],  back[n] = 2^-p[n]     p: the largest |x| of a token lands in 2^14 ... 2^15
//   widen_y:   out[n, r] = y[n, r] * back[n] (+ bias[r])
//
//   x (tokens, cols) and the second out (tokens, rows) are half, bfloat16 or float; y, back and bias float
//
// Must move:  tokens * cols * (2 + bytes of x), tokens * rows * (4 + bytes of out): little beside the weights.
// Launch:     half_x: a block of 1024 threads for each token. widen_y: a thread for each y, the tokens in blockIdx.y.
// Teaches:    half reaches to 65504, a bfloat16 to 3e38. A power of two moves no bit of what is large enough to count: a
//             half has eleven bits for what is up to 2^28 times smaller than the largest, and steps of 2^-24 below. And
//             the power is found where the data is: to ask for it would make the host wait.

#include "types.cuh"
#include "warp.cuh"

template <typename T>
__global__ void __launch_bounds__(1024) half_x(const T* x, __half* out, float* back, int cols) {
    __shared__ float largest_of[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const size_t row = static_cast<size_t>(blockIdx.x) * cols;
    float largest = 0.0f;
    for (int k = threadIdx.x; k < cols; k += 1024) largest = fmaxf(largest, fabsf(to_float(x[row + k])));
    largest = warp_max(largest);
    if (lane == 0) largest_of[warp] = largest;
    __syncthreads();
    largest = warp_max(largest_of[lane]);
    // A float's exponent, bits 23 to 30, counts from 127; 254 is the last of a finite one, here and in `back`. That of an
    // infinity is 255: it stays one, whatever the factor.
    const unsigned exponent = __float_as_uint(largest) >> 23;
    const unsigned up = min(2 * 127 + 14 - exponent, 253u);
    const float factor = __uint_as_float(up << 23);
    for (int k = threadIdx.x; k < cols; k += 1024) out[row + k] = __float2half_rn(to_float(x[row + k]) * factor);
    if (threadIdx.x == 0) back[blockIdx.x] = __uint_as_float((254 - up) << 23);
}

template <typename T>
__global__ void widen_y(const float* y, const float* back, const float* bias, T* out, int rows) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    const size_t at = static_cast<size_t>(blockIdx.y) * rows + r;
    out[at] = from_float<T>(fmaf(y[at], back[blockIdx.y], bias ? bias[r] : 0.0f));
}
