// All that a CUDA thread can wait for: the lanes of its warp, a block barrier, an mbarrier, an asynchronous copy. And what
// to say when the wait will never end.
#include <stdio.h>

#include "simt/fiber.h"
#include "simt/state.h"

namespace simt {

static inline void go_to_scheduler(Fiber* f) { simt_switch(&f->sp, worker->scheduler_sp); }

static const char* op_name(u32 op) {
    static const char* names[] = {"__syncwarp", "a shuffle", "__ballot_sync", "__any_sync", "__all_sync",
                                  "__match_any_sync", "__reduce_add_sync", "__reduce_min_sync",
                                  "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
                                  "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
                                  "a warp-wide operation"};
    return names[op];
}

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

static void complete_together(Warp* w, u32 mask, void (*work)(void**)) {
    void* all[32] = {};
    for (u32 m = mask; m; m &= m - 1) all[__builtin_ctz(m)] = w->lanes[__builtin_ctz(m)]->together;
    if (work) work(all);
}

// A lane that returns may be the one that a group was waiting for (the hardware goes on without it too).
void recheck_warp(Warp* w) {
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

void recheck_barrier(Block* b) {
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
bool deliver_bulk(Block* b) {
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
void report_deadlock(const std::vector<Block*>& blocks, bool spinning) {
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

}  // namespace simt

using namespace simt;

extern "C" {

// ---- what kernels call ----
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

}
