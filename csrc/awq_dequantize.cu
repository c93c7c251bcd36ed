// AWQ's 4-bit weights back to 16 bits.                                               lesson 08
//
//   out[k, n] = (q[k, n] - z[k / group, n]) * s[k / group, n]
//
//   q (rows, cols) and z (rows / group, cols) are 0 to 15 and packed; s (rows / group, cols) is half;
//   out (rows, cols) is half or bfloat16, row-major: y = x out for a row vector x.
//
// Packing:    a 32-bit word holds eight neighbouring columns of one row, 4 bits each, interleaved:
//
//                 bits    31-28  27-24  23-20  19-16  15-12  11-8   7-4    3-0
//                 column    7      5      3      1      6      4      2     0
//
//             Column j stands in nibble [0, 4, 1, 5, 2, 6, 3, 7][j], so that two neighbours are 16 bits apart:
//             one mask takes both, and they come out as the two halves of a word (awq_v3).
// Must move:  rows * cols / 2 bytes of q in, rows * cols * 2 bytes out; z and s are a few percent of that.
// Rounding:   q - z has five bits and s eleven, so their product is exact in fp32. It is rounded once, to the
//             type of out. For half that is what AWQ's own kernels give, bit for bit.
// Launch:     one dimension; each kernel says how many elements a thread takes. cols is a multiple of 8.
//
//   awq_v1    a thread for each element: eight threads read the same word
//   awq_v2    a thread for each word: read once, unpacked eight times, stored in 16 bytes
//   awq_v3    ROWS words a thread, two columns at a time; the block's size is the launch's to choose

#include "bits.cuh"
#include "pack.cuh"
#include "types.cuh"

// The first bit of column j in its word.
__device__ __forceinline__ int shift_of(int j) { return 4 * (j / 2 + j % 2 * 4); }

// Step 1. The equation as it stands. Of each word that a thread loads it uses four bits.
template <typename T>
__global__ void awq_v1(const unsigned* qweight, const unsigned* qzeros, const __half* scales, T* out, int rows,
                       int cols, int group) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= static_cast<unsigned>(rows) * cols) return;
    const unsigned at = i / cols / group * cols + i % cols;  // of z and s
    const int shift = shift_of(i % 8);
    const int q = qweight[i / 8] >> shift & 15;
    const int z = qzeros[at / 8] >> shift & 15;
    out[i] = from_float<T>((q - z) * to_float(scales[at]));
}

// Step 2. Changed: a thread takes the eight columns of a word. Each word is asked for once instead of eight times,
// and results leave in one store of 16 bytes.
template <typename T>
__global__ void awq_v2(const unsigned* qweight, const unsigned* qzeros, const __half* scales, T* out, int rows,
                       int cols, int group) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned words = cols / 8;  // of a row
    if (i >= rows * words) return;
    const unsigned at = i / words / group * words + i % words;
    const unsigned q = qweight[i], z = qzeros[at];
    alignas(16) __half s[8];
    alignas(16) T w[8];
    *reinterpret_cast<uint4*>(s) = load_pack(scales + 8 * at).bits;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int shift = shift_of(j);
        const int difference = static_cast<int>(q >> shift & 15) - static_cast<int>(z >> shift & 15);
        w[j] = from_float<T>(difference * to_float(s[j]));
    }
    *reinterpret_cast<uint4*>(out + 8 * static_cast<size_t>(i)) = *reinterpret_cast<const uint4*>(w);
}

// Columns 2p and 2p + 1 of a word as two halves, each 1024 too large: 0x6400 is 1024 in half, whose last bit is then
// worth 1. `a & b | c` is one instruction; no integer is converted.
__device__ __forceinline__ __half2 biased_pair(unsigned word, int p) {
    const unsigned bits = lop3<(0xF0 & 0xCC) | 0xAA>(word >> 4 * p, 0x000f000fu, 0x64006400u);
    return *reinterpret_cast<const __half2*>(&bits);
}

// difference * scale for two columns, rounded once.
template <typename T> __device__ __forceinline__ unsigned scaled(__half2 difference, __half2 scale);
template <> __device__ __forceinline__ unsigned scaled<__half>(__half2 difference, __half2 scale) {
    const __half2 w = __hmul2(difference, scale);
    return *reinterpret_cast<const unsigned*>(&w);
}
template <> __device__ __forceinline__ unsigned scaled<__nv_bfloat16>(__half2 difference, __half2 scale) {
    const float2 d = __half22float2(difference), s = __half22float2(scale);
    const __nv_bfloat162 w = __floats2bfloat162_rn(d.x * s.x, d.y * s.y);
    return *reinterpret_cast<const unsigned*>(&w);
}

// Step 3. Changed: a thread takes ROWS words, one below the other in the same group. They leave together, and share
// the zero-points and scales, which are unpacked once. The bias of 1024 cancels in the difference. ROWS divides group.
template <typename T, int ROWS>
__global__ void awq_v3(const unsigned* qweight, const unsigned* qzeros, const __half* scales, T* out, int rows,
                       int cols, int group) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned words = cols / 8;
    if (i >= rows / ROWS * words) return;
    const unsigned row = i / words * ROWS, column = i % words, first = row * words + column;
    const unsigned at = row / group * words + column;
    unsigned q[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) q[r] = qweight[first + r * words];
    const unsigned zeros = qzeros[at];
    const uint4 loaded = load_pack(scales + 8 * at).bits;
    const unsigned pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    __half2 z[4], s[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        z[p] = biased_pair(zeros, p);
        s[p] = *reinterpret_cast<const __half2*>(&pairs[p]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        unsigned w[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) w[p] = scaled<T>(__hsub2(biased_pair(q[r], p), z[p]), s[p]);
        *reinterpret_cast<uint4*>(out + 8 * static_cast<size_t>(first + r * words)) =
            make_uint4(w[0], w[1], w[2], w[3]);
    }
}
