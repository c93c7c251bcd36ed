// __half and __nv_bfloat16, rounded as the GPU rounds: to nearest, ties to even, subnormals kept.
#pragma once
#include "simt/vector_types.h"

namespace simt {
// Three ways to convert: an instruction of x86-64, a type of aarch64, and plain arithmetic for the rest (and for the
// test that compares them: SIMT_PORTABLE_HALF).
inline unsigned bits_of(float f) { unsigned u; __builtin_memcpy(&u, &f, 4); return u; }
inline float float_of(unsigned u) { float f; __builtin_memcpy(&f, &u, 4); return f; }

inline float half_to_float(unsigned short h) {
#if defined(__F16C__) && !defined(SIMT_PORTABLE_HALF)
    typedef float V __attribute__((vector_size(16)));
    typedef int I __attribute__((vector_size(16)));
    I in = {h, 0, 0, 0};
    V out;
    asm("vcvtph2ps %1, %0" : "=x"(out) : "x"(in));
    return out[0];
#elif defined(__aarch64__) && !defined(SIMT_PORTABLE_HALF)
    __fp16 f;
    __builtin_memcpy(&f, &h, 2);
    return f;
#else
    unsigned sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        float f = float(mantissa) * 0x1p-24f;
        return sign ? -f : f;
    }
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
#endif
}

inline unsigned short float_to_half(float f) {
    if (f != f) return 0x7fff;  // the one NaN that the GPU's conversion makes
#if defined(__F16C__) && !defined(SIMT_PORTABLE_HALF)
    typedef float V __attribute__((vector_size(16)));
    typedef int I __attribute__((vector_size(16)));
    V in = {f, 0, 0, 0};
    I out;
    asm("vcvtps2ph $0, %1, %0" : "=x"(out) : "x"(in));
    return (unsigned short)out[0];
#elif defined(__aarch64__) && !defined(SIMT_PORTABLE_HALF)
    __fp16 h = f;
    unsigned short u;
    __builtin_memcpy(&u, &h, 2);
    return u;
#else
    unsigned u = bits_of(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude >= 0x47800000) return (unsigned short)(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // a subnormal half: let the addition round to a multiple of 2^-24
        float rounded = float_of(magnitude) + 0.5f;
        return (unsigned short)(sign | (bits_of(rounded) - 0x3f000000u));
    }
    unsigned odd = (magnitude >> 13) & 1;
    return (unsigned short)(sign | ((magnitude + 0xc8000fffu + odd) >> 13));
#endif
}

inline float bf16_to_float(unsigned short b) { return float_of(unsigned(b) << 16); }
inline unsigned short float_to_bf16(float f) {
    if (f != f) return 0x7fff;
    unsigned u = bits_of(f);
    return (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// a*b + c for inputs of at most 11 bits, ready to be rounded once more without error. Rounding first to float and then
// to half could round twice in the same direction; rounding *to odd* keeps the trace of what was cut off.
inline float fma_to_odd(float a, float b, float c) {
    double p = double(a) * double(b), s = p + double(c);
    if (!(s - s == 0)) return float(s);  // infinity or NaN
    double t = s - p, cut = (p - (s - t)) + (double(c) - t);
    if (cut != 0) {
        long long u;
        __builtin_memcpy(&u, &s, 8);
        if (!(u & 1)) {
            u += (cut > 0) == (s > 0) ? 1 : -1;
            __builtin_memcpy(&s, &u, 8);
        }
    }
    float f = float(s);
    if (double(f) == s || f - f != 0) return f;
    unsigned u = bits_of(f);
    if (__builtin_fabs(double(f)) > __builtin_fabs(s)) --u;  // towards zero, then odd
    return float_of(u | 1);
}
}  // namespace simt

struct __half {
    unsigned short bits;
    __half() = default;
    __half(float f) : bits(simt::float_to_half(f)) {}
    __half(double f) : bits(simt::float_to_half(float(f))) {}
    __half(int i) : bits(simt::float_to_half(float(i))) {}
    operator float() const { return simt::half_to_float(bits); }
};
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : bits(simt::float_to_bf16(f)) {}
    __nv_bfloat16(double f) : bits(simt::float_to_bf16(float(f))) {}
    __nv_bfloat16(int i) : bits(simt::float_to_bf16(float(i))) {}
    operator float() const { return simt::bf16_to_float(bits); }
};
struct alignas(4) __half2 {
    __half x, y;
    SIMT_COPIED_WHOLE(__half2)
    __half2(__half x_, __half y_) : x(x_), y(y_) {}
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    SIMT_COPIED_WHOLE(__nv_bfloat162)
    __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};
struct __half_raw { unsigned short x; };
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline float __half2float(half h) { return float(h); }
inline half __float2half(float f) { return half(f); }
inline half __float2half_rn(float f) { return half(f); }
inline float __bfloat162float(nv_bfloat16 h) { return float(h); }
inline nv_bfloat16 __float2bfloat16(float f) { return nv_bfloat16(f); }
inline nv_bfloat16 __float2bfloat16_rn(float f) { return nv_bfloat16(f); }
inline half __int2half_rn(int i) { return half(float(i)); }
inline half __ushort_as_half(unsigned short u) { half h; h.bits = u; return h; }
inline unsigned short __half_as_ushort(half h) { return h.bits; }
inline nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { nv_bfloat16 h; h.bits = u; return h; }
inline unsigned short __bfloat16_as_ushort(nv_bfloat16 h) { return h.bits; }

inline half2 __floats2half2_rn(float a, float b) { return half2(half(a), half(b)); }
inline half2 __float22half2_rn(float2 v) { return half2(half(v.x), half(v.y)); }
inline half2 __float2half2_rn(float a) { return half2(half(a), half(a)); }
inline float2 __half22float2(half2 v) { return float2(float(v.x), float(v.y)); }
inline nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return nv_bfloat162(nv_bfloat16(a), nv_bfloat16(b)); }
inline nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline nv_bfloat162 __float2bfloat162_rn(float a) { return __floats2bfloat162_rn(a, a); }
inline float2 __bfloat1622float2(nv_bfloat162 v) { return float2(float(v.x), float(v.y)); }
inline float __low2float(half2 v) { return float(v.x); }
inline float __high2float(half2 v) { return float(v.y); }
inline float __low2float(nv_bfloat162 v) { return float(v.x); }
inline float __high2float(nv_bfloat162 v) { return float(v.y); }

// Sums and products of two short numbers are exact enough in float that rounding once more is harmless
// (24 bits >= 2 * 11 + 2); only the fused multiply-add needs care.
#define SIMT_SHORT_FLOAT(T, T2)                                                                              \
    inline T __hadd(T a, T b) { return T(float(a) + float(b)); }                                             \
    inline T __hsub(T a, T b) { return T(float(a) - float(b)); }                                             \
    inline T __hmul(T a, T b) { return T(float(a) * float(b)); }                                             \
    inline T __hdiv(T a, T b) { return T(float(a) / float(b)); }                                             \
    inline T __hneg(T a) { a.bits ^= 0x8000; return a; }                                                     \
    inline T __habs(T a) { a.bits &= 0x7fff; return a; }                                                     \
    inline T __hfma(T a, T b, T c) { return T(simt::fma_to_odd(float(a), float(b), float(c))); }             \
    inline T __hmax(T a, T b) { return T(__builtin_fmaxf(float(a), float(b))); }                             \
    inline T __hmin(T a, T b) { return T(__builtin_fminf(float(a), float(b))); }                             \
    inline bool __hgt(T a, T b) { return float(a) > float(b); }                                              \
    inline bool __hlt(T a, T b) { return float(a) < float(b); }                                              \
    inline bool __heq(T a, T b) { return float(a) == float(b); }                                             \
    inline bool __hisnan(T a) { return float(a) != float(a); }                                               \
    inline T2 __hadd2(T2 a, T2 b) { return T2(__hadd(a.x, b.x), __hadd(a.y, b.y)); }                         \
    inline T2 __hsub2(T2 a, T2 b) { return T2(__hsub(a.x, b.x), __hsub(a.y, b.y)); }                         \
    inline T2 __hmul2(T2 a, T2 b) { return T2(__hmul(a.x, b.x), __hmul(a.y, b.y)); }                         \
    inline T2 __hfma2(T2 a, T2 b, T2 c) { return T2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }         \
    inline T2 __hmax2(T2 a, T2 b) { return T2(__hmax(a.x, b.x), __hmax(a.y, b.y)); }                         \
    inline T2 __hmin2(T2 a, T2 b) { return T2(__hmin(a.x, b.x), __hmin(a.y, b.y)); }                         \
    inline T2 __hneg2(T2 a) { return T2(__hneg(a.x), __hneg(a.y)); }                                         \
    inline T operator+(T a, T b) { return __hadd(a, b); }                                                    \
    inline T operator-(T a, T b) { return __hsub(a, b); }                                                    \
    inline T operator*(T a, T b) { return __hmul(a, b); }                                                    \
    inline T operator/(T a, T b) { return __hdiv(a, b); }                                                    \
    inline T operator-(T a) { return __hneg(a); }                                                            \
    inline T& operator+=(T& a, T b) { return a = __hadd(a, b); }                                             \
    inline T& operator*=(T& a, T b) { return a = __hmul(a, b); }                                             \
    inline bool operator<(T a, T b) { return float(a) < float(b); }                                          \
    inline bool operator>(T a, T b) { return float(a) > float(b); }                                          \
    inline bool operator==(T a, T b) { return float(a) == float(b); }                                        \
    inline T2 operator+(T2 a, T2 b) { return __hadd2(a, b); }                                                \
    inline T2 operator-(T2 a, T2 b) { return __hsub2(a, b); }                                                \
    inline T2 operator*(T2 a, T2 b) { return __hmul2(a, b); }

SIMT_SHORT_FLOAT(half, half2)
SIMT_SHORT_FLOAT(nv_bfloat16, nv_bfloat162)

inline half __low2half(half2 v) { return v.x; }
inline half __high2half(half2 v) { return v.y; }
inline half2 __half2half2(half h) { return half2(h, h); }
inline half2 __halves2half2(half a, half b) { return half2(a, b); }
inline half2 make_half2(half a, half b) { return half2(a, b); }
inline half2 __low2half2(half2 v) { return half2(v.x, v.x); }
inline half2 __high2half2(half2 v) { return half2(v.y, v.y); }
inline half2 __lowhigh2highlow(half2 v) { return half2(v.y, v.x); }
inline nv_bfloat16 __low2bfloat16(nv_bfloat162 v) { return v.x; }
inline nv_bfloat16 __high2bfloat16(nv_bfloat162 v) { return v.y; }
inline nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 h) { return nv_bfloat162(h, h); }
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 a, nv_bfloat16 b) { return nv_bfloat162(a, b); }
inline nv_bfloat162 make_bfloat162(nv_bfloat16 a, nv_bfloat16 b) { return nv_bfloat162(a, b); }
