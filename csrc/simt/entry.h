// From `void** args`, as cuLaunchKernel takes them, to a call of the kernel with its own parameter types.
#pragma once
#include "simt/machine.h"

namespace simt {
template <class T> struct Pointer { static constexpr unsigned kind = 0, element = 0; };
template <class T> struct Pointer<T*> { static constexpr unsigned kind = 'p', element = sizeof(T); };
template <class T> struct Pointer<const T*> { static constexpr unsigned kind = 'c', element = sizeof(T); };
template <> struct Pointer<void*> { static constexpr unsigned kind = 'p', element = 1; };
template <> struct Pointer<const void*> { static constexpr unsigned kind = 'c', element = 1; };
template <class T> struct Plain { typedef T type; };
template <class T> struct Plain<const T> { typedef T type; };
template <class T> struct Plain<T* __restrict__> { typedef T* type; };
template <class T> struct Plain<T* const __restrict__> { typedef T* type; };
template <class T> struct Plain<T* const> { typedef T* type; };

template <class T> constexpr Arg describe() {
    typedef typename Plain<T>::type P;
    unsigned kind = Pointer<P>::kind;
    if (!kind) {
        kind = 's';
        if constexpr (__is_same(P, bool)) kind = 'b';
        else if constexpr (__is_same(P, float) || __is_same(P, double)) kind = 'f';
        else if constexpr (__is_enum(P)) kind = 'i';
        else if constexpr (!__is_class(P) && !__is_union(P)) kind = P(-1) < P(0) ? 'i' : 'u';
    }
    return Arg{unsigned(sizeof(P)), kind, Pointer<P>::element};
}

template <unsigned... I> struct Indices {};
template <unsigned N, unsigned... I> struct Count : Count<N - 1, N - 1, I...> {};
template <unsigned... I> struct Count<0, I...> { typedef Indices<I...> type; };

template <class F> struct Kernel;
template <class... A> struct Kernel<void (*)(A...)> {
    static constexpr Arg args[sizeof...(A) + 1] = {describe<A>()..., Arg{0, 0, 0}};
    template <void (*kernel)(A...), unsigned... I>
    __attribute__((no_sanitize("thread"))) static void unpack(void** values, Indices<I...>) {
        kernel(*static_cast<typename Plain<A>::type*>(values[I])...);
    }
    // Not instrumented: reading the arguments is the machine's doing, not the kernel's.
    template <void (*kernel)(A...)> __attribute__((no_sanitize("thread"))) static void call(void** values) {
        unpack<kernel>(values, typename Count<sizeof...(A)>::type());
    }
    template <void (*kernel)(A...)> static constexpr Entry entry() {
        return Entry{&call<kernel>, args, unsigned(sizeof...(A))};
    }
};
}  // namespace simt

#define SIMT_ENTRY(symbol, ...) \
    extern "C" const simt::Entry symbol = simt::Kernel<decltype(&__VA_ARGS__)>::entry<&__VA_ARGS__>();
