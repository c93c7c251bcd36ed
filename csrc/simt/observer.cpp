// The observer: every load and store of an observed kernel comes through here.
//
// It counts what the hardware would count (requests, sectors, shared-memory wavefronts), and it checks what the
// hardware does not: addresses outside the buffers, reads of what nobody wrote, two threads at one address with
// nothing that orders them.
//
// A request is what one warp does at one program point at one time. The machine runs the lanes one after another, so
// the accesses are gathered first: those of one warp with the same program point (the call-out's return address) and
// the same repetition, counted since the lanes were last known to be together, are one request.
//
// Races are found with vector clocks, as in FastTrack (Flanagan & Freund, 2009). Each piece of memory remembers its
// last writer and two readers. __syncthreads, __syncwarp, named barriers, mbarriers, and atomics together with fences
// order memory. Shuffles and votes do not: CUDA promises no memory ordering for them.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif

#include "simt/fiber.h"
#include "simt/state.h"

namespace simt {

enum Space : u32 { kGlobal = 0, kShared = 1 };

struct Request {
    u32 mask;
    u32 buffer;
    u64 address[32];
};

struct Picture {  // one request in full, for a figure
    uint3 block;
    u32 warp, repetition;
    Request request;
};

struct Site {  // one program point
    const void* pc;
    Space space;
    Access how;
    u32 bytes;
    u64 requests = 0, sectors = 0, lanes = 0, needed = 0, wavefronts = 0, least_wavefronts = 0;
    u32 buffers = 0;
    std::vector<Picture> pictures;
};

struct SiteRecord {
    u32 count[32] = {};
    std::vector<Request> requests;
    u32 flushed = 0;
};
struct WarpRecord {
    std::vector<SiteRecord> sites;
    std::vector<u32> active;
};
Warp::~Warp() { delete record; }

struct Epoch {
    u32 thread = 0;  // 1 + block * slots + thread; 0: nobody
    u32 clock = 0;
    u32 site = 0;  // the top bits say what kind of access it was
};
const u32 kIsAtomic = 1u << 31, kInFlight = 1u << 30, kSiteMask = kInFlight - 1;
struct Cell {
    Epoch write, read, other_read;
};

// The memory of what happened at each place. One cell stands for `1 << shift` bytes: 4 to begin with, fewer from the
// first smaller access on, so that neighbouring halves or bytes written by two threads are not taken for one.
struct Shadow {
    u32 shift = 2;
    size_t bytes = 0;
    std::vector<std::unique_ptr<Cell[]>> pages;
    static const size_t per_page = 512;
    void set(size_t n) {
        bytes = n;
        if (pages.size() != ((n >> shift) + per_page) / per_page + 1) pages.clear();
        pages.resize(((n >> shift) + per_page) / per_page + 1);
    }
    void clear() {
        for (auto& p : pages)
            if (p) std::fill(p.get(), p.get() + per_page, Cell());
    }
    Cell& at(size_t cell) {
        auto& p = pages[cell / per_page];
        if (!p) p.reset(new Cell[per_page]);
        return p[cell % per_page];
    }
    const Cell* peek(size_t cell) const {
        auto& p = pages[cell / per_page];
        return p ? &p[cell % per_page] : nullptr;
    }
    void refine(u32 finer) {
        Shadow next;
        next.shift = finer;
        next.set(bytes);
        for (size_t p = 0; p < pages.size(); ++p)
            if (pages[p])
                for (size_t i = 0; i < per_page; ++i)
                    for (size_t k = 0, first = (p * per_page + i) << (shift - finer); k < 1u << (shift - finer); ++k)
                        if ((first + k) >> 0 < next.pages.size() * per_page) next.at(first + k) = pages[p][i];
        shift = next.shift;
        pages.swap(next.pages);
    }
    void at_least(u64 offset, u32 n) {
        u32 need = n % 4 == 0 && offset % 4 == 0 ? 2 : n % 2 == 0 && offset % 2 == 0 ? 1 : 0;
        if (need < shift) refine(need);
    }
};

struct BlockRecord {
    Shadow shared;
    u32 engine[8] = {};  // clocks of the asynchronous copies, by mbarrier
};
Block::~Block() { delete record; }

struct Region {
    u8* base;
    u64 bytes;
    u32 flags;
    bool written = false, shadowed = false;
    Shadow shadow;
};

class TheObserver final : public Observer {
  public:
    Launch* launch;
    u32 slots;
    std::vector<Region> regions;
    u32 last_region = 0;
    u8* arena = nullptr;
    size_t arena_bytes = 0;
    std::vector<Site> sites;
    std::unordered_map<u64, u32> site_of;
    std::map<const void*, std::pair<Knowledge, bool>> sync;  // what atomics at an address have published
    std::vector<std::pair<uintptr_t, uintptr_t>> module;
    bool one_piece = false;  // inside a bulk copy, which makes no requests of lanes

    TheObserver(Launch* l, std::vector<void*>& moved) : launch(l) {
        slots = l->threads + 8;
        move_buffers(moved);
        find_module();
    }
    ~TheObserver() override {
        if (arena) munmap(arena, arena_bytes);
    }

    // The kernel works on copies, laid far apart in empty address space and aligned as a GPU aligns them. A wild
    // address then hits nothing, rather than some neighbour in the heap.
    void move_buffers(std::vector<void*>& moved) {
        const LaunchRequest& q = launch->request;
        const size_t gap = size_t(64) << 20, page = 64 * 1024;
        arena_bytes = gap;
        for (u32 i = 0; i < q.buffer_count; ++i) arena_bytes += (q.buffers[i].bytes + page) / page * page + page + gap;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
        flags |= MAP_NORESERVE;
#endif
        void* p = mmap(nullptr, arena_bytes, PROT_NONE, flags, -1, 0);
        arena = p == MAP_FAILED ? nullptr : static_cast<u8*>(p);
        u8* at = arena;
        if (arena) at = reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(arena) + gap) / page * page);
        for (u32 i = 0; i < q.buffer_count; ++i) {
            const Buffer& b = q.buffers[i];
            Region r;
            r.bytes = b.bytes;
            r.flags = b.flags;
            if (arena && !(b.flags & 4)) {
                size_t room = (b.bytes + 256 + page - 1) / page * page;
                mprotect(at, room, PROT_READ | PROT_WRITE);
                r.base = at + b.device_offset % 256;
                if (b.flags & 2) memset(r.base, 0xff, b.bytes);
                else if (b.bytes) memcpy(r.base, b.host, b.bytes);
                at += room + gap;
            } else
                r.base = static_cast<u8*>(b.host);
            moved.push_back(r.base);
            regions.push_back(std::move(r));
        }
    }

#if defined(__linux__)
    static int note_module(dl_phdr_info* info, size_t, void* data) {
        TheObserver* me = static_cast<TheObserver*>(data);
        uintptr_t code = reinterpret_cast<uintptr_t>(me->launch->request.entry->call);
        bool mine = false;
        std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& p = info->dlpi_phdr[i];
            if (p.p_type != PT_LOAD) continue;
            uintptr_t low = info->dlpi_addr + p.p_vaddr;
            ranges.push_back({low, low + p.p_memsz});
            if (code >= low && code < low + p.p_memsz) mine = true;
        }
        if (mine) me->module = ranges;
        return mine;
    }
    void find_module() { dl_iterate_phdr(note_module, this); }
    bool in_module(uintptr_t a) const {
        for (auto& r : module)
            if (a >= r.first && a < r.second) return true;
        return false;
    }
#else
    void find_module() {}
    bool in_module(uintptr_t a) const {
        Dl_info info;
        if (dladdr(reinterpret_cast<void*>(a), &info)) return true;
        // Fixed __shared__ arrays lie in one block with the anchor; where that block begins and ends is not known here.
        uintptr_t anchor = reinterpret_cast<uintptr_t>(worker->anchor);
        return a + (512 << 10) > anchor && a < anchor + (512 << 10);
    }
#endif

    // ---- findings ----
    std::string pc_json(const void* pc) { return "\"pc\":" + std::to_string(reinterpret_cast<uintptr_t>(pc)); }
    void find(Fiber* f, const char* kind, const char* what, const std::string& text, const void* pc,
              const std::string& more = "", const void* other_pc = nullptr) {
        launch->add_finding("{\"kind\":" + quoted(kind) + ",\"what\":" + quoted(what) + "," + thread_json(f) + "," +
                                pc_json(pc) + ",\"text\":" + quoted(text.c_str()) + more + "}",
                            std::string(kind) + what + std::to_string(uintptr_t(pc)) + "/" +
                                std::to_string(uintptr_t(other_pc)));
    }
    std::string at_json(int region, u64 offset, u32 bytes) {
        if (region < 0) {
            int v = variable(offset);
            if (v < 0) return ",\"buffer\":-1,\"offset\":" + std::to_string(offset);
            return ",\"buffer\":-1,\"shared\":" + std::to_string(v) +
                   ",\"offset\":" + std::to_string(offset - launch->request.shared[v].offset);
        }
        return ",\"buffer\":" + std::to_string(region) + ",\"offset\":" + std::to_string(offset) +
               ",\"bytes\":" + std::to_string(bytes);
    }

    int variable(u64 offset) const {
        const LaunchRequest& q = launch->request;
        for (u64 i = 0; i < q.shared_count; ++i)
            if (offset >= q.shared[i].offset && offset < q.shared[i].offset + q.shared[i].bytes) return int(i);
        return -1;
    }

    [[noreturn]] void wild(Fiber* f, uintptr_t a, u32 bytes, Access how, const void* pc) {
        int nearest = -1;
        u64 distance = ~0ull;
        bool past = false;
        for (size_t i = 0; i < regions.size(); ++i) {
            uintptr_t low = uintptr_t(regions[i].base), high = low + regions[i].bytes;
            u64 d = a < low ? low - a : a + bytes - high;
            if (d < distance) distance = d, nearest = int(i), past = a >= low;
        }
        char text[256];
        const char* verb = how == kStore ? "writes" : how == kAtomic ? "updates" : "reads";
        std::string more;
        if (nearest >= 0 && distance < (u64(32) << 20)) {
            snprintf(text, sizeof text, "%s %u bytes, %llu bytes %s {buffer} (%llu bytes)", verb, bytes,
                     (unsigned long long)(past ? a - uintptr_t(regions[nearest].base) - regions[nearest].bytes
                                               : uintptr_t(regions[nearest].base) - a),
                     past ? "past the end of" : "before the start of", (unsigned long long)regions[nearest].bytes);
            if (past && a < uintptr_t(regions[nearest].base) + regions[nearest].bytes)
                snprintf(text, sizeof text, "%s %u bytes across the end of {buffer} (%llu bytes)", verb, bytes,
                         (unsigned long long)regions[nearest].bytes);
            more = at_json(nearest, a - uintptr_t(regions[nearest].base), bytes);
        } else if (a < 4096)
            snprintf(text, sizeof text, "%s %u bytes through a null pointer", verb, bytes);
        else
            snprintf(text, sizeof text, "%s %u bytes at an address outside every buffer of this launch", verb, bytes);
        find(f, "memcheck", "outside the buffers", text, pc, more);
        worker->in_machine = 0;
        abandon();  // the access itself must not happen
    }

    // ---- sites and requests ----
    u32 site(const void* pc, Space space, Access how, u32 bytes) {
        u64 key = (reinterpret_cast<uintptr_t>(pc) << 3) | (space << 2) | how;
        auto it = site_of.find(key);
        if (it != site_of.end()) return it->second;
        u32 n = u32(sites.size());
        sites.emplace_back();
        sites.back().pc = pc;
        sites.back().space = space;
        sites.back().how = how;
        sites.back().bytes = bytes;
        site_of[key] = n;
        return n;
    }

    void gather(Fiber* f, u32 s, u64 address, u32 buffer) {
        Warp* w = f->warp;
        if (!w->record) w->record = new WarpRecord;
        if (w->record->sites.size() <= s) w->record->sites.resize(s + 8);
        SiteRecord& r = w->record->sites[s];
        if (r.requests.empty() && std::find(w->record->active.begin(), w->record->active.end(), s) ==
                                      w->record->active.end())
            w->record->active.push_back(s);
        u32 n = r.count[f->lane]++;
        if (n >= r.requests.size()) r.requests.push_back(Request{0, buffer, {}});
        r.requests[n].mask |= 1u << f->lane;
        r.requests[n].address[f->lane] = address;
    }

    void warp_converged(Warp* w) override {
        if (!w->record) return;
        for (u32 s : w->record->active) {
            SiteRecord& r = w->record->sites[s];
            for (size_t n = 0; n < r.requests.size(); ++n) count(w, s, r.requests[n], r.flushed++);
            r.requests.clear();
            memset(r.count, 0, sizeof r.count);
        }
        w->record->active.clear();
    }

    void count(Warp* w, u32 s, const Request& q, u32 repetition) {
        Site& site = sites[s];
        ++site.requests;
        site.lanes += __builtin_popcount(q.mask);
        if (q.buffer < 32) site.buffers |= 1u << q.buffer;
        if (site.space == kGlobal) {
            u64 sector[64];
            u32 bytes[64];
            u32 n = 0;
            for (u32 m = q.mask; m; m &= m - 1) {
                u64 a = q.address[__builtin_ctz(m)], end = a + site.bytes;
                for (u64 t = a / 32; t <= (end - 1) / 32; ++t) {
                    u32 low = t * 32 < a ? u32(a - t * 32) : 0, high = end < t * 32 + 32 ? u32(end - t * 32) : 32;
                    u32 touched = u32(((1ull << high) - 1) & ~((1ull << low) - 1));
                    u32 i = n;  // lanes mostly touch the sector of the lane before, so look from the back
                    while (i > 0 && sector[i - 1] != t) --i;
                    if (i == 0) {
                        sector[n] = t;
                        bytes[n++] = touched;
                    } else
                        bytes[i - 1] |= touched;
                }
            }
            site.sectors += n;
            for (u32 i = 0; i < n; ++i) site.needed += __builtin_popcount(bytes[i]);
        } else {
            // 32 banks of 4 bytes. A warp's 8-byte accesses go by halves, its 16-byte accesses by quarters.
            u32 group = site.bytes >= 16 ? 8 : site.bytes >= 8 ? 16 : 32, total = 0, least = 0;
            for (u32 g = 0; g < 32; g += group) {
                u64 words[128];
                u32 n = 0, in_bank[32] = {}, worst = 0;
                for (u32 l = g; l < g + group; ++l) {
                    if (!(q.mask >> l & 1)) continue;
                    for (u64 word = q.address[l] / 4; word <= (q.address[l] + site.bytes - 1) / 4; ++word) {
                        bool known = false;
                        for (u32 i = 0; i < n && !known; ++i) known = words[i] == word;
                        if (known || n == 128) continue;
                        words[n++] = word;
                        u32 c = ++in_bank[word % 32];
                        if (c > worst) worst = c;
                    }
                }
                total += worst;
                least += (n + 31) / 32;
            }
            site.wavefronts += total;
            site.least_wavefronts += least;
        }
        if (site.pictures.size() < launch->request.pictures) {
            Picture p{w->lanes[__builtin_ctz(w->exists)]->block->idx, w->index, repetition, q};
            for (u32 m = q.mask; m; m &= m - 1) {
                u64& a = p.request.address[__builtin_ctz(m)];
                a = site.space == kGlobal && q.buffer < regions.size() ? a - uintptr_t(regions[q.buffer].base) : a;
            }
            site.pictures.push_back(p);
        }
    }

    // ---- clocks ----
    u32 id(Fiber* f) const { return 1 + f->block->linear * slots + f->thread; }
    bool before(const Epoch& e, Fiber* f) const {
        if (!e.thread) return true;
        u32 first = 1 + f->block->linear * slots, t = e.thread - first;
        if (e.thread >= first && t < slots) {
            if (t == f->thread) return true;
            return f->own && (*f->own)[t] >= e.clock;
        }
        u32 block = (e.thread - 1) / slots;
        auto it = f->others.find(block);
        return it != f->others.end() && (*it->second)[(e.thread - 1) % slots] >= e.clock;
    }
    static Clock joined(const Clock& a, const Clock& b) {
        if (!a || a == b) return b;
        if (!b) return a;
        auto out = std::make_shared<std::vector<u32>>(*a);
        for (size_t i = 0; i < out->size(); ++i)
            if ((*b)[i] > (*out)[i]) (*out)[i] = (*b)[i];
        return out;
    }
    static void join(Knowledge& into, const Knowledge& from) {
        for (auto& k : from) {
            Clock& c = into[k.first];
            c = joined(c, k.second);
        }
    }
    // All that a thread knows, itself included.
    Knowledge all_of(Fiber* f) {
        auto mine = f->own ? std::make_shared<std::vector<u32>>(*f->own)
                           : std::make_shared<std::vector<u32>>(slots, 0u);
        (*mine)[f->thread] = f->now;
        Knowledge out = f->others;
        out[f->block->linear] = mine;
        return out;
    }
    void release(Fiber* f, Knowledge& into) override {
        join(into, all_of(f));
        ++f->now;
    }
    void acquire(Fiber* f, const Knowledge& from) override {
        for (auto& k : from) {
            if (k.first == f->block->linear) f->own = joined(f->own, k.second);
            else f->others[k.first] = joined(f->others[k.first], k.second);
        }
    }
    void order(Block*, Fiber* const* group, size_t n) {
        auto all = std::make_shared<std::vector<u32>>(slots, 0u);
        Knowledge others;
        const void* last = nullptr;
        for (size_t i = 0; i < n; ++i) {
            Fiber* f = group[i];
            if (f->own && f->own.get() != last) {
                last = f->own.get();
                for (u32 k = 0; k < slots; ++k)
                    if ((*f->own)[k] > (*all)[k]) (*all)[k] = (*f->own)[k];
            }
            if (!f->others.empty()) join(others, f->others);
        }
        for (size_t i = 0; i < n; ++i) (*all)[group[i]->thread] = group[i]->now++;
        for (size_t i = 0; i < n; ++i) {
            group[i]->own = all;
            if (!others.empty()) group[i]->others = others;
        }
    }
    void warp_ordered(Warp* w, u32 mask) override {
        Fiber* group[32];
        size_t n = 0;
        for (u32 m = mask; m; m &= m - 1) group[n++] = w->lanes[__builtin_ctz(m)];
        if (n) order(group[0]->block, group, n);
    }
    void block_ordered(Block* b, const std::vector<Fiber*>& group) override {
        if (group.empty()) return;
        order(b, group.data(), group.size());
        if (group.size() == b->alive)
            for (Warp& w : b->warps) warp_converged(&w);
    }
    // A fence makes what came before it visible to whoever sees a later atomic of this thread; and what an earlier
    // atomic has seen is ordered before what follows the fence (as C++ has it for atomic_thread_fence).
    void fence(Fiber* f) override {
        if (f->has_pending) {
            acquire(f, f->pending_acquire);
            f->pending_acquire.clear();
            f->has_pending = false;
        }
        f->at_fence = all_of(f);
        f->has_fence = true;
        ++f->now;
    }
    void atomic_order(Fiber* f, const void* address, bool reads, bool writes, int how) override {
        if (reads) {
            auto it = sync.find(address);
            if (it != sync.end()) {
                if (how & kAcquire) acquire(f, it->second.first);
                else {
                    join(f->pending_acquire, it->second.first);
                    f->has_pending = true;
                }
            }
        }
        if (writes) {
            if (how & kRelease) release(f, sync[address].first);
            else if (f->has_fence) join(sync[address].first, f->at_fence);
        }
    }

    // ---- races and initialisation ----
    void race(Fiber* f, const Epoch& other, const char* what, int region, u64 offset, u32 bytes, u32 s) {
        u32 block = (other.thread - 1) / slots, t = (other.thread - 1) % slots;
        const u32 *grid = launch->request.grid, *dim = launch->request.block;
        char text[300], who[96];
        if (t >= launch->threads) snprintf(who, sizeof who, "an asynchronous copy");
        else
            snprintf(who, sizeof who, "thread (%u,%u,%u) of block (%u,%u,%u)", t % dim[0], t / dim[0] % dim[1],
                     t / dim[0] / dim[1], block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]);
        snprintf(text, sizeof text, "%s: this thread and %s, and nothing orders the two", what, who);
        const void* other_pc = sites[other.site & kSiteMask].pc;
        find(f, "racecheck", what, text, sites[s].pc,
             at_json(region, offset, bytes) + ",\"other\":{" + pc_json(other_pc) + ",\"who\":" + quoted(who) + "}",
             other_pc);
    }

    void remember(Fiber* f, Shadow& shadow, int region, u64 offset, u32 bytes, Access how, bool relaxed, u32 s,
                  bool check_init) {
        shadow.at_least(offset, bytes);
        bool write = how == kStore || how == kAtomic, read = how != kStore;
        Epoch me;
        me.thread = id(f);
        me.clock = f->now;
        me.site = s | (relaxed ? kIsAtomic : 0);
        u64 first = offset >> shadow.shift, last = (offset + bytes - 1) >> shadow.shift;
        for (u64 i = first; i <= last; ++i) {
            Cell& c = shadow.at(i);
            if (read && check_init && !c.write.thread) {
                bool shared = region < 0;
                find(f, "initcheck", shared ? "shared memory never written" : "output never written",
                     shared ? "reads shared memory that no thread of the block has written"
                            : "reads an element of {buffer} that the kernel has not written (it is an output: "
                              "undefined before the launch)",
                     sites[s].pc, at_json(region, offset, bytes));
                (write ? c.write : c.read) = me;
                continue;
            }
            bool both_atomic = relaxed && (c.write.site & kIsAtomic);
            if (c.write.site & kInFlight) {
                find(f, "racecheck", "asynchronous copy still in flight",
                     "touches the destination of an asynchronous copy before the wait that covers it", sites[s].pc,
                     at_json(region, offset, bytes) + ",\"other\":{" +
                         pc_json(sites[c.write.site & kSiteMask].pc) + ",\"who\":\"the copy\"}");
                c.write.site &= ~kInFlight;
            } else if (c.write.thread && !both_atomic && !before(c.write, f))
                race(f, c.write, write ? "two writes" : "a read after a write", region, offset, bytes, s);
            if (write) {
                if (c.read.thread && !(relaxed && (c.read.site & kIsAtomic)) && !before(c.read, f))
                    race(f, c.read, "a write after a read", region, offset, bytes, s);
                else if (c.other_read.thread && !(relaxed && (c.other_read.site & kIsAtomic)) &&
                         !before(c.other_read, f))
                    race(f, c.other_read, "a write after a read", region, offset, bytes, s);
                c.write = me;
                c.read = c.other_read = Epoch();
            } else if (before(c.read, f)) {
                c.read = me;
                if (before(c.other_read, f)) c.other_read = Epoch();
            } else if ((c.read.thread - 1) % slots / 32 != f->thread / 32 || before(c.other_read, f) ||
                       (c.other_read.thread - 1) % slots / 32 == (c.read.thread - 1) % slots / 32)
                c.other_read = me;  // of two warps, if there are two: a later writer may know the one and not the other
        }
    }

    // ---- the access itself ----
    void access(Fiber* f, const void* address, u32 bytes, Access how, bool must_align, const void* pc,
                bool relaxed) override {
        const u8* a = static_cast<const u8*>(address);
        Worker* w = worker;
        if (a >= w->shared_low && a < w->shared_high) {
            u64 offset = u64(a - w->shared_low);
            if (w->dynamic_low && a >= w->dynamic_low && a < w->dynamic_high &&
                u64(a - w->dynamic_low) + bytes > launch->request.shared_bytes) {
                char text[200];
                snprintf(text, sizeof text, "%s %u bytes at %llu of the block's shared memory, but the launch asked "
                         "for %llu bytes", how == kStore ? "writes" : "reads", bytes,
                         (unsigned long long)(a - w->dynamic_low), (unsigned long long)launch->request.shared_bytes);
                find(f, "memcheck", "outside the shared memory", text, pc);
                w->in_machine = 0;
                abandon();
            }
            int v = variable(offset);
            if (v >= 0 && launch->request.shared[v].guard) return;
            if (launch->request.shared_count &&
                (v < 0 || offset + bytes > launch->request.shared[v].offset + launch->request.shared[v].bytes)) {
                find(f, "memcheck", "outside the shared arrays",
                     "touches shared memory that belongs to no __shared__ variable", pc, at_json(-1, offset, bytes));
                w->in_machine = 0;
                abandon();
            }
            if (must_align && offset % bytes) misaligned(f, offset, bytes, pc, -1, offset, how);
            u32 s = site(pc, kShared, how, bytes);
            gather(f, s, offset, v < 0 ? ~0u : u32(v));
            remember(f, f->block->record->shared, -1, offset, bytes, how, relaxed, s, true);
            return;
        }
        u32 i = last_region;
        if (i >= regions.size() || a < regions[i].base || a + bytes > regions[i].base + regions[i].bytes) {
            for (i = 0; i < regions.size(); ++i)
                if (a >= regions[i].base && a + bytes <= regions[i].base + regions[i].bytes) break;
            if (i == regions.size()) {
                if (in_module(uintptr_t(a))) return;  // a constant table of the kernel file
                if (a >= w->stacks && a < w->stacks + w->stack_bytes) {
                    find(f, "memcheck", "another thread's local variable",
                         "touches a local variable of another thread, which no other thread can reach on a GPU", pc);
                    return;
                }
                wild(f, uintptr_t(a), bytes, how, pc);
            }
            last_region = i;
        }
        Region& r = regions[i];
        u64 offset = u64(a - r.base);
        if (must_align && uintptr_t(a) % bytes) misaligned(f, uintptr_t(a), bytes, pc, int(i), offset, how);
        u32 s = site(pc, kGlobal, how, bytes);
        if (!one_piece) gather(f, s, uintptr_t(a), i);
        if (how == kStore || how == kAtomic) r.written = true;
        // A tensor that the kernel only reads (a pointer to const) cannot be raced for: no need to remember its readers.
        if (!(r.flags & 1) || r.written) {
            if (!r.shadowed) {
                r.shadow.set(r.bytes);
                r.shadowed = true;
            }
            remember(f, r.shadow, int(i), offset, bytes, how, relaxed, s, r.flags & 2);
        }
    }
    [[noreturn]] void misaligned(Fiber* f, u64 address, u32 bytes, const void* pc, int region, u64 offset, Access how) {
        char text[200];
        snprintf(text, sizeof text, "%s %u bytes at once from an address that is %llu past a multiple of %u",
                 how == kStore ? "writes" : "reads", bytes, (unsigned long long)(address % bytes), bytes);
        find(f, "memcheck", "misaligned access", text, pc, at_json(region, offset, bytes));
        worker->in_machine = 0;
        abandon();  // the GPU ends the launch here too
    }

    // ---- asynchronous copies ----
    void copy_starts(Fiber* f, const AsyncCopy& c) override {
        u32 read = c.bytes < c.source_bytes ? c.bytes : c.source_bytes;
        if (c.barrier) {  // one thread's request for the whole piece; checked at both ends
            one_piece = true;
            access(f, c.from, 16, kAsync, true, c.pc, false);
            access(f, c.from + read - 16, 16, kAsync, true, c.pc, false);
            one_piece = false;
            Site& bulk = sites[site(c.pc, kGlobal, kAsync, read)];
            bulk.bytes = read;
            ++bulk.requests;
            ++bulk.lanes;
            bulk.needed += read;
            bulk.sectors += (uintptr_t(c.from) + read + 31) / 32 - uintptr_t(c.from) / 32;
        } else if (read)  // one lane's part of the warp's request
            access(f, c.from, read, kAsync, read == c.bytes, c.pc, false);
        if (c.to < worker->shared_low || c.to + c.bytes > worker->shared_high) {
            find(f, "memcheck", "asynchronous copy not to shared memory",
                 "the destination of an asynchronous copy must be shared memory", c.pc);
            abandon();
        }
        if (worker->dynamic_low && c.to >= worker->dynamic_low && c.to < worker->dynamic_high &&
            u64(c.to + c.bytes - worker->dynamic_low) > launch->request.shared_bytes) {
            find(f, "memcheck", "outside the shared memory",
                 "an asynchronous copy runs past the shared memory that the launch asked for", c.pc);
            abandon();
        }
        u32 s = site(c.pc, kShared, kAsync, c.bytes);
        u64 offset = u64(c.to - worker->shared_low);
        Shadow& shadow = f->block->record->shared;
        remember(f, shadow, -1, offset, c.bytes, kStore, false, s, false);
        for (u64 i = offset >> shadow.shift; i <= (offset + c.bytes - 1) >> shadow.shift; ++i)
            shadow.at(i).write.site |= kInFlight;
    }
    void copy_lands(Block* b, Fiber* f, const AsyncCopy& c) override {
        Shadow& shadow = b->record->shared;
        u64 offset = u64(c.to - worker->shared_low);
        Epoch e;
        e.site = site(c.pc, kShared, kAsync, c.bytes);
        if (f) {  // a cp.async: from its wait on it is as if the thread itself had written
            e.thread = id(f);
            e.clock = f->now;
        } else {  // a bulk copy: whoever waits for its mbarrier learns of it, nobody else does
            u32 slot = u32(uintptr_t(c.barrier) / 8 % 8);
            e.thread = 1 + b->linear * slots + launch->threads + slot;
            e.clock = ++b->record->engine[slot];
            auto heard = std::make_shared<std::vector<u32>>(slots, 0u);
            (*heard)[launch->threads + slot] = e.clock;
            join(b->mbarriers[c.barrier].gathered, Knowledge{{b->linear, heard}});
        }
        for (u64 i = offset >> shadow.shift; i <= (offset + c.bytes - 1) >> shadow.shift; ++i) {
            Cell& cell = shadow.at(i);
            cell.write = e;
            cell.read = cell.other_read = Epoch();
        }
    }

    // ---- beginning and end ----
    void begin_block(Block* b) override {
        if (!b->record) {
            b->record = new BlockRecord;
            if (worker->shared_low) b->record->shared.set(size_t(worker->shared_high - worker->shared_low));
        } else
            b->record->shared.clear();
        for (Fiber* f : b->fibers) {
            f->now = 1;
            f->own.reset();
            f->others.clear();
            f->at_fence.clear();
            f->pending_acquire.clear();
            f->has_fence = f->has_pending = false;
        }
        for (Warp& w : b->warps) {
            delete w.record;
            w.record = nullptr;
        }
    }
    void end_block(Block* b) override {
        for (Warp& w : b->warps) warp_converged(&w);
    }
    void thread_done(Fiber*) override {}

    std::string report() override {
        const LaunchRequest& q = launch->request;
        for (size_t i = 0; i < regions.size(); ++i) {
            Region& r = regions[i];
            if (!(r.flags & 4) && (r.written || (r.flags & 2)) && arena) memcpy(q.buffers[i].host, r.base, r.bytes);
            if (!(r.flags & 2) || launch->stop) continue;
            u64 missing = 0, at = 0;
            for (u64 cell = 0; cell << r.shadow.shift < r.bytes; ++cell) {
                const Cell* c = r.shadowed ? r.shadow.peek(cell) : nullptr;
                if (!c || !c->write.thread) {
                    if (!missing) at = cell << r.shadow.shift;
                    missing += 1u << r.shadow.shift;
                }
            }
            if (missing) {
                if (missing > r.bytes) missing = r.bytes;
                char text[200];
                snprintf(text, sizeof text, "the kernel ends without having written %llu of the %llu bytes of {buffer}",
                         (unsigned long long)missing, (unsigned long long)r.bytes);
                launch->add_finding("{\"kind\":\"initcheck\",\"what\":\"output not written\",\"text\":" + quoted(text) +
                                        at_json(int(i), at, 1) + "}",
                                    "unwritten" + std::to_string(i));
            }
        }
        std::string out = "\"sites\":[";
        for (size_t i = 0; i < sites.size(); ++i) {
            Site& s = sites[i];
            char text[400];
            snprintf(text, sizeof text,
                     "%s{\"pc\":%llu,\"space\":%u,\"how\":%u,\"bytes\":%u,\"requests\":%llu,\"sectors\":%llu,"
                     "\"lanes\":%llu,\"needed\":%llu,\"wavefronts\":%llu,\"least_wavefronts\":%llu,\"buffers\":%u,",
                     i ? "," : "", (unsigned long long)uintptr_t(s.pc), s.space, s.how, s.bytes,
                     (unsigned long long)s.requests, (unsigned long long)s.sectors, (unsigned long long)s.lanes,
                     (unsigned long long)s.needed, (unsigned long long)s.wavefronts,
                     (unsigned long long)s.least_wavefronts, s.buffers);
            out += text;
            out += "\"pictures\":[";
            for (size_t k = 0; k < s.pictures.size(); ++k) {
                Picture& p = s.pictures[k];
                snprintf(text, sizeof text,
                         "%s{\"block\":[%u,%u,%u],\"warp\":%u,\"repetition\":%u,\"buffer\":%d,\"lanes\":{",
                         k ? "," : "", p.block.x, p.block.y, p.block.z, p.warp, p.repetition, int(p.request.buffer));
                out += text;
                bool first = true;
                for (u32 m = p.request.mask; m; m &= m - 1, first = false) {
                    u32 lane = __builtin_ctz(m);
                    out += (first ? "\"" : ",\"") + std::to_string(lane) + "\":" +
                           std::to_string(p.request.address[lane]);
                }
                out += "}}";
            }
            out += "]}";
        }
        return out + "]";
    }
};

Observer* make_observer(Launch* l, std::vector<void*>& moved) { return new TheObserver(l, moved); }

// ---- the call-outs ----
// The compiler puts one before every load and store when asked for -fsanitize=thread. Linked with the sanitizer's own
// library they would look for races between OS threads; linked with this one they tell the observer.
static inline __attribute__((always_inline)) void touched(const void* address, u32 bytes, Access how, bool must_align,
                                                          const void* pc, bool relaxed = false) {
    Worker* w = worker;
    if (!w || !w->current || !w->launch->observer) return;
    Fiber* f = w->current;
    const u8* a = static_cast<const u8*>(address);
    if (a >= f->stack_low && a < f->stack_high) return;  // its own local variables
    w->in_machine = 1;
    static_cast<TheObserver*>(w->launch->observer)->access(f, address, bytes, how, must_align, pc, relaxed);
    w->in_machine = 0;
    if (w->killed) {
        char text[160];
        snprintf(text, sizeof text, "a thread ran for %.0f seconds without reaching a barrier or its end: a loop "
                 "that never ends?", w->launch->request.time_limit);
        static_cast<TheObserver*>(w->launch->observer)->find(f, "deadlock", "endless loop", text, pc);
        abandon();
    }
}
static void touched_range(const void* address, u64 bytes, Access how, const void* pc) {
    const u8* a = static_cast<const u8*>(address);
    for (u64 done = 0; done < bytes; done += 16)
        touched(a + done, u32(bytes - done < 16 ? bytes - done : 16), how, false, pc);
}

}  // namespace simt

using namespace simt;
#define PC __builtin_return_address(0)
extern "C" {
#define SIMT_CALLOUT(n)                                                                                      \
    void __tsan_read##n(void* a) { touched(a, n, kLoad, true, PC); }                                         \
    void __tsan_write##n(void* a) { touched(a, n, kStore, true, PC); }                                       \
    void __tsan_unaligned_read##n(void* a) { touched(a, n, kLoad, false, PC); }                              \
    void __tsan_unaligned_write##n(void* a) { touched(a, n, kStore, false, PC); }                            \
    void __tsan_volatile_read##n(void* a) { touched(a, n, kLoad, true, PC, true); }                          \
    void __tsan_volatile_write##n(void* a) { touched(a, n, kStore, true, PC, true); }                        \
    void __tsan_unaligned_volatile_read##n(void* a) { touched(a, n, kLoad, false, PC, true); }               \
    void __tsan_unaligned_volatile_write##n(void* a) { touched(a, n, kStore, false, PC, true); }             \
    void __tsan_read_write##n(void* a) {                                                                     \
        touched(a, n, kLoad, true, PC);                                                                      \
        touched(a, n, kStore, true, PC);                                                                     \
    }                                                                                                        \
    void __tsan_unaligned_read_write##n(void* a) {                                                           \
        touched(a, n, kLoad, false, PC);                                                                     \
        touched(a, n, kStore, false, PC);                                                                    \
    }
SIMT_CALLOUT(1)
SIMT_CALLOUT(2)
SIMT_CALLOUT(4)
SIMT_CALLOUT(8)
SIMT_CALLOUT(16)
void __tsan_read_range(void* a, unsigned long n) { touched_range(a, n, kLoad, PC); }
void __tsan_write_range(void* a, unsigned long n) { touched_range(a, n, kStore, PC); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
    touched_range(from, n, kLoad, PC);
    touched_range(to, n, kStore, PC);
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
    touched_range(from, n, kLoad, PC);
    touched_range(to, n, kStore, PC);
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
    touched_range(to, n, kStore, PC);
    return memset(to, value, n);
}

// A kernel that uses the compiler's own __atomic built-ins: done as asked, and seen as atomic.
#define SIMT_TSAN_ATOMIC_OP(bits, T, name)                                                                   \
    T __tsan_atomic##bits##_fetch_##name(volatile T* a, T v, int) {                                          \
        touched((const void*)a, bits / 8, kAtomic, true, PC, true);                                          \
        return __atomic_fetch_##name(a, v, __ATOMIC_SEQ_CST);                                                \
    }
#define SIMT_TSAN_ATOMIC(bits, T)                                                                            \
    T __tsan_atomic##bits##_load(const volatile T* a, int) {                                                 \
        touched((const void*)a, bits / 8, kLoad, true, PC, true);                                            \
        return __atomic_load_n(a, __ATOMIC_SEQ_CST);                                                         \
    }                                                                                                        \
    void __tsan_atomic##bits##_store(volatile T* a, T v, int) {                                              \
        touched((const void*)a, bits / 8, kStore, true, PC, true);                                           \
        __atomic_store_n(a, v, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                        \
    T __tsan_atomic##bits##_exchange(volatile T* a, T v, int) {                                              \
        touched((const void*)a, bits / 8, kAtomic, true, PC, true);                                          \
        return __atomic_exchange_n(a, v, __ATOMIC_SEQ_CST);                                                  \
    }                                                                                                        \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T* a, T* c, T v, int, int) {                  \
        touched((const void*)a, bits / 8, kAtomic, true, PC, true);                                          \
        return __atomic_compare_exchange_n(a, c, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
    }                                                                                                        \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T* a, T* c, T v, int, int) {                    \
        touched((const void*)a, bits / 8, kAtomic, true, PC, true);                                          \
        return __atomic_compare_exchange_n(a, c, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
    }                                                                                                        \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T* a, T c, T v, int, int) {                        \
        touched((const void*)a, bits / 8, kAtomic, true, PC, true);                                          \
        __atomic_compare_exchange_n(a, &c, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
        return c;                                                                                            \
    }                                                                                                        \
    SIMT_TSAN_ATOMIC_OP(bits, T, add)                                                                        \
    SIMT_TSAN_ATOMIC_OP(bits, T, sub)                                                                        \
    SIMT_TSAN_ATOMIC_OP(bits, T, and)                                                                        \
    SIMT_TSAN_ATOMIC_OP(bits, T, or)                                                                         \
    SIMT_TSAN_ATOMIC_OP(bits, T, xor)                                                                        \
    SIMT_TSAN_ATOMIC_OP(bits, T, nand)
SIMT_TSAN_ATOMIC(8, uint8_t)
SIMT_TSAN_ATOMIC(16, uint16_t)
SIMT_TSAN_ATOMIC(32, uint32_t)
SIMT_TSAN_ATOMIC(64, uint64_t)
void __tsan_atomic_thread_fence(int) {
    if (worker && worker->current && worker->launch->observer) worker->launch->observer->fence(worker->current);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {}
}
