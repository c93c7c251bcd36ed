// Bit operations that the GPU does in one instruction.
#pragma once

#ifdef NANOQWEN_SIMT
#include "simt/bits.h"
#else
// Any function of three bits, for 32 bits at once. `table` is the function's truth table: what it gives for
// a = 0xF0, b = 0xCC, c = 0xAA. (a & b) | c is lop3<(0xF0 & 0xCC) | 0xAA>.
template <int table>
__device__ __forceinline__ unsigned lop3(unsigned a, unsigned b, unsigned c) {
    unsigned out;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(out) : "r"(a), "r"(b), "r"(c), "n"(table));
    return out;
}
#endif

// Picks four of the eight bytes of (hi:lo); nibble i of `selector` names byte i's source, lo's bytes are 0 to 3.
__device__ __forceinline__ unsigned prmt(unsigned lo, unsigned hi, unsigned selector) {
    return __byte_perm(lo, hi, selector);
}
