// cp.async: copies from global to shared memory that go on while the thread works.
//
// cp_async_16(...) ...; cp_async_commit();      a group of copies
// cp_async_wait<N>();                           all groups of *this thread* but the newest N have landed
// __syncthreads();                              and now those of the other threads too
//
// On the SIMT machine the data lands at the wait and not before: until then the destination holds NaN.
#pragma once

#ifdef NANOQWEN_SIMT
#include "simt/async_copy.h"
#else
__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 16 bytes, past the L1 cache. Both addresses must be multiples of 16.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// The first `bytes` of 16 are copied and the rest is zero: a tail that runs past the end of a row.
__device__ __forceinline__ void cp_async_16_or_zero(void* shared, const void* global, unsigned bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups_left>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups_left) : "memory");
}
#endif
