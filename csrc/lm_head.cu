// The last norm and the product with the vocabulary's matrix: a decode step's largest read.
//
//   logits[r] = sum over k of w[r, k] * norm[k] * h[k] / sqrt(mean of h^2 + eps)
//
//   w (rows, cols) row-major, half or bfloat16; h (cols) float; norm (cols) half or bfloat16; logits (rows) float
//
// Must move:  rows * cols elements of w, once; h and norm come from the L2 cache, once a block.
// Launch:     any number of blocks of 256 threads; four fit a multiprocessor. Dynamic shared memory: h * norm, as
//             floats, filled up with zeros to whole rounds of LANES * LOADS octets.
// Sums:       fp32; h may be as large as fp32 goes.
//
// LANES lanes share a row and take it in rounds, LOADS octets a lane. An octet that has been used makes room for the
// one that its lane needs a round later, of this row or of the next: loads stay in flight while a sum is finished and
// a row begun. The first ones leave before the kernel's turn comes, since weights depend on nobody.

#include "pack.cuh"
#include "sync.cuh"
#include "types.cuh"
#include "warp.cuh"

constexpr int THREADS = 256, LOADS = 7;
extern __shared__ __align__(16) unsigned char normed[];

template <typename T>
__device__ __forceinline__ float2 two_floats(unsigned word);
template <>
__device__ __forceinline__ float2 two_floats<__half>(unsigned word) { return half2_to_float2(word); }
template <>
__device__ __forceinline__ float2 two_floats<__nv_bfloat16>(unsigned word) { return bfloat162_to_float2(word); }

// sum + w · x over an octet.
template <typename T>
__device__ __forceinline__ float dot_octet(const uint4& w, const float4& low, const float4& high, float sum) {
    const float2 a = two_floats<T>(w.x), b = two_floats<T>(w.y), c = two_floats<T>(w.z), d = two_floats<T>(w.w);
    sum = fmaf(b.y, low.w, fmaf(b.x, low.z, fmaf(a.y, low.y, fmaf(a.x, low.x, sum))));
    return fmaf(d.y, high.w, fmaf(d.x, high.z, fmaf(c.y, high.y, fmaf(c.x, high.x, sum))));
}

template <typename T, typename Norm, int LANES>
__global__ void __launch_bounds__(THREADS, 4)
    lm_head(const T* w, const float* h, const Norm* norm, float* logits, int rows, int cols, float eps) {
    constexpr int ROUND = LANES * LOADS;
    __shared__ float squares[THREADS / 32];
    const int lane = threadIdx.x % LANES, stride = gridDim.x * (THREADS / LANES);
    const int octets = cols / 8, padded = (octets + ROUND - 1) / ROUND * ROUND;
    int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;

    launch_dependents();
    Pack<T> packs[LOADS];
    int next = row < rows ? lane : octets;  // the octet to ask for; none past the row
    const T* from = w + static_cast<size_t>(row) * cols + lane * 8;
    const auto ask = [&](int i) {
        packs[i] = next + i * LANES < octets ? stream_pack(from + i * LANES * 8) : zero_pack<T>();
    };
#pragma unroll
    for (int i = 0; i < LOADS; ++i) ask(i);

    // The first four of every octet, then the last four of every octet: neighbouring lanes read other banks.
    float4 *low = reinterpret_cast<float4*>(normed), *high = low + padded;
    for (int i = threadIdx.x; i < padded; i += THREADS) {  // nor does the norm depend on anybody
        const uint4 eight = i < octets ? load_pack(norm + i * 8).bits : zero_pack<Norm>().bits;
        const float2 a = two_floats<Norm>(eight.x), b = two_floats<Norm>(eight.y);
        const float2 c = two_floats<Norm>(eight.z), d = two_floats<Norm>(eight.w);
        low[i] = make_float4(a.x, a.y, b.x, b.y);
        high[i] = make_float4(c.x, c.y, d.x, d.y);
    }
    wait_for_predecessor();
    float square = 0.0f;
    for (int i = threadIdx.x; i < octets; i += THREADS) {
        const float4 a = reinterpret_cast<const float4*>(h)[2 * i], b = reinterpret_cast<const float4*>(h)[2 * i + 1];
        const float4 g = low[i], f = high[i];
        square = fmaf(a.w, a.w, fmaf(a.z, a.z, fmaf(a.y, a.y, fmaf(a.x, a.x, square))));
        square = fmaf(b.w, b.w, fmaf(b.z, b.z, fmaf(b.y, b.y, fmaf(b.x, b.x, square))));
        low[i] = make_float4(a.x * g.x, a.y * g.y, a.z * g.z, a.w * g.w);
        high[i] = make_float4(b.x * f.x, b.y * f.y, b.z * f.z, b.w * f.w);
    }
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
    __syncthreads();
    square = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) square += squares[i];
    const float factor = 1.0f / sqrtf(square / cols + eps);

    // As long as the warp has a row: all its lanes take part in the sums.
    while (row - static_cast<int>(threadIdx.x) % 32 / LANES < rows) {
        float sum = 0.0f;
        const int this_row = row;
#pragma unroll 1
        for (int at = lane; at < padded; at += ROUND) {
            next += ROUND;
            from += ROUND * 8;
            if (at + ROUND >= padded) {
                row += stride;
                next = row < rows ? lane : octets;
                from = w + static_cast<size_t>(row) * cols + lane * 8;
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                sum = dot_octet<T>(packs[i].bits, low[at + i * LANES], high[at + i * LANES], sum);
                ask(i);
            }
        }
        sum = warp_sum<LANES>(sum);
        if (lane == 0 && this_row < rows) logits[this_row] = sum * factor;
    }
}
