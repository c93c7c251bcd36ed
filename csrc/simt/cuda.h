// The vocabulary of CUDA C++, for a CPU compiler. A kernel file is compiled after this header, unchanged.
//
// How the words are made:
//   __shared__      thread_local. All threads of one block run on one OS thread, so "one copy per OS thread" is
//                   "one copy per block".
//   threadIdx ...   a question to the machine, which knows whose turn it is.
//   __syncthreads, shuffles, votes      calls that switch to another fiber until all have come.
//   atomics         calls, so that the observer sees one access and not the loop that makes it.
// __CUDA_ARCH__ is not defined; NANOQWEN_SIMT is.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "simt/entry.h"
#include "simt/half.h"
#include "simt/machine.h"
#include "simt/vector_types.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(n)

#define threadIdx (simt_thread_idx())
#define blockIdx (simt_block_idx())
#define blockDim (simt_block_dim())
#define gridDim (simt_grid_dim())
#define warpSize 32

#define SIMT_HERE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()
#define SIMT_INLINE inline __attribute__((always_inline))

// ---- barriers and fences ----
SIMT_INLINE void __syncthreads(SIMT_HERE) { simt_block_barrier(simt::kBarrierOnly, 0, file, line); }
SIMT_INLINE int __syncthreads_count(int p, SIMT_HERE) { return simt_block_barrier(simt::kCount, p, file, line); }
SIMT_INLINE int __syncthreads_and(int p, SIMT_HERE) { return simt_block_barrier(simt::kBlockAnd, p, file, line); }
SIMT_INLINE int __syncthreads_or(int p, SIMT_HERE) { return simt_block_barrier(simt::kBlockOr, p, file, line); }
SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffffu, SIMT_HERE) {
    simt_warp(simt::kSyncWarp, mask, 0, 0, file, line);
}
SIMT_INLINE void __threadfence() { simt_fence(); }
SIMT_INLINE void __threadfence_block() { simt_fence(); }
SIMT_INLINE void __threadfence_system() { simt_fence(); }
SIMT_INLINE void __nanosleep(unsigned) { simt_pause(); }
SIMT_INLINE long long clock64() { return (long long)simt_clock(); }
SIMT_INLINE int clock() { return (int)simt_clock(); }
SIMT_INLINE void __trap(SIMT_HERE) { simt_trap("__trap()", file, line); }
#define assert(condition) ((condition) ? (void)0 : simt_trap("assertion failed: " #condition, __FILE__, __LINE__))
#if !defined(__clang__)
#define __builtin_assume(condition) ((void)0)
#endif

// ---- shuffles and votes ----
namespace simt {
template <class T> SIMT_INLINE unsigned long long pack(const T& value) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T> SIMT_INLINE T unpack(unsigned long long bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
SIMT_INLINE T shuffle(unsigned mask, T value, unsigned source, const char* file, unsigned line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    return unpack<T>(simt_warp(kShuffle, mask, pack(value), source, file, line));
}
}  // namespace simt

template <class T> SIMT_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SIMT_HERE) {
    unsigned first = simt_lane() & ~(width - 1);
    return simt::shuffle(mask, value, first | (lane & (width - 1)), file, line);
}
template <class T> SIMT_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
    unsigned me = simt_lane(), in_group = me & (width - 1);
    return simt::shuffle(mask, value, in_group < delta ? me : me - delta, file, line);
}
template <class T> SIMT_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
    unsigned me = simt_lane(), in_group = me & (width - 1);
    return simt::shuffle(mask, value, in_group + delta >= unsigned(width) ? me : me + delta, file, line);
}
template <class T> SIMT_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_HERE) {
    unsigned me = simt_lane(), source = me ^ unsigned(bits);
    // A lane may read from its own group of `width` lanes or an earlier one; past it, it keeps its own value.
    return simt::shuffle(mask, value, source >= (me & ~unsigned(width - 1)) + width ? me : source, file, line);
}
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int p, SIMT_HERE) {
    return (unsigned)simt_warp(simt::kBallot, mask, p != 0, 0, file, line);
}
SIMT_INLINE int __any_sync(unsigned mask, int p, SIMT_HERE) {
    return (int)simt_warp(simt::kAny, mask, p != 0, 0, file, line);
}
SIMT_INLINE int __all_sync(unsigned mask, int p, SIMT_HERE) {
    return (int)simt_warp(simt::kAll, mask, p != 0, 0, file, line);
}
template <class T> SIMT_INLINE unsigned __match_any_sync(unsigned mask, T value, SIMT_HERE) {
    return (unsigned)simt_warp(simt::kMatchAny, mask, simt::pack(value), 0, file, line);
}
SIMT_INLINE unsigned __activemask() { return simt_active_mask(); }

#define SIMT_WARP_REDUCE(name, T, op)                                                                        \
    SIMT_INLINE T name(unsigned mask, T value, SIMT_HERE) {                                                  \
        return (T)simt_warp(simt::op, mask, (unsigned)value, 0, file, line);                                 \
    }
SIMT_WARP_REDUCE(__reduce_add_sync, int, kAdd)
SIMT_WARP_REDUCE(__reduce_add_sync, unsigned, kAdd)
SIMT_WARP_REDUCE(__reduce_min_sync, int, kMinSigned)
SIMT_WARP_REDUCE(__reduce_min_sync, unsigned, kMin)
SIMT_WARP_REDUCE(__reduce_max_sync, int, kMaxSigned)
SIMT_WARP_REDUCE(__reduce_max_sync, unsigned, kMax)
SIMT_WARP_REDUCE(__reduce_and_sync, unsigned, kAnd)
SIMT_WARP_REDUCE(__reduce_or_sync, unsigned, kOr)
SIMT_WARP_REDUCE(__reduce_xor_sync, unsigned, kXor)

// ---- atomics ----
#define SIMT_ATOMIC(name, T, op, type)                                                                       \
    SIMT_INLINE T name(T* address, T value) {                                                                \
        return simt::unpack<T>(simt_atomic(simt::op, simt::type, address, simt::pack(value), 0, 0));         \
    }
#define SIMT_ATOMIC_INTEGERS(name, op)                                                                       \
    SIMT_ATOMIC(name, int, op, kI32)                                                                         \
    SIMT_ATOMIC(name, unsigned, op, kU32)                                                                    \
    SIMT_ATOMIC(name, unsigned long long, op, kU64)
SIMT_ATOMIC_INTEGERS(atomicAdd, kAtomicAdd)
SIMT_ATOMIC_INTEGERS(atomicMin, kAtomicMin)
SIMT_ATOMIC_INTEGERS(atomicMax, kAtomicMax)
SIMT_ATOMIC_INTEGERS(atomicExch, kAtomicExch)
SIMT_ATOMIC_INTEGERS(atomicAnd, kAtomicAnd)
SIMT_ATOMIC_INTEGERS(atomicOr, kAtomicOr)
SIMT_ATOMIC_INTEGERS(atomicXor, kAtomicXor)
SIMT_ATOMIC(atomicAdd, float, kAtomicAdd, kF32)
SIMT_ATOMIC(atomicAdd, double, kAtomicAdd, kF64)
SIMT_ATOMIC(atomicExch, float, kAtomicExch, kF32)
SIMT_ATOMIC(atomicAdd, half2, kAtomicAdd, kHalf2)
SIMT_ATOMIC(atomicAdd, nv_bfloat162, kAtomicAdd, kBf162)
SIMT_ATOMIC(atomicAdd, half, kAtomicAdd, kHalf)
SIMT_ATOMIC(atomicAdd, nv_bfloat16, kAtomicAdd, kBf16)
SIMT_INLINE int atomicSub(int* a, int v) { return atomicAdd(a, -v); }
SIMT_INLINE unsigned atomicSub(unsigned* a, unsigned v) { return atomicAdd(a, 0u - v); }
#define SIMT_ATOMIC_CAS(T, type)                                                                             \
    SIMT_INLINE T atomicCAS(T* address, T compare, T value) {                                                \
        return simt::unpack<T>(                                                                              \
            simt_atomic(simt::kAtomicCas, simt::type, address, simt::pack(value), simt::pack(compare), 0));  \
    }
SIMT_ATOMIC_CAS(int, kI32)
SIMT_ATOMIC_CAS(unsigned, kU32)
SIMT_ATOMIC_CAS(unsigned long long, kU64)

// ---- loads and stores with a cache hint: plain ones here ----
template <class T> SIMT_INLINE T __ldg(const T* p) { return *p; }
template <class T> SIMT_INLINE T __ldcs(const T* p) { return *p; }
template <class T> SIMT_INLINE T __ldcg(const T* p) { return *p; }
template <class T> SIMT_INLINE T __ldca(const T* p) { return *p; }
template <class T> SIMT_INLINE T __ldlu(const T* p) { return *p; }
template <class T> SIMT_INLINE void __stcs(T* p, T value) { *p = value; }
template <class T> SIMT_INLINE void __stcg(T* p, T value) { *p = value; }
template <class T> SIMT_INLINE void __stwb(T* p, T value) { *p = value; }

// ---- bits ----
SIMT_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SIMT_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SIMT_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SIMT_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
SIMT_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
SIMT_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long all = (unsigned long long)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= unsigned(all >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
SIMT_INLINE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)((((unsigned long long)hi << 32 | lo) << (shift & 31)) >> 32);
}
SIMT_INLINE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((unsigned long long)hi << 32 | lo) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) {
    unsigned sum = (unsigned)c;
    for (int i = 0; i < 4; ++i) sum += (unsigned)(int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i)));
    return (int)sum;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return c;
}
SIMT_INLINE int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
SIMT_INLINE unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
SIMT_INLINE unsigned __float_as_uint(float f) { return simt::bits_of(f); }
SIMT_INLINE int __float_as_int(float f) { return (int)simt::bits_of(f); }
SIMT_INLINE float __uint_as_float(unsigned u) { return simt::float_of(u); }
SIMT_INLINE float __int_as_float(int i) { return simt::float_of((unsigned)i); }
SIMT_INLINE long long __double_as_longlong(double d) { return simt::unpack<long long>(simt::pack(d)); }
SIMT_INLINE double __longlong_as_double(long long i) { return simt::unpack<double>(simt::pack(i)); }

// ---- arithmetic ----
#define SIMT_MIN_MAX(T)                                                                                      \
    SIMT_INLINE T min(T a, T b) { return b < a ? b : a; }                                                    \
    SIMT_INLINE T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
SIMT_INLINE unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
SIMT_INLINE unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
SIMT_INLINE unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
SIMT_INLINE unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
SIMT_INLINE float min(float a, float b) { return fminf(a, b); }
SIMT_INLINE float max(float a, float b) { return fmaxf(a, b); }
SIMT_INLINE double min(double a, double b) { return fmin(a, b); }
SIMT_INLINE double max(double a, double b) { return fmax(a, b); }

SIMT_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
SIMT_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
SIMT_INLINE float __fdividef(float a, float b) { return a / b; }
SIMT_INLINE float __frcp_rn(float x) { return 1.0f / x; }
SIMT_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
SIMT_INLINE float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
SIMT_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
SIMT_INLINE float __fadd_rn(float a, float b) { return a + b; }
SIMT_INLINE float __fsub_rn(float a, float b) { return a - b; }
SIMT_INLINE float __fmul_rn(float a, float b) { return a * b; }
SIMT_INLINE float __fdiv_rn(float a, float b) { return a / b; }
SIMT_INLINE float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
SIMT_INLINE int __float2int_rn(float x) { return (int)rintf(x); }
SIMT_INLINE int __float2int_rd(float x) { return (int)floorf(x); }
SIMT_INLINE int __float2int_rz(float x) { return (int)x; }
SIMT_INLINE float __int2float_rn(int x) { return (float)x; }
SIMT_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
// Macros, because the C library declares functions of these names for itself. The GPU's fast versions are a few
// units in the last place off; these are the accurate ones.
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, (x))
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf((x), (y))

inline half hexp(half a) { return half(expf(float(a))); }
inline half hrcp(half a) { return half(1.0f / float(a)); }
inline half hsqrt(half a) { return half(sqrtf(float(a))); }
inline nv_bfloat16 hexp(nv_bfloat16 a) { return nv_bfloat16(expf(float(a))); }

// CUDA allows `__shared__ alignas(16) float tile[64]`; standard C++ wants alignas first. The attribute goes anywhere.
#define alignas(n) __attribute__((aligned(n)))
