// The scheduler: it runs the threads of a block by turns, and lets those go on whose barrier, shuffle or copy is
// complete. When nobody can go on, that is a deadlock, and it says who waits where.
//
// One worker is one OS thread. It takes a block, gives each of its threads a fiber, and runs each fiber until it
// waits. A launch of many blocks uses several workers; an observed launch uses one, so that its report is the same
// every time. A cooperative launch (all blocks resident, as a grid-wide barrier needs) also runs on one worker, which
// moves shared memory out and in when it goes from one block to another.
#define SIMT_FIBER_IMPLEMENTATION
#include <cmath>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#if defined(__linux__)
#include <link.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "simt/fiber.h"
#include "simt/half.h"
#include "simt/state.h"

namespace simt {

thread_local Worker* worker = nullptr;

static std::mutex findings_lock;
void Launch::add_finding(const std::string& json, const std::string& key) {
    std::lock_guard<std::mutex> hold(findings_lock);
    if (seen[key]++ == 0 && findings.size() < 64) findings.push_back(json);
}

// ---- words for the report ----
std::string quoted(const char* text) {
    std::string out = "\"";
    for (; *text; ++text) {
        if (*text == '"' || *text == '\\') out += '\\';
        if ((unsigned char)*text >= 32) out += *text;
    }
    return out + "\"";
}
static std::string triple(uint3 v) {
    char text[64];
    snprintf(text, sizeof text, "[%u,%u,%u]", v.x, v.y, v.z);
    return text;
}
std::string thread_json(const Fiber* f) {
    return "\"block\":" + triple(f->block->idx) + ",\"thread\":" + triple(f->idx) + ",\"lane\":" +
           std::to_string(f->lane) + ",\"warp\":" + std::to_string(f->warp->index);
}
std::string place_json(const Place& p) {
    std::string out = "\"pc\":" + std::to_string(reinterpret_cast<uintptr_t>(p.pc));
    if (p.file) out += ",\"file\":" + quoted(p.file) + ",\"line\":" + std::to_string(p.line);
    return out;
}

[[noreturn]] void abandon() {
    worker->launch->stop = 1;
    void* never_used;
    simt_switch(&never_used, worker->scheduler_sp);
    __builtin_unreachable();
}

static const char* op_name(u32 op) {
    static const char* names[] = {"__syncwarp", "a shuffle", "__ballot_sync", "__any_sync", "__all_sync",
                                  "__match_any_sync", "__reduce_add_sync", "__reduce_min_sync",
                                  "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
                                  "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
                                  "a warp-wide operation"};
    return names[op];
}

static void finding(Fiber* f, const char* kind, const char* what, const std::string& text, bool with_place = true,
                    const std::string& more = "") {
    std::string json = "{\"kind\":" + quoted(kind) + ",\"what\":" + quoted(what) + "," + thread_json(f);
    if (with_place) json += "," + place_json(f->place);
    json += ",\"text\":" + quoted(text.c_str()) + more + "}";
    worker->launch->add_finding(json, std::string(kind) + what + std::to_string(uintptr_t(f->place.pc)));
}

// ---- waiting ----
static inline void go_to_scheduler(Fiber* f) { simt_switch(&f->sp, worker->scheduler_sp); }

static Place here(const char* file, unsigned line, const void* pc) {
    Place p;
    p.file = file;
    p.line = line;
    p.pc = pc;
    return p;
}

static inline Observer* observer() { return worker->launch->observer; }

// ---- warp operations ----
static void complete_warp(Warp* w, u32 mask, u32 op, Fiber* last) {
    u64 result = 0;
    bool first = true;
    switch (op) {
        case kShuffle:
            for (u32 m = mask; m; m &= m - 1) {
                Fiber* f = w->lanes[__builtin_ctz(m)];
                // What a lane outside the mask holds is undefined: all ones, which is NaN as a float.
                f->result = mask >> (f->source & 31) & 1 ? w->lanes[f->source & 31]->value : ~0ull;
            }
            break;
        case kMatchAny:
            for (u32 m = mask; m; m &= m - 1) {
                Fiber* f = w->lanes[__builtin_ctz(m)];
                f->result = 0;
                for (u32 n = mask; n; n &= n - 1)
                    if (w->lanes[__builtin_ctz(n)]->value == f->value) f->result |= 1u << __builtin_ctz(n);
            }
            break;
        default:
            for (u32 m = mask; m; m &= m - 1, first = false) {
                u32 lane = __builtin_ctz(m);
                u64 v = w->lanes[lane]->value;
                u32 a = (u32)result, b = (u32)v;
                switch (op) {
                    case kBallot: result |= (u64)(v & 1) << lane; break;
                    case kAny: case kOr: result |= v; break;
                    case kAll: case kAnd: result = first ? v : result & v; break;
                    case kXor: result ^= v; break;
                    case kAdd: result = (u32)(a + b); break;
                    case kMin: result = first ? b : a < b ? a : b; break;
                    case kMax: result = first ? b : a > b ? a : b; break;
                    case kMinSigned: result = first ? b : (int)a < (int)b ? a : b; break;
                    case kMaxSigned: result = first ? b : (int)a > (int)b ? a : b; break;
                    default: break;
                }
            }
            for (u32 m = mask; m; m &= m - 1) w->lanes[__builtin_ctz(m)]->result = result;
    }
    (void)last;
    for (u32 m = mask; m; m &= m - 1) w->lanes[__builtin_ctz(m)]->state = kReady;
    w->waiting &= ~mask;
    if (Observer* o = observer()) {
        if (mask == w->alive) o->warp_converged(w);
        if (op == kSyncWarp || op == kTogether) o->warp_ordered(w, mask);
    }
}

// Lanes that have come to the same operation with the same mask.
static u32 come(Warp* w, u32 mask, u32 op) {
    u32 got = 0;
    for (u32 m = w->waiting & mask; m; m &= m - 1) {
        Fiber* f = w->lanes[__builtin_ctz(m)];
        if (f->mask == mask && f->op == op) got |= 1u << f->lane;
    }
    return got;
}

static bool arrive_at_warp(Fiber* f, u32 mask, u32 op) {
    Warp* w = f->warp;
    f->mask = mask;
    f->op = op;
    if (!(mask >> f->lane & 1)) {
        char text[160];
        snprintf(text, sizeof text, "lane %u calls %s with the mask 0x%08x, which does not name it", f->lane,
                 op_name(op), mask);
        finding(f, "synccheck", "own lane not in mask", text);
        abandon();
    }
    u32 needed = mask & w->alive;
    if (observer() && (mask & w->exists & ~w->alive)) {
        char text[200];
        snprintf(text, sizeof text, "%s with the mask 0x%08x names lanes that have already returned (0x%08x)",
                 op_name(op), mask, mask & w->exists & ~w->alive);
        finding(f, "synccheck", "mask names lanes that have returned", text);
    }
    w->waiting |= 1u << f->lane;
    if ((w->waiting & needed) == needed) {
        u32 got = needed;
        for (u32 m = needed; m; m &= m - 1) {
            Fiber* other = w->lanes[__builtin_ctz(m)];
            if (other->mask != mask || other->op != op) got &= ~(1u << other->lane);
        }
        if (got == needed) return true;
    }
    f->state = kInWarp;
    return false;
}

// A lane that returns may be the one that a group was waiting for (the hardware goes on without it too).
static void recheck_warp(Warp* w);

static void complete_together(Warp* w, u32 mask, void (*work)(void**)) {
    void* all[32] = {};
    for (u32 m = mask; m; m &= m - 1) all[__builtin_ctz(m)] = w->lanes[__builtin_ctz(m)]->together;
    if (work) work(all);
}

static void recheck_warp(Warp* w) {
    for (u32 m = w->waiting; m; m &= m - 1) {
        Fiber* f = w->lanes[__builtin_ctz(m)];
        u32 needed = f->mask & w->alive;
        if (come(w, f->mask, f->op) == needed) {
            if (f->op == kTogether)
                complete_together(w, needed, reinterpret_cast<void (*)(void**)>(f->value));
            complete_warp(w, needed, f->op, f);
            return recheck_warp(w);
        }
    }
}

// ---- block barriers ----
static void complete_barrier(Block* b, u32 id) {
    std::vector<Fiber*> group;
    Place place;
    bool first = true, mixed = false;
    Fiber *one = nullptr, *other = nullptr;
    u64 count = 0, all = 1, any = 0;
    for (Fiber* f : b->fibers)
        if (f->state == kInBarrier && f->barrier_id == id) {
            group.push_back(f);
            if (first) place = f->place, one = f;
            else if (!f->place.same(place) && !mixed) mixed = true, other = f;
            first = false;
            if (f->value) ++count, any = 1;
            else all = 0;
        }
    for (Fiber* f : group) {
        f->state = kReady;
        f->result = f->op == kCount ? count : f->op == kBlockAnd ? all : any;
    }
    b->arrived[id] = b->expected[id] = 0;
    if (Observer* o = observer()) {
        if (id == 0 && mixed)
            finding(other, "synccheck", "one barrier reached from different places",
                    "threads of one block wait in __syncthreads() at different places, so the barrier does not mean "
                    "the same to all of them",
                    true, ",\"other\":{" + thread_json(one) + "," + place_json(one->place) + "}");
        if (id == 0 && !group.empty() && b->alive < b->fibers.size()) {
            Fiber* gone = nullptr;
            for (Fiber* f : b->fibers)
                if (f->state == kDone) { gone = f; break; }
            char text[200];
            snprintf(text, sizeof text,
                     "%zu of the block's %zu threads reach __syncthreads(); %zu have already returned, the first of "
                     "them thread (%u,%u,%u)",
                     group.size(), b->fibers.size(), b->fibers.size() - b->alive, gone->idx.x, gone->idx.y,
                     gone->idx.z);
            finding(group[0], "synccheck", "barrier not reached by all threads", text);
        }
        o->block_ordered(b, group);
    }
}

static void recheck_barrier(Block* b) {
    if (b->arrived[0] && b->arrived[0] >= b->alive) complete_barrier(b, 0);
}

// ---- mbarriers ----
static void check_phase(Block* b, Mbarrier& m) {
    while (m.pending <= 0 && m.bytes == 0 && m.count) {
        ++m.phase;
        m.pending += m.count;
        m.released = m.gathered;
        for (Fiber* f : b->fibers)
            if (f->state == kInMbarrier && &b->mbarriers[f->mbarrier] == &m && f->mbarrier_phase < m.phase) {
                f->state = kReady;
                f->gave_up = false;
            }
        if (m.pending <= 0) break;
    }
}

static void land(Fiber* f, const AsyncCopy& c) {
    if (Observer* o = observer()) o->copy_lands(worker->block, f, c);
    if (c.source_bytes) memcpy(c.to, c.from, c.source_bytes);
    if (c.source_bytes < c.bytes) memset(c.to + c.source_bytes, 0, c.bytes - c.source_bytes);
}

// Bulk copies land as late as the program allows: only when a thread waits for them and nobody else can go on.
static bool deliver_bulk(Block* b) {
    for (size_t i = 0; i < b->bulk.size(); ++i) {
        void* barrier = b->bulk[i].barrier;
        bool wanted = false;
        for (Fiber* f : b->fibers) wanted |= f->state == kInMbarrier && f->mbarrier == barrier;
        if (!wanted) continue;
        AsyncCopy c = b->bulk[i];
        b->bulk.erase(b->bulk.begin() + i);
        land(nullptr, c);
        Mbarrier& m = b->mbarriers[barrier];
        m.bytes -= c.bytes;
        check_phase(b, m);
        return true;
    }
    return false;
}

// ---- deadlock ----
static void report_deadlock(const std::vector<Block*>& blocks, bool spinning) {
    // Threads that wait for the same thing at the same place make one line of the report.
    struct Group { Fiber* first; u32 count; std::string threads; };
    std::vector<Group> groups;
    Fiber* any = nullptr;
    for (Block* b : blocks)
        for (Fiber* f : b->fibers) {
            if (f->state == kDone) continue;
            if (!any) any = f;
            bool found = false;
            for (Group& g : groups)
                if (g.first->state == f->state && g.first->place.same(f->place) && g.first->mask == f->mask &&
                    g.first->mbarrier == f->mbarrier && g.first->block == f->block) {
                    ++g.count;
                    found = true;
                    break;
                }
            if (!found && groups.size() < 16) groups.push_back(Group{f, 1, ""});
        }
    if (!any) return;
    std::string waits = ",\"waits\":[";
    bool first = true;
    for (Group& g : groups) {
        Fiber* f = g.first;
        char text[300];
        if (f->state == kInWarp) {
            u32 here_now = come(f->warp, f->mask, f->op), missing = f->mask & f->warp->alive & ~here_now;
            snprintf(text, sizeof text, "in %s with the mask 0x%08x; lanes 0x%08x never come", op_name(f->op),
                     f->mask, missing);
            if (!spinning)
                finding(f, "synccheck", "mask names lanes that never come",
                        std::string("waits ") + text + ": each lane that a mask names must call it");
        } else if (f->state == kInBarrier && f->barrier_id == 0)
            snprintf(text, sizeof text, "at __syncthreads(), which %u of %u threads have reached",
                     f->block->arrived[0], f->block->alive);
        else if (f->state == kInBarrier)
            snprintf(text, sizeof text, "at the named barrier %u, where %u of %u threads have arrived",
                     f->barrier_id, f->block->arrived[f->barrier_id], f->barrier_expected);
        else if (f->state == kInMbarrier) {
            Mbarrier& m = f->block->mbarriers[f->mbarrier];
            snprintf(text, sizeof text,
                     "for phase %llu of an mbarrier; it still lacks %ld arrivals and %ld bytes of copies",
                     (unsigned long long)m.phase, m.pending, m.bytes);
        } else
            snprintf(text, sizeof text, "in a loop, asking again and again for something that nobody provides");
        if (!first) waits += ",";
        first = false;
        waits += "{" + thread_json(f) + "," + place_json(f->place) + ",\"count\":" + std::to_string(g.count) +
                 ",\"text\":" + quoted(text) + "}";
    }
    finding(any, "deadlock", spinning ? "threads spin without end" : "no thread can go on",
            spinning ? "threads wait in loops for something that no running thread will do; a barrier across blocks "
                       "needs a cooperative launch"
                     : "every thread that has not returned waits for another",
            true, waits + "]");
}

// ---- running fibers ----
static void fiber_main() {
    Fiber* f = worker->current;
    Launch* l = worker->launch;
    l->request.entry->call(l->args.data());
    f->state = kDone;
    Warp* w = f->warp;
    Block* b = f->block;
    w->alive &= ~(1u << f->lane);
    --b->alive;
    if (l->observer) l->observer->thread_done(f);
    if (w->waiting) recheck_warp(w);
    recheck_barrier(b);
    if (l->observer && w->alive == 0) l->observer->warp_converged(w);
    go_to_scheduler(f);
    __builtin_unreachable();
}

static inline void resume(Worker* me, Fiber* f) {
    me->current = f;
    f->state = kReady;
    me->switches.store(me->switches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    simt_switch(&me->scheduler_sp, f->sp);
    me->current = nullptr;
}

static u32 draw(Worker* me) {
    me->random ^= me->random << 13;
    me->random ^= me->random >> 17;
    me->random ^= me->random << 5;
    return me->random;
}

enum Turn { kProgress, kOnlySpins, kStuck, kFinished };

// Gives every thread of the block one turn (a warp as many as it can use, while its lanes are in the cache).
static Turn turn(Worker* me, Block* b) {
    Launch* l = me->launch;
    bool ran = false, spun = false;
    size_t warps = b->warps.size(), start = me->random ? draw(me) % warps : 0;
    for (size_t k = 0; k < warps; ++k) {
        Warp& w = b->warps[(start + k) % warps];
        for (bool again = true; again;) {
            again = false;
            u32 first = me->random ? draw(me) & 31 : 0;
            for (u32 i = 0; i < 32; ++i) {
                Fiber* f = w.lanes[(first + i) & 31];
                if (!f) continue;
                if (f->state == kReady) {
                    resume(me, f);
                    ran = again = true;
                } else if (f->state == kSpinning) {
                    spun = true;
                    continue;
                } else
                    continue;
                if (l->stop.load(std::memory_order_relaxed)) return kFinished;
            }
        }
    }
    if (!b->alive) return kFinished;
    if (ran) return kProgress;
    if (spun) {  // only now: those that spin wait for the others to do something
        for (Warp& w : b->warps)
            for (Fiber* f : w.lanes)
                if (f && f->state == kSpinning) {
                    resume(me, f);
                    if (l->stop.load(std::memory_order_relaxed)) return kFinished;
                    if (f->state != kSpinning) ran = true;
                }
        if (!b->alive) return kFinished;
        return ran ? kProgress : kOnlySpins;
    }
    return kStuck;
}

// Nobody in the block can go on by itself: land a copy that is waited for, or let those give up that may.
static bool unstick(Block* b) {
    if (deliver_bulk(b)) return true;
    return false;
}
static bool give_up(Block* b) {
    bool any = false;
    for (Fiber* f : b->fibers)
        if (f->state == kInMbarrier && f->may_give_up) {
            f->gave_up = true;
            f->state = kReady;
            any = true;
        }
    return any;
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static const size_t kStackBytes = 128 * 1024, kGuardBytes = 16 * 1024;

static void reserve_stacks(Worker* me, size_t count) {
    if (me->stack_count >= count) return;
    if (me->stacks) munmap(me->stacks, me->stack_bytes);
    me->stack_bytes = count * kStackBytes;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void* p = mmap(nullptr, me->stack_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) {
        me->stacks = nullptr;
        me->stack_count = 0;
        return;
    }
    me->stacks = static_cast<u8*>(p);
    me->stack_count = count;
    // A stack that overflows must hit a wall, not its neighbour. Each wall splits a mapping in two, and the system
    // allows some 65,000 mappings: a very large cooperative launch does without.
    if (count <= 16384)
        for (size_t i = 0; i < count; ++i) mprotect(me->stacks + i * kStackBytes, kGuardBytes, PROT_NONE);
}

static void set_up_block(Worker* me, Block* b, u64 linear, size_t first_fiber) {
    Launch* l = me->launch;
    const u32 *grid = l->request.grid, *dim = l->request.block;
    b->linear = (u32)linear;
    b->idx = uint3{u32(linear % grid[0]), u32(linear / grid[0] % grid[1]), u32(linear / grid[0] / grid[1])};
    b->alive = l->threads;
    b->fibers.resize(l->threads);
    b->mbarriers.clear();
    b->bulk.clear();
    memset(b->arrived, 0, sizeof b->arrived);
    memset(b->expected, 0, sizeof b->expected);
    u32 warps = (l->threads + 31) / 32;
    if (b->warps.size() != warps) b->warps = std::vector<Warp>(warps);
    for (u32 i = 0; i < warps; ++i) {
        Warp& w = b->warps[i];
        w.index = i;
        u32 lanes = l->threads - 32 * i < 32 ? l->threads - 32 * i : 32;
        w.exists = w.alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
        w.waiting = 0;
    }
    for (Knowledge& k : b->passed) k.clear();
    for (u32 t = 0; t < l->threads; ++t) {
        size_t n = first_fiber + t;
        Fiber& f = me->fibers[n];
        f.state = kReady;
        f.thread = t;
        f.lane = t & 31;
        f.idx = uint3{t % dim[0], t / dim[0] % dim[1], t / dim[0] / dim[1]};
        f.block = b;
        f.warp = &b->warps[t / 32];
        f.warp->lanes[t & 31] = &f;
        b->fibers[t] = &f;
        f.place = Place();
        f.mask = f.op = 0;
        f.mbarrier = nullptr;
        f.uncommitted.clear();
        f.groups.clear();
        f.stack_low = me->stacks + n * kStackBytes;
        // Stacks that all start at the same distance would fight for the same lines of the cache.
        f.stack_high = f.stack_low + kStackBytes - (n % 61) * 64;
        f.sp = fresh_stack(f.stack_high, fiber_main);
    }
    if (l->observer) l->observer->begin_block(b);
}

// Shared memory starts as NaN (all ones), so that a kernel that forgets to write it is wrong every time.
static void poison_shared(Worker* me) {
    if (!me->shared_low) return;
    u8* dynamic = me->dynamic_low;
    if (!dynamic) {
        memset(me->shared_low, 0xff, me->shared_high - me->shared_low);
        return;
    }
    memset(me->shared_low, 0xff, dynamic - me->shared_low);
    memset(dynamic, 0xff, me->launch->request.shared_bytes);
    memset(me->dynamic_high, 0xff, me->shared_high - me->dynamic_high);
}

static void end_block(Worker* me, Block* b) {
    if (!me->launch->observer) return;
    if (!b->bulk.empty() && !me->launch->stop) {
        Fiber* f = b->fibers[b->bulk[0].thread];
        f->place = here(nullptr, 0, b->bulk[0].pc);
        finding(f, "synccheck", "copy still in flight at the block's end",
                "all threads have returned, but nobody has waited for this copy: it may land in the next block's "
                "shared memory");
    }
    me->launch->observer->end_block(b);
}

static void run_block(Worker* me, Block* b, u64 linear) {
    Launch* l = me->launch;
    me->block = b;
    set_up_block(me, b, linear, 0);
    poison_shared(me);
    u64 spins = 0;
    double spinning_since = 0;
    while (!l->stop.load(std::memory_order_relaxed)) {
        Turn t = turn(me, b);
        if (t == kFinished) break;
        if (t == kProgress) {
            spins = 0;
            continue;
        }
        if (unstick(b)) continue;
        if (t == kStuck && !give_up(b)) {
            report_deadlock({b}, false);
            l->stop = 1;
            break;
        }
        if (t == kOnlySpins) give_up(b);
        if (!spins++) spinning_since = now();
        // Another worker may be about to do what is waited for, so both the number and the time must be used up.
        if (spins > l->request.spin_limit && (l->request.workers < 2 || now() - spinning_since > 10)) {
            report_deadlock({b}, true);
            l->stop = 1;
        } else if (l->request.workers > 1 && spins % 64 == 0)
            std::this_thread::yield();
    }
    if (!l->stop.load(std::memory_order_relaxed)) end_block(me, b);
    else if (l->observer) l->observer->end_block(b);
}

static void swap_shared(Worker* me, Block* out, Block* in) {
    if (out == in || !me->shared_low) return;
    size_t fixed_low = me->dynamic_low ? me->dynamic_low - me->shared_low : me->shared_high - me->shared_low;
    size_t dynamic = me->dynamic_low ? me->launch->request.shared_bytes : 0;
    size_t fixed_high = me->dynamic_low ? me->shared_high - me->dynamic_high : 0;
    auto move = [&](std::vector<u8>& with, bool save) {
        with.resize(fixed_low + dynamic + fixed_high);
        u8* p = with.data();
        u8* pieces[3] = {me->shared_low, me->dynamic_low, me->dynamic_high};
        size_t sizes[3] = {fixed_low, dynamic, fixed_high};
        for (int i = 0; i < 3; p += sizes[i], ++i)
            if (sizes[i]) save ? memcpy(p, pieces[i], sizes[i]) : memcpy(pieces[i], p, sizes[i]);
    };
    if (out) move(out->shared_saved, true);
    if (in->shared_saved.empty()) poison_shared(me);
    else move(in->shared_saved, false);
}

static void run_cooperative(Worker* me) {
    Launch* l = me->launch;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Block*> left;
    for (u64 i = 0; i < l->blocks; ++i) {
        blocks.emplace_back(new Block);
        set_up_block(me, blocks.back().get(), i, i * l->threads);
        left.push_back(blocks.back().get());
    }
    Block* in = nullptr;
    u64 spins = 0;
    while (!left.empty() && !l->stop) {
        bool progress = false, spun = false;
        for (size_t i = 0; i < left.size() && !l->stop;) {
            Block* b = left[i];
            swap_shared(me, in, b);
            in = me->block = b;
            Turn t;
            do {
                t = turn(me, b);
                if (t == kProgress) progress = true;
            } while (!l->stop && (t == kProgress || (t != kFinished && unstick(b) && (progress = true))));
            if (t == kOnlySpins || (t == kStuck && give_up(b))) spun = true;
            if (t == kFinished && !l->stop) {
                progress = true;
                end_block(me, b);
                left.erase(left.begin() + i);
            } else
                ++i;
        }
        if (l->stop || left.empty()) break;
        spins = progress ? 0 : spins + 1;
        if (!progress && (!spun || spins > l->request.spin_limit)) {
            report_deadlock(left, spun);
            l->stop = 1;
        }
    }
    if (l->stop && l->observer)
        for (Block* b : left) l->observer->end_block(b);
}

// ---- faults: a kernel that crashes must not take Python with it ----
static std::mutex fault_lock;
static int fault_users = 0;
static struct sigaction fault_before[5];
static const int fault_signals[5] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGURG};

// Where the signal found the thread: the line of a crash.
static const void* interrupted_at(void* context) {
    ucontext_t* c = static_cast<ucontext_t*>(context);
    (void)c;
#if defined(__linux__) && defined(__x86_64__)
    uintptr_t pc = uintptr_t(c->uc_mcontext.gregs[REG_RIP]);
#elif defined(__linux__) && defined(__aarch64__)
    uintptr_t pc = uintptr_t(c->uc_mcontext.pc);
#else
    return nullptr;
#endif
#if defined(__linux__)
    return reinterpret_cast<const void*>(pc + 1);  // as a return address would be: just past the instruction's start
#endif
}

static void on_fault(int signal, siginfo_t* info, void* context) {
    Worker* me = worker;
    if (signal == SIGURG) {  // the watchdog's knock
        if (!me || !me->current || !me->killed || me->in_machine) return;
        // An observed thread sees the knock at its next access, which knows its line; only a loop without any must
        // be stopped from here.
        if (me->launch->observer && me->killed < 10) return;
        me->current->place = here(nullptr, 0, interrupted_at(context));
        char text[200];
        snprintf(text, sizeof text, "a thread ran for %.0f seconds without reaching a barrier or its end: a loop "
                 "that never ends?", me->launch->request.time_limit);
        finding(me->current, "deadlock", "endless loop", text, true);
        abandon();
    }
    if (me && me->current && !me->in_machine) {
        me->in_machine = 1;  // a fault in here is the machine's own, and must not come here again
        Fiber* f = me->current;
        f->place = here(nullptr, 0, interrupted_at(context));
        char text[200];
        uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
        if ((signal == SIGSEGV || signal == SIGBUS) && at >= uintptr_t(f->stack_low) &&
            at < uintptr_t(f->stack_low + kGuardBytes))
            snprintf(text, sizeof text, "a thread used more than %zu KiB of local memory",
                     (kStackBytes - kGuardBytes) / 1024);
        else if (signal == SIGFPE)
            snprintf(text, sizeof text, "integer division by zero");
        else if (signal == SIGILL)
            snprintf(text, sizeof text, "the kernel trapped");
        else
            snprintf(text, sizeof text, "a thread touched memory that is not there, or a vector that is not "
                     "aligned to its size; run it under simt.observe to see the line and the address");
        finding(f, "fault", strsignal(signal), text, true);
        me->in_machine = 0;
        abandon();
    }
    // Not ours: put back what was there and let it happen again.
    for (int i = 0; i < 5; ++i)
        if (fault_signals[i] == signal) sigaction(signal, &fault_before[i], nullptr);
}

struct FaultGuard {
    FaultGuard() {
        std::lock_guard<std::mutex> hold(fault_lock);
        if (fault_users++) return;
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = on_fault;
        // NODEFER: the handler leaves by switching stacks, so the signal must not stay blocked.
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 5; ++i) sigaction(fault_signals[i], &action, &fault_before[i]);
    }
    ~FaultGuard() {
        std::lock_guard<std::mutex> hold(fault_lock);
        if (--fault_users) return;
        for (int i = 0; i < 5; ++i) sigaction(fault_signals[i], &fault_before[i], nullptr);
    }
};

struct SignalStack {  // a stack overflow is reported from another stack
    static const size_t bytes = 64 * 1024;
    stack_t before;
    void* memory;
    SignalStack() {
        memory = malloc(bytes);
        stack_t mine;
        memset(&mine, 0, sizeof mine);
        mine.ss_sp = memory;
        mine.ss_size = bytes;
        sigaltstack(&mine, &before);
    }
    ~SignalStack() {
        sigaltstack(&before, nullptr);
        free(memory);
    }
};

// ---- the watchdog: one sleeping thread that looks once a while whether every worker still moves ----
struct Watchdog {
    std::mutex lock;
    std::condition_variable wake;
    std::vector<Worker*> workers;
    pid_t owner = 0;
    void run() {
        std::map<Worker*, std::pair<u64, double>> seen;
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            if (workers.empty()) {
                seen.clear();
                wake.wait(hold);
            } else
                wake.wait_for(hold, std::chrono::milliseconds(200));
            for (Worker* w : workers) {
                u64 s = w->switches.load(std::memory_order_relaxed);
                auto& entry = seen[w];
                if (entry.second == 0 || entry.first != s) entry = {s, now()};
                else if (now() - entry.second > w->launch->request.time_limit) {
                    ++w->killed;
                    pthread_kill((pthread_t)w->thread_handle, SIGURG);
                }
            }
        }
    }
    void add(Worker* w) {
        std::lock_guard<std::mutex> hold(lock);
        if (owner != getpid()) {  // the first launch, or the first after a fork (which copies no threads)
            owner = getpid();
            workers.clear();
            std::thread([this] { run(); }).detach();
        }
        workers.push_back(w);
        if (workers.size() == 1) wake.notify_one();
    }
    void remove(Worker* w) {
        std::lock_guard<std::mutex> hold(lock);
        for (size_t i = 0; i < workers.size(); ++i)
            if (workers[i] == w) {
                workers.erase(workers.begin() + i);
                return;
            }
    }
};
static Watchdog* watchdog = new Watchdog;  // never destroyed: its thread outlives everything

// ---- shared memory of this OS thread ----
#if defined(__linux__)
struct TlsSearch {
    uintptr_t code;
    u8* low;
    size_t bytes;
};
static int find_tls(dl_phdr_info* info, size_t, void* data) {
    TlsSearch* s = static_cast<TlsSearch*>(data);
    bool mine = false;
    size_t tls = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& p = info->dlpi_phdr[i];
        uintptr_t low = info->dlpi_addr + p.p_vaddr;
        if (p.p_type == PT_LOAD && s->code >= low && s->code < low + p.p_memsz) mine = true;
        if (p.p_type == PT_TLS) tls = p.p_memsz;
    }
    if (!mine) return 0;
    s->low = static_cast<u8*>(info->dlpi_tls_data);
    s->bytes = s->low ? tls : 0;
    return 1;
}
#endif

static void find_shared(Worker* me) {
    me->shared_low = me->shared_high = me->dynamic_low = me->dynamic_high = nullptr;
    auto touch = me->launch->request.touch_shared;
    if (!touch) return;
    // Where a thread's copy lies never changes, and asking the loader takes a lock: ask once.
    struct Known { u8 *low, *high, *dynamic; };
    static thread_local std::map<void*, Known> known;
    auto it = known.find(reinterpret_cast<void*>(touch));
    if (it == known.end()) {
        void* dynamic = nullptr;
        u8* inside = static_cast<u8*>(touch(&dynamic));
        Known k{nullptr, nullptr, static_cast<u8*>(dynamic)};
#if defined(__linux__)
        TlsSearch s{reinterpret_cast<uintptr_t>(touch), nullptr, 0};
        dl_iterate_phdr(find_tls, &s);
        k.low = s.low;
        k.high = s.low + s.bytes;
        if (!s.low) k.low = inside, k.high = inside;
#else
        // Elsewhere only the array sized at the launch is known by address; fixed __shared__ arrays are not poisoned,
        // and the observer counts an access to them as local. (Not tried: no such machine was at hand.)
        k.low = dynamic ? k.dynamic : inside;
        k.high = dynamic ? k.dynamic + 232448 : inside;
#endif
        it = known.emplace(reinterpret_cast<void*>(touch), k).first;
    }
    me->shared_low = it->second.low;
    me->shared_high = it->second.high;
    if (it->second.dynamic) {
        me->dynamic_low = it->second.dynamic;
        me->dynamic_high = me->dynamic_low + 232448;
    }
}

static std::mutex pool_lock;
static std::vector<Worker*> pool;  // idle workers keep their stacks

static Worker* take_worker() {
    std::lock_guard<std::mutex> hold(pool_lock);
    if (pool.empty()) return new Worker;
    Worker* w = pool.back();
    pool.pop_back();
    return w;
}
static void put_worker(Worker* w) {
    if (w->stack_bytes > (size_t(1) << 28)) {  // a large cooperative launch: give the memory back
        munmap(w->stacks, w->stack_bytes);
        w->stacks = nullptr;
        w->stack_count = w->stack_bytes = 0;
        std::vector<Fiber>().swap(w->fibers);
    }
    std::lock_guard<std::mutex> hold(pool_lock);
    pool.push_back(w);
}

static void work(Launch* l, bool first, void (*after_first)(Launch*, double)) {
    SignalStack signal_stack;
    Worker* me = take_worker();
    Worker* outer = worker;
    me->launch = l;
    me->killed = 0;
    me->in_machine = 0;
    me->current = nullptr;
    me->thread_handle = (u64)pthread_self();
    me->random = l->request.seed;
    worker = me;
#if defined(__x86_64__)
    unsigned control = _mm_getcsr();
    _mm_setcsr(0x1f80);  // subnormals count, as on the GPU, whatever the caller has set
#endif
    find_shared(me);
    size_t need = l->threads * (l->request.cooperative ? l->blocks : 1);
    reserve_stacks(me, need);
    if (!me->stacks) {
        l->add_finding("{\"kind\":\"fault\",\"what\":\"out of memory\",\"text\":\"no memory for the threads' stacks\"}", "stacks");
        l->stop = 1;
    } else {
        if (me->fibers.size() < need) me->fibers.resize(need);
        watchdog->add(me);
        if (l->request.cooperative) run_cooperative(me);
        else {
            Block b;
            double start = first && after_first ? now() : 0;
            for (u64 i; !l->stop && (i = l->next_block++) < l->blocks;) {
                run_block(me, &b, i);
                if (first && after_first) {
                    after_first(l, now() - start);
                    first = false;
                }
            }
        }
        watchdog->remove(me);
    }
#if defined(__x86_64__)
    _mm_setcsr(control);
#endif
    worker = outer;
    me->launch = nullptr;
    put_worker(me);
}

}  // namespace simt

using namespace simt;

// ---- what kernels call ----
extern "C" {

uint3 simt_thread_idx() { return worker->current->idx; }
uint3 simt_block_idx() { return worker->current->block->idx; }
uint3 simt_block_dim() {
    const u32* d = worker->launch->request.block;
    return uint3{d[0], d[1], d[2]};
}
uint3 simt_grid_dim() {
    const u32* d = worker->launch->request.grid;
    return uint3{d[0], d[1], d[2]};
}
unsigned simt_lane() { return worker->current->lane; }
unsigned simt_active_mask() { return worker->current->warp->alive; }

int simt_block_barrier(int reduce, int value, const char* file, unsigned line) {
    Fiber* f = worker->current;
    Block* b = f->block;
    f->place = here(file, line, __builtin_return_address(0));
    f->op = reduce;
    f->value = value != 0;
    f->barrier_id = 0;
    f->mask = 0;
    f->state = kInBarrier;
    ++b->arrived[0];
    recheck_barrier(b);
    if (f->state != kReady) go_to_scheduler(f);
    return (int)f->result;
}

void simt_named_barrier(unsigned id, unsigned threads, int wait, const char* file, unsigned line) {
    Fiber* f = worker->current;
    Block* b = f->block;
    f->place = here(file, line, __builtin_return_address(0));
    if (id > 15 || threads == 0 || threads % 32) {
        finding(f, "synccheck", "bad named barrier",
                "a named barrier takes an id of 0 to 15 and a number of threads that is a multiple of 32");
        abandon();
    }
    if (b->expected[id] && b->expected[id] != threads) {
        finding(f, "synccheck", "named barrier with two sizes",
                "threads name the same barrier but disagree on how many it is for");
        abandon();
    }
    b->expected[id] = threads;
    f->barrier_id = id;
    f->barrier_expected = threads;
    f->op = kBarrierOnly;
    f->value = 0;
    ++b->arrived[id];
    Observer* o = observer();
    if (!wait && o) o->release(f, b->passed[id]);
    if (wait) f->state = kInBarrier;
    if (b->arrived[id] >= threads) {
        std::vector<Fiber*> waiters;
        for (Fiber* g : b->fibers)
            if (g->state == kInBarrier && g->barrier_id == id) waiters.push_back(g);
        complete_barrier(b, id);
        if (o) {
            for (Fiber* g : waiters) o->acquire(g, b->passed[id]);
            b->passed[id].clear();
        }
    }
    if (wait && f->state != kReady) go_to_scheduler(f);
}

unsigned long long simt_warp(int op, unsigned mask, unsigned long long value, unsigned source, const char* file,
                             unsigned line) {
    Fiber* f = worker->current;
    f->place = here(file, line, __builtin_return_address(0));
    f->value = value;
    f->source = source;
    if (arrive_at_warp(f, mask, op)) complete_warp(f->warp, mask & f->warp->alive, op, f);
    else go_to_scheduler(f);
    return f->result;
}

void simt_warp_together(unsigned mask, void* mine, void (*work)(void**), const char* what, const char* file,
                        unsigned line) {
    (void)what;
    Fiber* f = worker->current;
    f->place = here(file, line, __builtin_return_address(0));
    f->together = mine;
    f->value = reinterpret_cast<u64>(work);
    if (arrive_at_warp(f, mask, kTogether)) {
        u32 lanes = mask & f->warp->alive;
        complete_together(f->warp, lanes, work);
        complete_warp(f->warp, lanes, kTogether, f);
    } else
        go_to_scheduler(f);
}

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

// ---- atomics and ordered loads and stores ----
}  // extern "C"

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

// ---- asynchronous copies ----
static bool bad_copy(Fiber* f, const char* what, const void* pc) {
    f->place = Place();
    f->place.pc = pc;
    finding(f, "memcheck", "bad asynchronous copy", what);
    abandon();
}

void simt_copy_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes) {
    Fiber* f = worker->current;
    const void* pc = __builtin_return_address(0);
    if ((reinterpret_cast<uintptr_t>(shared) % bytes) != 0)
        bad_copy(f, "the destination of a cp.async must be aligned to the size of the copy", pc);
    AsyncCopy c{static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, source_bytes, pc, nullptr, f->thread};
    if (Observer* o = observer()) o->copy_starts(f, c);
    memset(shared, 0xff, bytes);  // until the wait that covers it, what is there is not the data
    f->uncommitted.push_back(c);
}
void simt_copy_async_commit() {
    Fiber* f = worker->current;
    f->groups.emplace_back(std::move(f->uncommitted));
    f->uncommitted.clear();
}
void simt_copy_async_wait(unsigned groups_left) {
    Fiber* f = worker->current;
    size_t done = f->groups.size() > groups_left ? f->groups.size() - groups_left : 0;
    for (size_t i = 0; i < done; ++i)
        for (const AsyncCopy& c : f->groups[i]) land(f, c);
    f->groups.erase(f->groups.begin(), f->groups.begin() + done);
}

static Mbarrier& mbarrier_of(Fiber* f, void* barrier, const void* pc) {
    auto it = f->block->mbarriers.find(barrier);
    if (it == f->block->mbarriers.end()) {
        f->place = Place();
        f->place.pc = pc;
        finding(f, "synccheck", "mbarrier not initialised", "an mbarrier is used before mbarrier_init");
        abandon();
    }
    return it->second;
}
void simt_mbarrier_init(void* barrier, unsigned count) {
    Fiber* f = worker->current;
    const void* pc = __builtin_return_address(0);
    if (Observer* o = observer()) o->access(f, barrier, 8, kStore, true, pc, false);
    Mbarrier m;
    m.count = count;
    m.pending = count;
    f->block->mbarriers[barrier] = m;
}
void simt_mbarrier_invalidate(void* barrier) { worker->current->block->mbarriers.erase(barrier); }

unsigned long long simt_mbarrier_arrive(void* barrier, unsigned count, unsigned expect_bytes, int arrive) {
    Fiber* f = worker->current;
    const void* pc = __builtin_return_address(0);
    Mbarrier& m = mbarrier_of(f, barrier, pc);
    Observer* o = observer();
    if (o) o->access(f, barrier, 8, kLoad, true, pc, true);  // the init must be visible: checked like a read
    u64 phase = m.phase;
    m.bytes += expect_bytes;
    if (arrive) {
        if (o) o->release(f, m.gathered);
        m.pending -= count;
        if (m.pending < 0) {
            f->place = Place();
            f->place.pc = pc;
            finding(f, "synccheck", "too many arrivals", "more threads arrive at an mbarrier than it was initialised for");
            abandon();
        }
        check_phase(f->block, m);
    }
    return phase;
}

int simt_mbarrier_wait(void* barrier, unsigned parity, int may_give_up, const char* file, unsigned line) {
    Fiber* f = worker->current;
    const void* pc = __builtin_return_address(0);
    Mbarrier& m = mbarrier_of(f, barrier, pc);
    Observer* o = observer();
    if (o) o->access(f, barrier, 8, kLoad, true, pc, true);
    f->gave_up = false;
    if ((m.phase & 1) == (parity & 1)) {  // the phase of this parity is still going on
        f->place = here(file, line, pc);
        f->mbarrier = barrier;
        f->mbarrier_phase = m.phase;
        f->may_give_up = may_give_up;
        f->state = kInMbarrier;
        go_to_scheduler(f);
        f->mbarrier = nullptr;
        if (f->gave_up) return 0;
    }
    if (o) o->acquire(f, m.released);
    return 1;
}

void simt_bulk_copy(void* shared, const void* global, unsigned bytes, void* barrier) {
    Fiber* f = worker->current;
    const void* pc = __builtin_return_address(0);
    mbarrier_of(f, barrier, pc);
    if (reinterpret_cast<uintptr_t>(shared) % 16 || bytes % 16)
        bad_copy(f, "a bulk copy needs a destination and a size that are multiples of 16 bytes", pc);
    AsyncCopy c{static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, bytes, pc, barrier, f->thread};
    if (Observer* o = observer()) o->copy_starts(f, c);
    memset(shared, 0xff, bytes);
    f->block->bulk.push_back(c);
}

// ---- the launch ----
const char* simt_launch(const LaunchRequest* request) {
    Launch l;
    l.request = *request;
    l.threads = request->block[0] * request->block[1] * request->block[2];
    l.blocks = u64(request->grid[0]) * request->grid[1] * request->grid[2];
    std::vector<void*> moved;
    std::unique_ptr<Observer> o;
    if (request->observed) {
        o.reset(make_observer(&l, moved));
        l.observer = o.get();
    }
    u32 n = request->entry->count;
    l.args.resize(n + 1);
    l.arg_values.resize(n + 1);
    for (u32 i = 0; i < n; ++i) {
        int b = request->arg_buffer[i];
        if (b >= 0) {
            u8* base = static_cast<u8*>(request->observed ? moved[b] : request->buffers[b].host);
            l.arg_values[i] = base + request->arg_offset[i];
            l.args[i] = &l.arg_values[i];
        } else
            l.args[i] = request->args[i];
    }
    {
        FaultGuard guard;
        u32 workers = request->observed || request->cooperative ? 1 : request->workers;
        l.request.workers = workers;
        static thread_local std::vector<std::thread>* helpers;
        std::vector<std::thread> mine;
        helpers = &mine;
        // The first block is run alone and timed: a short launch is over before another thread would have started.
        void (*spread)(Launch*, double) = [](Launch* l, double first) {
            u64 left = l->blocks - 1;
            if (first * double(left) < 300e-6) return;
            u64 extra = l->request.workers - 1;
            if (extra > left) extra = left;
            for (u64 i = 0; i < extra; ++i) helpers->emplace_back([l] { work(l, false, nullptr); });
        };
        work(&l, true, workers < 2 ? nullptr : spread);
        for (std::thread& t : mine) t.join();
    }
    std::string report = o ? o->report() : "";
    if (l.findings.empty() && report.empty()) return nullptr;
    std::string json = "{\"stopped\":" + std::to_string(int(l.stop)) + ",\"findings\":[";
    for (size_t i = 0; i < l.findings.size(); ++i) json += (i ? "," : "") + l.findings[i];
    json += "]";
    if (!report.empty()) json += "," + report;
    json += "}";
    return strdup(json.c_str());
}

// Where the library that holds this address was loaded: what the symboliser needs.
void* simt_load_address(const void* address) {
    Dl_info info;
    return dladdr(address, &info) ? info.dli_fbase : nullptr;
}

void simt_free(const char* text) { free(const_cast<char*>(text)); }
}
