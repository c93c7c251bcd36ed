// INT4 words back to a 16-bit matrix, for many tokens: then the library's product takes it.       lesson 08
//
//   out[r, k] = (q[r, k] - z[r, k / group]) * scale[r, k / group]
//
//   words: layout 1 or 2; scales, and zero-points z where there are any: half, (rows, cols / group) for layout 1, in
//   tiles for layout 2 as csrc/int4_gemm.cu has them; out (rows, cols) is half or bfloat16
//
// Must move:  rows * cols / 2 bytes of words in, rows * cols * 2 bytes out; scales are a few percent of that.
// Launch:     ceil(words / (WORDS * 128)) blocks of 128 threads. A thread takes WORDS words, 128 apart.
// Rounding:   q - z has five bits and a scale eleven: the product is exact in float, and is rounded once.
// Teaches:    four small loads in flight do as well as one large one, and leave a warp's stores side by side: its 32
//             words are 512 bytes of one row (layout 1), or 128 bytes of each of four rows (layout 2).

#include "int4.cuh"
#include "pack.cuh"

constexpr int WORDS = 4;

template <typename T, int LAYOUT>
__global__ void __launch_bounds__(128)
    int4_dequantize(const unsigned* words, const __half* scales, const __half* zeros, T* out, int rows, int cols,
                    int group, unsigned count) {
    static_assert(LAYOUT == LAYOUT_VALUE_SHUFFLE || LAYOUT == LAYOUT_FRAGMENT, "words of another layout");
    constexpr bool TILES = LAYOUT == LAYOUT_FRAGMENT;
    const unsigned first = blockIdx.x * (WORDS * 128) + threadIdx.x;
    unsigned w[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) w[i] = first + i * 128 < count ? words[first + i * 128] : 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const unsigned at = first + i * 128;
        if (at >= count) return;
        unsigned row, k, step;  // the place of the word's first value, and of its scale
        if (TILES) {
            const unsigned tile = at / 128, wide = cols / 64, lane = at % 128 / 4, part = at % 4;
            row = tile / wide * 16 + lane / 4 + part % 2 * 8;
            k = tile % wide * 64 + part / 2 * 32 + lane % 4 * 8;
            step = (tile / wide * (cols / group) + k / group) * 16 + lane / 4 * 2 + part % 2;
            if (row >= static_cast<unsigned>(rows)) continue;
        } else {
            row = at / (cols / 8);
            k = at % (cols / 8) * 8;
            step = row * (cols / group) + k / group;
        }
        float v[8];
        unpack_prmt(w[i], v);
        const float scale = to_float(scales[step]), zero = zeros ? to_float(zeros[step]) : 0.0f;
        alignas(16) T made[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) made[j] = from_float<T>((v[j] - zero) * scale);
        *reinterpret_cast<uint4*>(out + static_cast<size_t>(row) * cols + k) = *reinterpret_cast<const uint4*>(made);
    }
}
