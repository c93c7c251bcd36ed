// Atomics, fences, ordered loads and stores, and the places where a spinning thread lets others run.
#include <chrono>

#include "simt/fiber.h"
#include "simt/half.h"
#include "simt/state.h"

using namespace simt;

static inline void go_to_scheduler(Fiber* f) { simt_switch(&f->sp, worker->scheduler_sp); }

extern "C" {

void simt_pause() {
    Fiber* f = worker->current;
    f->place.pc = __builtin_return_address(0);
    f->place.file = nullptr;
    f->place.line = 0;
    f->state = kSpinning;
    go_to_scheduler(f);
}

void simt_fence() {
    if (Observer* o = observer()) o->fence(worker->current);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

unsigned long long simt_clock() {
    return (u64)std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch()).count();
}

void simt_trap(const char* what, const char* file, unsigned line) {
    Fiber* f = worker->current;
    f->place = here(file, line, __builtin_return_address(0));
    finding(f, "fault", "trap", what);
    abandon();
}

}  // extern "C"

// ---- atomics and ordered loads and stores ----
template <class T> static T combine(int op, T old, T value, T compare) {
    switch (op) {
        case kAtomicAdd: return old + value;
        case kAtomicMin: return value < old ? value : old;
        case kAtomicMax: return old < value ? value : old;
        case kAtomicAnd: return old & value;
        case kAtomicOr: return old | value;
        case kAtomicXor: return old ^ value;
        case kAtomicCas: return old == compare ? value : old;
        default: return value;
    }
}
template <class Word, class F> static u64 update(void* address, F f) {
    Word* p = static_cast<Word*>(address);
    Word old = __atomic_load_n(p, __ATOMIC_RELAXED), next;
    do next = f(old);
    while (!__atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return old;
}
static u32 add_halves(u32 a, u32 b, bool bf16) {
    u32 out = 0;
    for (int i = 0; i < 32; i += 16) {
        unsigned short x = a >> i, y = b >> i;
        out |= (bf16 ? u32(float_to_bf16(bf16_to_float(x) + bf16_to_float(y)))
                     : u32(float_to_half(half_to_float(x) + half_to_float(y)))) << i;
    }
    return out;
}

extern "C" {

unsigned long long simt_atomic(int op, int type, void* address, unsigned long long value,
                               unsigned long long compare, int order) {
    Fiber* f = worker->current;
    static const u8 bytes[] = {4, 4, 8, 4, 8, 4, 4, 2, 2};
    if (Observer* o = observer()) {
        o->access(f, address, bytes[type], kAtomic, true, __builtin_return_address(0), true);
        o->atomic_order(f, address, true, true, order);
    }
    switch (type) {
        case kI32:  // as unsigned, except where the sign decides
            if (op == kAtomicMin || op == kAtomicMax)
                return update<u32>(address, [=](u32 old) { return (u32)combine<int>(op, (int)old, (int)value, 0); });
            return update<u32>(address, [=](u32 old) { return combine<u32>(op, old, (u32)value, (u32)compare); });
        case kU32: return update<u32>(address, [=](u32 old) { return combine<u32>(op, old, (u32)value, (u32)compare); });
        case kU64: return update<u64>(address, [=](u64 old) { return combine<u64>(op, old, value, compare); });
        case kF32:
            return update<u32>(address, [=](u32 old) {
                return op == kAtomicExch ? (u32)value : bits_of(float_of(old) + float_of((u32)value));
            });
        case kF64:
            return update<u64>(address, [=](u64 old) {
                double a, b;
                memcpy(&a, &old, 8);
                memcpy(&b, &value, 8);
                a += b;
                u64 out;
                memcpy(&out, &a, 8);
                return out;
            });
        case kHalf2: return update<u32>(address, [=](u32 old) { return add_halves(old, (u32)value, false); });
        case kBf162: return update<u32>(address, [=](u32 old) { return add_halves(old, (u32)value, true); });
        case kHalf:
            return update<uint16_t>(address, [=](uint16_t old) { return (uint16_t)add_halves(old, (u32)value & 0xffff, false); });
        default:
            return update<uint16_t>(address, [=](uint16_t old) { return (uint16_t)add_halves(old, (u32)value & 0xffff, true); });
    }
}

unsigned long long simt_load(const void* address, unsigned bytes, int order) {
    Fiber* f = worker->current;
    if (Observer* o = observer()) o->access(f, address, bytes, kLoad, true, __builtin_return_address(0), true);
    u64 value = bytes == 8 ? __atomic_load_n((const u64*)address, __ATOMIC_ACQUIRE)
                           : __atomic_load_n((const u32*)address, __ATOMIC_ACQUIRE);
    if (Observer* o = observer()) o->atomic_order(f, address, true, false, order);
    // Whoever reads this way may be waiting for another thread: let the others have a turn *after* the read, so that a
    // loop around it makes progress. A read that is not in a loop loses nothing by it.
    f->place = Place();
    f->place.pc = __builtin_return_address(0);
    f->state = kSpinning;
    go_to_scheduler(f);
    return value;
}

void simt_store(void* address, unsigned long long value, unsigned bytes, int order) {
    Fiber* f = worker->current;
    if (Observer* o = observer()) {
        o->access(f, address, bytes, kStore, true, __builtin_return_address(0), true);
        o->atomic_order(f, address, false, true, order);
    }
    if (bytes == 8) __atomic_store_n((u64*)address, value, __ATOMIC_RELEASE);
    else __atomic_store_n((u32*)address, (u32)value, __ATOMIC_RELEASE);
}
}
