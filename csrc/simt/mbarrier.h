// The twin of include/mbarrier.cuh. A bulk copy lands as late as the program allows: when a thread waits for its
// barrier and nobody else can go on. Until then its destination holds NaN.
#pragma once
#include "simt/machine.h"

#define SIMT_TWIN inline __attribute__((always_inline))
SIMT_TWIN void mbarrier_init(unsigned long long* barrier, unsigned arrivals) { simt_mbarrier_init(barrier, arrivals); }
SIMT_TWIN void mbarrier_init_fence() {}
SIMT_TWIN void mbarrier_arrive(unsigned long long* barrier) { simt_mbarrier_arrive(barrier, 1, 0, 1); }
SIMT_TWIN void mbarrier_arrive_expect_bytes(unsigned long long* barrier, unsigned bytes) {
    simt_mbarrier_arrive(barrier, 1, bytes, 1);
}
SIMT_TWIN bool mbarrier_try_wait(unsigned long long* barrier, unsigned parity,
                                 const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return simt_mbarrier_wait(barrier, parity, 1, file, line) != 0;
}
SIMT_TWIN void mbarrier_wait(unsigned long long* barrier, unsigned parity, const char* file = __builtin_FILE(),
                             unsigned line = __builtin_LINE()) {
    simt_mbarrier_wait(barrier, parity, 0, file, line);
}
SIMT_TWIN void bulk_copy(void* shared, const void* global, unsigned bytes, unsigned long long* barrier) {
    simt_bulk_copy(shared, global, bytes, barrier);
}
SIMT_TWIN void async_proxy_fence() {}
