// What a compiled kernel asks of the SIMT machine. The machine itself (runtime.cpp) is a library of its own: it is
// never instrumented, and it is compiled once, while each kernel is compiled for itself.
//
// Every call that can wait carries the file and line it was written on, by a default argument. A barrier is known
// by that place and not by its address in the machine code, because a compiler may copy a call into both arms of
// a branch: on the GPU it is still one barrier, and here it must be too.
#pragma once
#include "simt/vector_types.h"

#if defined(__clang__)
// clang would otherwise merge equal calls of two branches into one, or copy one call into two.
#define SIMT_ONE_PLACE __attribute__((convergent, nomerge, noduplicate))
#else
#define SIMT_ONE_PLACE
#endif

namespace simt {

enum WarpOp {  // what the lanes of a warp do together
    kSyncWarp, kShuffle, kBallot, kAny, kAll, kMatchAny, kAdd, kMin, kMax, kMinSigned, kMaxSigned, kAnd, kOr, kXor,
    kTogether
};
enum BlockReduce { kBarrierOnly, kCount, kBlockAnd, kBlockOr };
enum AtomicOp { kAtomicAdd, kAtomicMin, kAtomicMax, kAtomicExch, kAtomicAnd, kAtomicOr, kAtomicXor, kAtomicCas };
enum AtomicType { kI32, kU32, kU64, kF32, kF64, kHalf2, kBf162, kHalf, kBf16 };
enum Order { kRelaxed = 0, kAcquire = 1, kRelease = 2 };

// One kernel's arguments, as the kernel declares them: Python checks a launch against this.
struct Arg {
    unsigned size;
    unsigned kind;  // 'p' pointer, 'c' pointer to const, 'i' signed, 'u' unsigned, 'f' floating, 'b' bool, 's' other
    unsigned element_size;  // of what a pointer points at
};
struct Entry {
    void (*call)(void** args);
    const Arg* args;
    unsigned count;
};

}  // namespace simt

extern "C" {
// `const`: a fiber never changes its ids, so the compiler may ask once and keep the answer.
uint3 simt_thread_idx() __attribute__((const));
uint3 simt_block_idx() __attribute__((const));
uint3 simt_block_dim() __attribute__((const));
uint3 simt_grid_dim() __attribute__((const));
unsigned simt_lane() __attribute__((const));

int simt_block_barrier(int reduce, int value, const char* file, unsigned line) SIMT_ONE_PLACE;
void simt_named_barrier(unsigned id, unsigned threads, int wait, const char* file, unsigned line) SIMT_ONE_PLACE;
unsigned long long simt_warp(int op, unsigned mask, unsigned long long value, unsigned source, const char* file,
                             unsigned line) SIMT_ONE_PLACE;
// All lanes of `mask` bring a pointer; the last one to come runs `work` on the 32 pointers (null where no lane is).
void simt_warp_together(unsigned mask, void* mine, void (*work)(void** lanes), const char* what, const char* file,
                        unsigned line) SIMT_ONE_PLACE;
unsigned simt_active_mask();

unsigned long long simt_atomic(int op, int type, void* address, unsigned long long value,
                               unsigned long long compare, int order);
unsigned long long simt_load(const void* address, unsigned bytes, int order);
void simt_store(void* address, unsigned long long value, unsigned bytes, int order);
void simt_fence();
void simt_pause();  // a place where a spinning thread lets others run
unsigned long long simt_clock();
void simt_trap(const char* what, const char* file, unsigned line);

void simt_copy_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes);
void simt_copy_async_commit();
void simt_copy_async_wait(unsigned groups_left);

void simt_mbarrier_init(void* barrier, unsigned count);
void simt_mbarrier_invalidate(void* barrier);
unsigned long long simt_mbarrier_arrive(void* barrier, unsigned count, unsigned expect_bytes, int arrive);
int simt_mbarrier_wait(void* barrier, unsigned parity, int may_give_up, const char* file, unsigned line);
void simt_bulk_copy(void* shared, const void* global, unsigned bytes, void* barrier);
}
