// Stacks, shared memory and its poisoning; handlers of invalid accesses, interrupts and endless loops.
#include "state.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstring>
#include <ctime>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace emulator {

constexpr size_t PAGE = 4096, DYNAMIC = 256 << 10, ALIGNMENT = 1024;
// An unreadable page, the stack, and room to move it: at the same place in a page, the tops of 32 stacks
// would displace each other from the processor's cache.
constexpr size_t STACK_SPAN = PAGE + STACK + PAGE;
constexpr unsigned char POISON = 0xFF;  // NaN as a float, -1 as an int

static size_t dynamic_size;
static Span loaded, shared;
// Thread-local memory is allocated at its first use. The linker places this array after the variables of
// the kernel, so that a read shortly past the end of one of them finds poison.
static thread_local volatile char touched[4096];

static char* map(size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) fail(here(nullptr), "no memory for %zu bytes", size);
    return static_cast<char*>(memory);
}

// Finds the span of this library, and that of its thread_local memory, which holds the kernel's __shared__
// variables.
static int find_library(dl_phdr_info* info, size_t, void*) {
    Span span{(char*)UINTPTR_MAX, nullptr}, local{};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& part = info->dlpi_phdr[i];
        char* begin = (char*)info->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD) {
            span.begin = std::min(span.begin, begin);
            span.end = std::max(span.end, begin + part.p_memsz);
        } else if (part.p_type == PT_TLS) {
            local = {(char*)info->dlpi_tls_data, (char*)info->dlpi_tls_data + part.p_memsz};
        }
    }
    char* inside = (char*)&loaded;
    if (inside < span.begin || inside >= span.end) return 0;
    loaded = {(char*)info->dlpi_addr, span.end};
    shared = local;
    return 1;
}

static void map_stacks(Arena& arena, size_t count) {
    if (arena.stacks) munmap(arena.stacks, arena.num_stacks * STACK_SPAN);
    arena.num_stacks = 0;
    arena.stacks = map(count * STACK_SPAN);
    arena.num_stacks = count;
    for (size_t i = 0; i < count; i++) mprotect(arena.stacks + i * STACK_SPAN, PAGE, PROT_NONE);
    arena.user = nullptr;
}

void map_memory(size_t num_threads, size_t size) {
    touched[0] = 1;
    dl_iterate_phdr(find_library, nullptr);
    Arena& arena = *launch->arena;
    if (!arena.dynamic) {
        arena.dynamic = map(DYNAMIC + 2 * PAGE) + PAGE;
        mprotect(arena.dynamic - PAGE, PAGE, PROT_NONE);
        mprotect(arena.dynamic + DYNAMIC, PAGE, PROT_NONE);
    }
    dynamic_size = size;
    if (num_threads > arena.num_stacks) map_stacks(arena, num_threads);
    if (arena.user == &loaded) return;
    arena.user = &loaded;
    for (Thread& thread : threads) thread.started = false;
}

char* stack_of(unsigned thread) {
    return launch->arena->stacks + thread * STACK_SPAN + PAGE + thread % WARP * (PAGE / WARP);
}

Span library() { return loaded; }
Span static_shared() { return shared; }

char* shared_window() { return launch->arena->dynamic; }

// Dynamic shared memory ends at an unreadable page, as closely as the alignment of its contents allows.
Span dynamic_span() {
    size_t alignment = 16;
    while (alignment < ALIGNMENT && dynamic_size % (2 * alignment) == 0) alignment *= 2;
    char* begin = shared_window() + DYNAMIC - (dynamic_size + alignment - 1) / alignment * alignment;
    return {begin, begin + dynamic_size};
}

void* dynamic_shared() { return dynamic_span().begin; }
unsigned shared_address(const void* pointer) { return unsigned((char*)pointer - shared_window()); }

static bool inside(Span span, const char* address) {
    return address >= span.begin && address < span.end;
}

bool in_shared(const char* address) {
    return inside(shared, address) || inside(dynamic_span(), address);
}

bool in_stacks(const char* address) {
    const Arena& arena = *launch->arena;
    return inside({arena.stacks, arena.stacks + arena.num_stacks * STACK_SPAN}, address);
}

bool in_library(const char* address) { return inside(loaded, address); }

void poison() {
    memset(shared.begin, POISON, shared.end - shared.begin);
    Span span = dynamic_span();
    memset(span.begin, POISON, span.end - span.begin);
}

// Faults ------------------------------------------------------------------------------------------

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM, SIGINT, SIGALRM};
constexpr int NUM_SIGNALS = sizeof SIGNALS / sizeof *SIGNALS;
static struct sigaction before[NUM_SIGNALS];
const char* volatile interrupted;
static pthread_t launching;
static stack_t stack_before;
static char signal_stack[64 << 10];
static const Site* touching;  // location of the instruction that is accessing memory

static char* interrupted_address(void* context) {
    auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return (char*)machine.gregs[REG_RIP];
#else
    return (char*)machine.pc;
#endif
}

static Site site_of(void* context) {
    if (touching) return *touching;
    char* address = interrupted_address(context);
    // A fault in another library is reported at the thread's last emulated operation.
    return in_library(address) ? here(address + 1) : current->site;
}

void fail_outside(char* address, Site site) {
    const Region* nearest = nullptr;
    size_t distance = 1 << 20;
    auto gap = [&](const Region& region) {
        return address < region.begin ? region.begin - address : address - region.end + 1;
    };
    for (int i = 0; i < launch->num_regions; i++) {
        const Region& region = launch->regions[i];
        if (size_t(gap(region)) < distance) nearest = &region, distance = gap(region);
    }
    Span span = dynamic_span();
    if (in_stacks(address)) fail(site, "stack overflow: more than %zu KiB", STACK >> 10);
    if (address < (char*)(64 << 10)) fail(site, "access through a null pointer (%p)", address);
    char* dynamic = shared_window();
    if (address >= dynamic - PAGE && address < dynamic + DYNAMIC + PAGE)
        fail(site, "access to byte %td of dynamic shared memory, which has %zu bytes",
             address - span.begin, dynamic_size);
    if (!nearest) fail(site, "access to %p, which is far from the memory of any argument", address);
    fail(site, "access to byte %td of argument %d, which has %td bytes", address - nearest->begin,
         nearest->argument, nearest->end - nearest->begin);
}

static void on_fault(int signal, siginfo_t* info, void* context) {
    if (!current || !pthread_equal(launching, pthread_self())) {  // not in the kernel
        release_faults();  // the access runs again, now with the previous handler
        return;
    }
    Site site = site_of(context);
    touching = nullptr;
    if (signal == SIGFPE) fail(site, "integer division by zero");
    fail_outside((char*)info->si_addr, site);
}

static void interrupt(const char* reason, void* context) {
    interrupted = reason;
    char* address = interrupted_address(context);
    // Another library is not interrupted: it may hold a lock.
    if (current && in_library(address)) fail(here(address + 1), "%s", reason);
}

// Handles Ctrl-C and the time limit of a test. Python's own handlers run only after the kernel.
static void on_interrupt(int signal, siginfo_t* info, void* context) {
    if (!pthread_equal(launching, pthread_self())) {
        pthread_kill(launching, signal);
        return;
    }
    const struct sigaction& python = before[signal == SIGINT ? NUM_SIGNALS - 2 : NUM_SIGNALS - 1];
    if (python.sa_handler == SIG_IGN) return;
    if (python.sa_handler == SIG_DFL) {
        release_faults();
        raise(signal);
        return;
    }
    if (python.sa_flags & SA_SIGINFO) python.sa_sigaction(signal, info, context);
    else python.sa_handler(signal);
    interrupt("interrupted", context);
}

// Blocks that do not end ----------------------------------------------------------------------------

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

static timer_t timer;
static bool has_timer;
static volatile unsigned long blocks, blocks_before;  // begun, now and at the timer's last signal
static char overdue[80];

void watch_block() { blocks = blocks + 1; }

static bool set_timer(double seconds) {
    double whole = std::floor(seconds);
    timespec time{time_t(whole), long((seconds - whole) * 1e9)};
    itimerspec each{time, time};
    return !timer_settime(timer, 0, &each, nullptr);
}

// The timer counts only the time in which this thread runs, so a busy machine ends no kernel.
void start_timer() {
    double seconds = launch->block_timeout_s;
    if (!seconds) return;
    blocks = blocks_before = 0;
    snprintf(overdue, sizeof overdue, "a block has run for more than %g s (block_timeout_s)", seconds);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event.sigev_value.sival_ptr = &timer;
    event.sigev_notify_thread_id = pid_t(syscall(SYS_gettid));
    has_timer = !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
    if (!has_timer || !set_timer(seconds)) fail(here(nullptr), "no timer for block_timeout_s = %g", seconds);
}

// After this no signal arrives any more: this thread alone gets them, at the latest on return from here.
void stop_timer() {
    if (has_timer) timer_delete(timer);
    has_timer = false;
}

// If the same block runs as at the last signal, the kernel ends at its next emulated operation, which knows
// its line; or at the next signal, if there is no such operation in its loop.
static void on_timer(int, siginfo_t* info, void* context) {
    if (info->si_code != SI_TIMER || info->si_value.sival_ptr != &timer) return;
    if (interrupted) return interrupt(interrupted, context);
    if (blocks == blocks_before) {
        interrupted = overdue;
        set_timer(1e-2);
    }
    blocks_before = blocks;
}

void catch_faults() {
    launching = pthread_self();
    interrupted = nullptr;
    touching = nullptr;  // an interrupt may have ended the last launch within `touch`
    stack_t stack{signal_stack, 0, sizeof signal_stack};
    sigaltstack(&stack, &stack_before);
    for (int i = 0; i < NUM_SIGNALS; i++) {
        struct sigaction action {};
        action.sa_sigaction = i < 3 ? on_fault : i == 3 ? on_timer : on_interrupt;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGNALS[i], &action, &before[i]);
    }
}

void release_faults() {
    for (int i = 0; i < NUM_SIGNALS; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

void touch(const void* address, size_t size, Site site) {
    stop_if_interrupted(site);  // the interrupt arrived in another library, in a loop without barriers
    auto* bytes = static_cast<const volatile char*>(address);
    touching = &site;
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the fault handler reads `touching`: store it first
    (void)bytes[0];
    (void)bytes[size - 1];
    std::atomic_signal_fence(std::memory_order_seq_cst);
    touching = nullptr;
}

void read_memory(void* to, const void* from, size_t size, Site site) {
    check_read(from, size, site);
    memcpy(to, from, size);
}

void read_early(void* to, const void* from, size_t size, Site site) {
    bool has_waited = current->has_waited;
    current->has_waited = true;
    read_memory(to, from, size, site);
    current->has_waited = has_waited;
}

}  // namespace emulator
