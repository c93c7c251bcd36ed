// CUDA's built-in vector types: float4, uint4, int2, ...
//
// A vector type must be copied the way the GPU copies it: one 16-byte load, not four 4-byte ones. Left alone, a
// C++ compiler splits the copy of a struct into its members, and the observer would count four requests where the
// hardware makes one. So each type here is copied through a compiler vector type of its whole size.
#pragma once

namespace simt {
typedef unsigned char Copy1 __attribute__((may_alias));
typedef unsigned short Copy2 __attribute__((may_alias));
typedef unsigned int Copy4 __attribute__((may_alias));
typedef unsigned long long Copy8 __attribute__((may_alias));
typedef unsigned int Copy16 __attribute__((vector_size(16), may_alias));

template <unsigned bytes> struct CopyOf;
template <> struct CopyOf<1> { typedef Copy1 type; };
template <> struct CopyOf<2> { typedef Copy2 type; };
template <> struct CopyOf<4> { typedef Copy4 type; };
template <> struct CopyOf<8> { typedef Copy8 type; };
template <> struct CopyOf<16> { typedef Copy16 type; };

template <class T> inline __attribute__((always_inline)) void copy_whole(T* to, const T* from) {
    typedef typename CopyOf<sizeof(T)>::type Whole;
    *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(from);
}
}  // namespace simt

// The default constructor does nothing, so that `__shared__ float4 tile[32]` needs no initialisation code.
#define SIMT_COPIED_WHOLE(Name)                                                                              \
    Name() = default;                                                                                        \
    inline __attribute__((always_inline)) Name(const Name& other) { simt::copy_whole(this, &other); }        \
    inline __attribute__((always_inline)) Name& operator=(const Name& other) {                               \
        simt::copy_whole(this, &other);                                                                      \
        return *this;                                                                                        \
    }

#define SIMT_VECTORS(Base, T)                                                                                \
    struct Base##1 {                                                                                         \
        T x;                                                                                                 \
    };                                                                                                       \
    struct alignas(2 * sizeof(T)) Base##2 {                                                                  \
        T x, y;                                                                                              \
        SIMT_COPIED_WHOLE(Base##2)                                                                           \
        Base##2(T x_, T y_) : x(x_), y(y_) {}                                                                \
    };                                                                                                       \
    struct Base##3 {                                                                                         \
        T x, y, z;                                                                                           \
    };                                                                                                       \
    inline Base##1 make_##Base##1(T x) { return Base##1{x}; }                                                \
    inline Base##2 make_##Base##2(T x, T y) { return Base##2(x, y); }                                        \
    inline Base##3 make_##Base##3(T x, T y, T z) { return Base##3{x, y, z}; }

#define SIMT_VECTOR4(Base, T)                                                                                \
    struct alignas(4 * sizeof(T)) Base##4 {                                                                  \
        T x, y, z, w;                                                                                        \
        SIMT_COPIED_WHOLE(Base##4)                                                                           \
        Base##4(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}                                      \
    };                                                                                                       \
    inline Base##4 make_##Base##4(T x, T y, T z, T w) { return Base##4(x, y, z, w); }

SIMT_VECTORS(char, signed char)
SIMT_VECTORS(uchar, unsigned char)
SIMT_VECTORS(short, short)
SIMT_VECTORS(ushort, unsigned short)
SIMT_VECTORS(int, int)
SIMT_VECTORS(uint, unsigned int)
SIMT_VECTORS(float, float)
SIMT_VECTORS(longlong, long long)
SIMT_VECTORS(ulonglong, unsigned long long)
SIMT_VECTORS(double, double)
SIMT_VECTOR4(char, signed char)
SIMT_VECTOR4(uchar, unsigned char)
SIMT_VECTOR4(short, short)
SIMT_VECTOR4(ushort, unsigned short)
SIMT_VECTOR4(int, int)
SIMT_VECTOR4(uint, unsigned int)
SIMT_VECTOR4(float, float)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    operator uint3() const { return uint3{x, y, z}; }
};
