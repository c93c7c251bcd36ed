// A kernel that crashes, or never ends, must not take Python with it.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__linux__)
#include <ucontext.h>
#endif

#include "simt/state.h"

namespace simt {

// ---- faults: a kernel that crashes must not take Python with it ----
static std::mutex fault_lock;
static int fault_users = 0;
static struct sigaction fault_before[5];
static const int fault_signals[5] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGURG};

// Where the signal found the thread: the line of a crash.
static const void* interrupted_at(void* context) {
#if defined(__linux__)
    ucontext_t* c = static_cast<ucontext_t*>(context);
#if defined(__x86_64__)
    uintptr_t pc = uintptr_t(c->uc_mcontext.gregs[REG_RIP]);
#else
    uintptr_t pc = uintptr_t(c->uc_mcontext.pc);
#endif
    return reinterpret_cast<const void*>(pc + 1);  // like a return address: just past the instruction's start
#else
    (void)context;
    return nullptr;
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

FaultGuard::FaultGuard() {
    std::lock_guard<std::mutex> hold(fault_lock);
    if (fault_users++) return;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    // NODEFER: the handler leaves by switching stacks, so the signal must not stay blocked.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 5; ++i) sigaction(fault_signals[i], &action, &fault_before[i]);
}
FaultGuard::~FaultGuard() {
    std::lock_guard<std::mutex> hold(fault_lock);
    if (--fault_users) return;
    for (int i = 0; i < 5; ++i) sigaction(fault_signals[i], &fault_before[i], nullptr);
}

SignalStack::SignalStack() {
    const size_t bytes = 64 * 1024;
    memory = malloc(bytes);
    stack_t* old = new stack_t;
    stack_t mine;
    memset(&mine, 0, sizeof mine);
    mine.ss_sp = memory;
    mine.ss_size = bytes;
    sigaltstack(&mine, old);
    before = old;
}
SignalStack::~SignalStack() {
    stack_t* old = static_cast<stack_t*>(before);
    sigaltstack(old, nullptr);
    delete old;
    free(memory);
}

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

void watch(Worker* w) { watchdog->add(w); }
void stop_watching(Worker* w) { watchdog->remove(w); }

}  // namespace simt
