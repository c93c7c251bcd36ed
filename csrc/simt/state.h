// What the machine knows while a kernel runs: threads, warps, blocks, and the worker that runs them.
#pragma once
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "simt/machine.h"

namespace simt {

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

// ---- the interface to Python: plain structs, read by ctypes ----
struct Buffer {
    void* host;        // where the tensor lies
    u64 bytes;
    u64 device_offset;  // from the start of its storage: a GPU aligns that start to 256 bytes
    u32 flags;          // 1: only read (const in the kernel), 2: an output, undefined before the launch
    u32 pad;
};
struct SharedVariable {  // one __shared__ array, from the symbol table
    u64 offset, bytes;
    u64 guard;  // 1: not the kernel's: g++ makes a flag beside arrays of classes that "have been constructed"
};
struct LaunchRequest {
    const Entry* entry;
    void* (*touch_shared)(void** dynamic);  // makes this OS thread's copy exist; returns an address inside it
    u32 grid[3], block[3];
    u64 shared_bytes;
    void** args;
    const int* arg_buffer;  // for each argument the buffer it points into, or -1
    const u64* arg_offset;
    const Buffer* buffers;
    u32 buffer_count;
    u32 workers;
    u32 cooperative;
    u32 observed;
    u32 seed;         // 0: threads take turns in order; else in an order drawn from this
    u32 pictures;     // how many requests of each program point keep their lanes' addresses
    double time_limit;  // seconds that one thread may run without reaching a barrier or an end
    u64 spin_limit;
    const SharedVariable* shared;
    u64 shared_count;
};

enum State : u8 { kReady, kSpinning, kInWarp, kInBarrier, kInMbarrier, kDone };

struct Place {
    const char* file = nullptr;
    u32 line = 0;
    const void* pc = nullptr;
    bool same(const Place& o) const { return line == o.line && (file == o.file || !strcmp(file, o.file)); }
};

// A vector clock: clock[t] says how far thread t of a block had come when somebody last heard of it. A clock is never
// changed once made, so that all threads which leave a barrier together can share one.
typedef std::shared_ptr<const std::vector<u32>> Clock;
typedef std::map<u32, Clock> Knowledge;  // by block

struct AsyncCopy {
    u8* to;
    const u8* from;
    u32 bytes, source_bytes;
    const void* pc;
    void* barrier;  // of a bulk copy
    u32 thread;
};

struct Block;
struct Warp;
struct Fiber {
    void* sp = nullptr;
    State state = kReady;
    u8 lane = 0;
    u32 thread = 0;  // linear in its block
    uint3 idx{};
    Warp* warp = nullptr;
    Block* block = nullptr;
    u8 *stack_low = nullptr, *stack_high = nullptr;
    // what it waits for
    Place place;
    u32 mask = 0, op = 0, source = 0, barrier_id = 0, barrier_expected = 0;
    u64 value = 0, result = 0;
    const void* mbarrier = nullptr;
    u64 mbarrier_phase = 0;
    bool may_give_up = false, gave_up = false;
    void* together = nullptr;
    // asynchronous copies: those not yet committed, then one group per commit, oldest first
    std::vector<AsyncCopy> uncommitted;
    std::vector<std::vector<AsyncCopy>> groups;
    // observed builds only
    u32 now = 1;  // its own clock; it ticks whenever the thread tells others how far it is
    Clock own;    // what it knows of its own block; null: nothing yet
    Knowledge others;  // and of other blocks, through atomics: rare
    Knowledge at_fence, pending_acquire;
    bool has_fence = false, has_pending = false;
};

struct WarpRecord;  // the observer's
struct Warp {
    Fiber* lanes[32] = {};
    u32 index = 0, exists = 0, alive = 0;
    u32 waiting = 0;  // lanes that wait in a warp operation
    WarpRecord* record = nullptr;
    Warp() {}
    Warp(const Warp&) = delete;
    ~Warp();
};

struct Mbarrier {
    u32 count = 0;
    long pending = 0, bytes = 0;  // arrivals and bytes still missing in this phase
    u64 phase = 0;
    Knowledge gathered, released;
};

struct BlockRecord;  // the observer's
struct Block {
    uint3 idx{};
    u32 linear = 0;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    u32 alive = 0;
    u32 arrived[16] = {}, expected[16] = {};  // named barriers; 0 is __syncthreads
    Knowledge passed[16];  // what threads bring that only arrive at a named barrier
    std::map<const void*, Mbarrier> mbarriers;
    std::vector<AsyncCopy> bulk;
    std::vector<u8> shared_saved;  // its shared memory while another block is in (cooperative launches)
    BlockRecord* record = nullptr;
    Block() {}
    ~Block();
};

struct Observer;
struct Launch;
struct Worker {
    Launch* launch = nullptr;
    Fiber* current = nullptr;
    void* scheduler_sp = nullptr;
    Block* block = nullptr;
    // this OS thread's shared memory
    u8* anchor = nullptr;  // an address inside the thread-local block that it lies in
    u8 *shared_low = nullptr, *shared_high = nullptr, *dynamic_low = nullptr, *dynamic_high = nullptr;
    // stacks, kept from launch to launch
    u8* stacks = nullptr;
    size_t stack_count = 0, stack_bytes = 0;
    std::vector<Fiber> fibers;
    std::atomic<u64> switches{0};
    std::atomic<int> killed{0};
    u64 thread_handle = 0;
    int in_machine = 0;  // inside the observer: a signal must not jump out of it
    u32 random = 0;
};

struct Launch {
    LaunchRequest request;
    u32 threads = 0;
    u64 blocks = 0;
    std::atomic<u64> next_block{0};
    std::atomic<int> stop{0};
    Observer* observer = nullptr;
    std::vector<void*> args;
    std::vector<void*> arg_values;  // pointers after buffers were moved
    std::vector<std::string> findings;  // JSON objects
    std::map<std::string, u32> seen;  // one finding per kind and program point is enough
    void add_finding(const std::string& json, const std::string& key);
};

#if defined(__linux__)  // one load from the thread register, no call: this is read at every switch
extern thread_local Worker* worker __attribute__((tls_model("initial-exec")));
#else
extern thread_local Worker* worker;
#endif

// ---- shared by the files of the machine ----
std::string quoted(const char* text);
std::string triple(uint3 v);
std::string thread_json(const Fiber* f);
std::string place_json(const Place& p);
void finding(Fiber* f, const char* kind, const char* what, const std::string& text, bool with_place = true,
             const std::string& more = "");
// Ends the whole launch from inside a fiber; does not return.
[[noreturn]] void abandon();

inline Place here(const char* file, unsigned line, const void* pc) {
    Place p;
    p.file = file;
    p.line = line;
    p.pc = pc;
    return p;
}
double now();  // seconds

// waiting.cpp: a thread that returns may be the last one that others waited for
void recheck_warp(Warp* w);
void recheck_barrier(Block* b);
bool deliver_bulk(Block* b);
void report_deadlock(const std::vector<Block*>& blocks, bool spinning);

// faults.cpp
const size_t kStackBytes = 128 * 1024, kGuardBytes = 16 * 1024;
struct FaultGuard {  // while one exists, a crash in a kernel is a finding
    FaultGuard();
    ~FaultGuard();
};
struct SignalStack {  // a stack overflow is reported from another stack
    SignalStack();
    ~SignalStack();

  private:
    void *before, *memory;
};
void watch(Worker* w);
void stop_watching(Worker* w);

// ---- the observer (observer.cpp) ----
enum Access : u32 { kLoad = 0, kStore = 1, kAtomic = 2, kAsync = 3 };
struct Observer {
    virtual ~Observer() {}
    virtual void begin_block(Block*) = 0;
    virtual void end_block(Block*) = 0;
    virtual void access(Fiber*, const void* address, u32 bytes, Access how, bool must_align, const void* pc,
                        bool relaxed) = 0;
    virtual void warp_converged(Warp*) = 0;       // all lanes are at one place: requests before it are complete
    virtual void warp_ordered(Warp*, u32 mask) = 0;  // __syncwarp
    virtual void block_ordered(Block*, const std::vector<Fiber*>&) = 0;
    virtual void thread_done(Fiber*) = 0;
    virtual void release(Fiber*, Knowledge& into) = 0;
    virtual void acquire(Fiber*, const Knowledge& from) = 0;
    virtual void fence(Fiber*) = 0;
    virtual void atomic_order(Fiber*, const void* address, bool reads, bool writes, int order) = 0;
    virtual void copy_lands(Block*, Fiber*, const AsyncCopy&) = 0;
    virtual void copy_starts(Fiber*, const AsyncCopy&) = 0;
    virtual std::string report() = 0;
};
Observer* make_observer(Launch*, std::vector<void*>& moved);
inline Observer* observer() { return worker->launch->observer; }

}  // namespace simt
