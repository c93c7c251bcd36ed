// The twin of include/async_copy.cuh.
#pragma once
#include "simt/machine.h"

inline __attribute__((always_inline)) void cp_async_16(void* shared, const void* global) {
    simt_copy_async(shared, global, 16, 16);
}
inline __attribute__((always_inline)) void cp_async_16_or_zero(void* shared, const void* global, unsigned bytes) {
    simt_copy_async(shared, global, 16, bytes);
}
inline __attribute__((always_inline)) void cp_async_4(void* shared, const void* global) {
    simt_copy_async(shared, global, 4, 4);
}
inline __attribute__((always_inline)) void cp_async_commit() { simt_copy_async_commit(); }
template <int groups_left> inline __attribute__((always_inline)) void cp_async_wait() {
    simt_copy_async_wait(groups_left);
}
