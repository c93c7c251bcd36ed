// The twin of include/sync.cuh. A load that may be part of a waiting loop lets the other threads have a turn.
#pragma once
#include "simt/machine.h"

inline __attribute__((always_inline)) unsigned ld_acquire(const unsigned* p) {
    return (unsigned)simt_load(p, 4, simt::kAcquire);
}
inline __attribute__((always_inline)) unsigned ld_relaxed(const unsigned* p) {
    return (unsigned)simt_load(p, 4, simt::kRelaxed);
}
inline __attribute__((always_inline)) void st_release(unsigned* p, unsigned v) {
    simt_store(p, v, 4, simt::kRelease);
}
inline __attribute__((always_inline)) void red_add_release(unsigned* p, unsigned v) {
    simt_atomic(simt::kAtomicAdd, simt::kU32, p, v, 0, simt::kRelease);
}
inline __attribute__((always_inline)) unsigned atomic_add_acq_rel(unsigned* p, unsigned v) {
    return (unsigned)simt_atomic(simt::kAtomicAdd, simt::kU32, p, v, 0, simt::kAcquire | simt::kRelease);
}
inline __attribute__((always_inline)) void named_barrier_sync(unsigned id, unsigned threads,
                                                              const char* file = __builtin_FILE(),
                                                              unsigned line = __builtin_LINE()) {
    simt_named_barrier(id, threads, 1, file, line);
}
inline __attribute__((always_inline)) void named_barrier_arrive(unsigned id, unsigned threads,
                                                                const char* file = __builtin_FILE(),
                                                                unsigned line = __builtin_LINE()) {
    simt_named_barrier(id, threads, 0, file, line);
}
// One kernel runs at a time here, so the one before has always ended.
inline void launch_dependents() {}
inline void wait_for_predecessor() {}
