// Activations to INT8 for int4_gemv_dp4a: a scale for each 128 columns.             lesson 04
//
//   scale[j] = max |x| / 127 over columns 128 j ... 128 j + 127        q[k] = round(x[k] / scale[k / 128])
//
// Must move:  cols * 2 + cols + cols / 128 * 4 bytes: nothing beside the weights. It costs a launch.
// Launch:     ceil(cols / 512) blocks of 128 threads: a warp for each 128 columns, four columns a lane.
// Order:      an octet's bytes are q0 q4 q1 q5 q2 q6 q3 q7, as unpack_bytes gives the weights.

#include "bits.cuh"
#include "types.cuh"
#include "warp.cuh"

// Rounded to the nearest whole number, -127 ... 127, as a byte.
__device__ __forceinline__ unsigned byte(float v) { return static_cast<unsigned>(__float2int_rn(v)) & 0xffu; }

extern "C" __global__ void quantize_x(const __half* x, unsigned* q, float* scales, int cols) {
    const int lane = threadIdx.x % 32;
    const int group = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int k = group * 128 + lane * 4;
    if (group * 128 >= cols) return;  // the whole warp leaves
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (k < cols) {
        const uint2 bits = *reinterpret_cast<const uint2*>(x + k);
        const float2 a = half2_to_float2(bits.x), b = half2_to_float2(bits.y);
        v = make_float4(a.x, a.y, b.x, b.y);
    }
    const float largest = warp_max(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const unsigned mine = byte(v.x * inverse) | byte(v.y * inverse) << 8 | byte(v.z * inverse) << 16 |
                          byte(v.w * inverse) << 24;
    // Two neighbours hold an octet; each needs two bytes of the other's.
    const unsigned other = __shfl_xor_sync(0xffffffffu, mine, 1);
    const unsigned word = lane % 2 == 0 ? prmt(mine, other, 0x5140u) : prmt(other, mine, 0x7362u);
    if (k < cols) q[k / 4] = word;
    if (lane == 0) scales[group] = largest * (1.0f / 127.0f);
}
