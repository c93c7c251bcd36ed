// mbarrier: a barrier in shared memory that counts arrivals *and* bytes, and bulk copies that report to it (sm_90).
//
// A phase ends when all arrivals have come and all bytes that were announced have landed; then the next begins.
// Waiting names a phase by its parity: the first phase has parity 0, the second 1, the third 0 again.
//
//     if (thread 0) { mbarrier_init(&full, 1); mbarrier_init_fence(); }   __syncthreads();
//     if (thread 0) { mbarrier_arrive_expect_bytes(&full, n); bulk_copy(tile, global, n, &full); }
//     mbarrier_wait(&full, 0);      every thread that reads the tile
#pragma once

typedef unsigned long long mbarrier_t;

#ifdef NANOQWEN_SIMT
#include "simt/mbarrier.h"
#else
__device__ __forceinline__ unsigned mbarrier_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void mbarrier_init(mbarrier_t* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(mbarrier_address(barrier)), "r"(arrivals) : "memory");
}
// Makes the initialised barrier visible to the copy engine; a __syncthreads must follow for the other threads.
__device__ __forceinline__ void mbarrier_init_fence() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(mbarrier_t* barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(mbarrier_address(barrier)) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(mbarrier_t* barrier, unsigned parity) {
    unsigned done;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(mbarrier_address(barrier)), "r"(parity)
        : "memory");
#else  // sm_80 has no waiting form by parity that sleeps; this one only asks
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(mbarrier_address(barrier)), "r"(parity)
        : "memory");
#endif
    return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(mbarrier_t* barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(mbarrier_t* barrier, unsigned bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(
                     mbarrier_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// One thread starts it. Both addresses and the size must be multiples of 16 bytes.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, unsigned bytes, mbarrier_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            mbarrier_address(shared)),
        "l"(global), "r"(bytes), "r"(mbarrier_address(barrier))
        : "memory");
}
// Between ordinary accesses to shared memory and a bulk copy into the same place.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else  // sm_80 has no bulk copies. The names are there for templates that use them on newer GPUs only.
__device__ void mbarrier_arrive_expect_bytes(mbarrier_t* barrier, unsigned bytes);
__device__ void bulk_copy(void* shared, const void* global, unsigned bytes, mbarrier_t* barrier);
#endif
#endif
