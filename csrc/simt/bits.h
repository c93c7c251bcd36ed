// The twin of include/bits.cuh.
#pragma once

template <int table> inline unsigned lop3(unsigned a, unsigned b, unsigned c) {
    unsigned out = 0;
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
