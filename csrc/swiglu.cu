// The MLP's activation for a prompt: what lies between the product with gate and up, and that with down.   lesson 07
//
//   out[n, j] = silu(gate[n, j]) * up[n, j] * factor,   silu(v) = v / (1 + exp(-v))
//
//   gate_up (tokens, 2 * inner) half, bfloat16 or float; its columns alternate, 16 of the gate and 16 of up.
//   out (tokens, inner) half
//
// Must move:  tokens * inner * (2 * bytes of gate_up + 2): each number once.
// Launch:     a thread for 8 elements of out, 256 threads a block. `count` is tokens * inner / 8.
// Rounding:   once, to half. The factor keeps what is too large for half in its range.
// Teaches:    a row is a whole number of 16 and 16, so places are counted through all tokens, without rows. Of 64 bytes
//             in a row of halves two threads load the gate's 32, then up's: half of a warp's span in each load, but of
//             every sector all of it.

#include "types.cuh"

constexpr int SWIGLU_THREADS = 256;

// Eight neighbours, by loads of 16 bytes.
template <typename T>
__device__ __forceinline__ void load_eight(const T* p, float (&v)[8]) {
    alignas(16) T raw[8];
#pragma unroll
    for (unsigned i = 0; i < sizeof(raw) / 16; ++i) {
        reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(p)[i];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = to_float(raw[j]);
}

template <typename T>
__global__ void __launch_bounds__(SWIGLU_THREADS) swiglu(const T* gate_up, __half* out, float factor, unsigned count) {
    const unsigned octet = blockIdx.x * SWIGLU_THREADS + threadIdx.x;
    if (octet >= count) return;
    const T* from = gate_up + static_cast<size_t>(octet / 2) * 32 + octet % 2 * 8;
    float gate[8], up[8];
    load_eight(from, gate);
    load_eight(from + 16, up);
    alignas(16) __half made[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) made[j] = __float2half_rn(gate[j] / (1.0f + expf(-gate[j])) * up[j] * factor);
    *reinterpret_cast<uint4*>(out + static_cast<size_t>(octet) * 8) = *reinterpret_cast<const uint4*>(made);
}
