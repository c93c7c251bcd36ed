// Small kernels for tests/test_simt_machine.py, one for each thing that the SIMT machine can do. Valid CUDA too:
// `nvcc -arch=sm_90 -I csrc/include -cubin tests/simt_words.cu`.
#include "async_copy.cuh"
#include "bits.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "sync.cuh"
#include "types.cuh"
#include "warp.cuh"

extern "C" __global__ void warp_words(const int* in, unsigned* out) {
    int lane = threadIdx.x, v = in[lane];
    unsigned* o = out + lane * 16;
    o[0] = __shfl_sync(0xffffffffu, v, 3, 8);
    o[1] = __shfl_up_sync(0xffffffffu, v, 2u, 16);
    o[2] = __shfl_down_sync(0xffffffffu, v, 5u);
    o[3] = __shfl_xor_sync(0xffffffffu, v, 9);
    o[4] = __ballot_sync(0xffffffffu, v > 0);
    o[5] = __any_sync(0xffffffffu, v == in[7]) + 2 * __all_sync(0xffffffffu, v == in[7]);
    o[6] = __match_any_sync(0xffffffffu, v & 3);
    o[7] = __reduce_add_sync(0xffffffffu, v);
    o[8] = __reduce_min_sync(0xffffffffu, v);
    o[9] = __reduce_max_sync(0xffffffffu, (unsigned)v);
    o[10] = __activemask();
    if (lane < 16) o[11] = __shfl_xor_sync(0x0000ffffu, v, 1);
    else o[11] = __shfl_xor_sync(0xffff0000u, v, 2);
    o[12] = (unsigned)(__shfl_xor_sync(0xffffffffu, (long long)v << 20, 1) >> 20);
    o[13] = (unsigned)__shfl_xor_sync(0xffffffffu, (double)v, 1);
    o[14] = (unsigned)warp_sum(v);
    o[15] = __syncthreads_count(v > 0);
}

extern "C" __global__ void bit_words(const unsigned* in, unsigned* out) {
    unsigned a = in[3 * threadIdx.x], b = in[3 * threadIdx.x + 1], c = in[3 * threadIdx.x + 2];
    unsigned* o = out + threadIdx.x * 12;
    o[0] = __byte_perm(a, b, c & 0x7777);
    o[1] = __funnelshift_l(a, b, c);
    o[2] = __funnelshift_r(a, b, c);
    o[3] = __dp4a((int)a, (int)b, (int)c);
    o[4] = __dp4a(a, b, c);
    o[5] = lop3<0xe2>(a, b, c);
    o[6] = __popc(a) + 100 * __clz(a >> 9) + 10000 * __ffs(a << 3);
    o[7] = __brev(a);
    o[8] = __umulhi(a, b);
    o[9] = min(a, b) ^ max((int)a, (int)b);
    o[10] = prmt(a, b, 0x5410);
    o[11] = __float_as_uint(__uint_as_float(a));
}

extern "C" __global__ void halves(const unsigned short* in, float* as_half, float* as_bf16, unsigned short* back) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    as_half[i] = __half2float(__ushort_as_half(in[i]));
    as_bf16[i] = __bfloat162float(__ushort_as_bfloat16(in[i]));
    back[2 * i] = __half_as_ushort(__float2half_rn(as_half[i]));
    back[2 * i + 1] = __bfloat16_as_ushort(__float2bfloat16_rn(as_bf16[i]));
}

extern "C" __global__ void rounded(const float* in, unsigned short* half_out, unsigned short* bf16_out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    half_out[i] = __half_as_ushort(__float2half_rn(in[i]));
    bf16_out[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
}

extern "C" __global__ void half_fma(const half2* a, const half2* b, const half2* c, half2* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __hfma2(a[i], b[i], c[i]);
}

extern "C" __global__ void atomics(int* i, unsigned* u, float* f, half2* h) {
    atomicAdd(&i[0], -1);
    atomicMin(&i[1], -(int)threadIdx.x);
    atomicMax(&i[2], (int)threadIdx.x - 1000);
    atomicAdd(&u[0], 1u);
    atomicOr(&u[1], 1u << (threadIdx.x & 31));
    atomicCAS(&u[2], 0u, 7u);
    atomicExch(&u[3], 9u);
    atomicAdd(&f[0], 0.5f);
    atomicAdd(h, __floats2half2_rn(1.0f, 2.0f));
}

__device__ void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], half) {
    mma_16x8x16_f16(d, a, b);
}
__device__ void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], nv_bfloat16) {
    mma_16x8x16_bf16(d, a, b);
}
// a: 16 x 16 and b: 16 x 8, both row by row; d: 16 x 8.
template <typename T> __global__ void multiply(const T* a, const T* b, float* d) {
    __shared__ alignas(16) T tile[16][16];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i / 16][i % 16] = a[i];
    __syncwarp();
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned fa[4], fb[2], bits;
    // Tiles in the order of the registers: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    ldmatrix_x4(fa, &tile[lane % 16][8 * (lane / 16)]);
    for (int i = 0; i < 2; ++i) {
        T pair[2] = {b[(2 * t + 8 * i) * 8 + g], b[(2 * t + 1 + 8 * i) * 8 + g]};
        memcpy(&bits, pair, 4);
        fb[i] = bits;
    }
    float acc[4] = {0, 0, 0, 0};
    multiply_tile(acc, fa, fb, T());
    d[g * 8 + 2 * t] = acc[0];
    d[g * 8 + 2 * t + 1] = acc[1];
    d[(g + 8) * 8 + 2 * t] = acc[2];
    d[(g + 8) * 8 + 2 * t + 1] = acc[3];
}

extern "C" __global__ void transposed(const unsigned short* in, unsigned short* out) {
    __shared__ alignas(16) unsigned short tile[32][8];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i / 8][i % 8] = in[i];
    __syncwarp();
    unsigned r[4];
    ldmatrix_x4_transposed(r, &tile[threadIdx.x][0]);
    for (int j = 0; j < 4; ++j) {
        out[j * 64 + (threadIdx.x / 4) * 8 + 2 * (threadIdx.x % 4)] = r[j] & 0xffff;
        out[j * 64 + (threadIdx.x / 4) * 8 + 2 * (threadIdx.x % 4) + 1] = r[j] >> 16;
    }
}

// A ring of two tiles, filled by cp.async one step ahead.
template <bool wait> __global__ void ring(const float* in, float* out, int tiles) {
    __shared__ float4 tile[2][32];
    int lane = threadIdx.x;
    float4 sum = make_float4(0, 0, 0, 0);
    cp_async_16(&tile[0][lane], in + 4 * lane);
    cp_async_commit();
    for (int i = 0; i < tiles; ++i) {
        if (i + 1 < tiles) cp_async_16(&tile[(i + 1) % 2][lane], in + 128 * (i + 1) + 4 * lane);
        cp_async_commit();
        if (wait) cp_async_wait<1>();
        __syncthreads();
        float4 v = tile[i % 2][lane ^ 1];
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
        __syncthreads();
    }
    reinterpret_cast<float4*>(out)[lane] = sum;
}

// One producer warp, the others consume: full and empty barriers, two stages.
// fault 0: right, 1: no wait for full, 2: no wait for empty, 3: too few bytes announced.
template <int fault> __global__ void pipeline(const float* in, float* out, int tiles) {
    extern __shared__ __align__(128) float stages[];
    __shared__ mbarrier_t full[2], empty[2];
    int warp = threadIdx.x / 32, consumers = blockDim.x - 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], consumers);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp == 0) {
        if (threadIdx.x == 0)
            for (int i = 0; i < tiles; ++i) {
                int s = i % 2;
                if (fault != 2) mbarrier_wait(&empty[s], (i / 2 + 1) % 2);
                mbarrier_arrive_expect_bytes(&full[s], consumers * (fault == 3 ? 2 : 4));
                bulk_copy(stages + s * consumers, in + i * consumers, consumers * 4, &full[s]);
            }
        return;
    }
    int me = threadIdx.x - 32;
    float sum = 0;
    for (int i = 0; i < tiles; ++i) {
        int s = i % 2;
        if (fault != 1) mbarrier_wait(&full[s], i / 2 % 2);
        sum += stages[s * consumers + (me + 1) % consumers];
        mbarrier_arrive(&empty[s]);
    }
    out[me] = sum;
}

// Warps 0 and 1 hand a number to warps 2 and 3 through a named barrier.
extern "C" __global__ void handover(float* out) {
    __shared__ float box[64];
    int i = threadIdx.x;
    if (i < 64) {
        box[i] = float(i);
        named_barrier_arrive(1, 128);
    } else {
        named_barrier_sync(1, 128);
        out[i - 64] = box[127 - i];
    }
}

// Every block adds its part, and the block that comes last adds them up: fences order what the counter announces.
template <bool fence> __global__ void last_block_sums(const float* in, float* parts, unsigned* count, float* total) {
    __shared__ bool last;
    float sum = warp_sum(in[blockIdx.x * 32 + threadIdx.x]);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
        if (fence) __threadfence();
        last = atomicAdd(count, 1u) == gridDim.x - 1;
        if (fence) __threadfence();
    }
    __syncthreads();
    if (last) {
        float all = 0;
        for (int i = 0; i < gridDim.x; ++i) all += parts[i];
        if (threadIdx.x == 0) *total = all;
    }
}

// All blocks meet, then each reads what its neighbour wrote.
extern "C" __global__ void grid_barrier(float* data, float* out, unsigned* count) {
    __shared__ float keep;
    if (threadIdx.x == 0) keep = data[blockIdx.x] = float(blockIdx.x + 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        red_add_release(count, 1);
        while (ld_acquire(count) < gridDim.x) {
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = data[(blockIdx.x + 1) % gridDim.x] + 100 * keep;
}

// in[stride * lane] from shared memory.
template <typename T> __global__ void banks(float* out, int stride) {
    extern __shared__ __align__(128) float stages[];
    for (int i = threadIdx.x; i < 2048; i += 32) stages[i] = 1.0f;
    __syncwarp();
    T v = reinterpret_cast<const T*>(stages)[stride * threadIdx.x];
    out[threadIdx.x] = *reinterpret_cast<const float*>(&v);
}

struct Sizes {
    int rows, cols;
    float scale;
};
extern "C" __global__ void by_value(const __grid_constant__ Sizes s, float* out, half h, bool yes, long long big) {
    out[0] = s.rows * s.cols * s.scale;
    out[1] = __half2float(h);
    out[2] = yes;
    out[3] = float(big);
}

extern "C" __global__ void half_written(float* out) {
    if (threadIdx.x % 2 == 0) out[threadIdx.x] = 1.0f;
}
extern "C" __global__ void reads_output(float* out) { out[threadIdx.x] += 1.0f; }
extern "C" __global__ void two_places(float* out) {
    if (threadIdx.x < 32) __syncthreads();  // here
    else __syncthreads();  // or there
    out[threadIdx.x] = 0.0f;
}
extern "C" __global__ void not_in_mask(float* out) {
    out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 1);
}
extern "C" __global__ void divergent_deadlock(float* out) {
    if (threadIdx.x < 32) __syncthreads();
    else named_barrier_sync(3, 128);
    out[threadIdx.x] = 0.0f;
}
extern "C" __global__ void endless(float* out) {
    volatile float* v = out;
    while (v[0] == 0.0f) {
    }
}
extern "C" __global__ void writes_through(float* out) { out[threadIdx.x] = 1.0f; }
extern "C" __global__ void deep(float* out, int n) {
    volatile float local[65536];
    for (int i = 0; i < n; ++i) local[i] = out[0];
    out[0] = local[n - 1];
}
extern "C" __global__ void past_shared(float* out, int i) {
    extern __shared__ __align__(128) float stages[];
    stages[i] = 1.0f;
    out[0] = stages[i];
}
// Each lane reads as many numbers as its own length says, twice over.
extern "C" __global__ void ragged(const int* length, const float* in, float* out) {
    float sum = 0;
    for (int pass = 0; pass < 2; ++pass) {
        for (int i = 0; i < length[pass * 32 + threadIdx.x]; ++i) sum += in[i * 32 + threadIdx.x];  // ragged
        __syncwarp();
    }
    out[threadIdx.x] = sum;
}
extern "C" __global__ void asserts(const float* in) {
    assert(in[threadIdx.x] == 0.0f);
}
