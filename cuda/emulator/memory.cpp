// Stacks, shared memory and its poisoning, and the handlers of invalid accesses and interrupts.
#include "state.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace emulator {

constexpr size_t PAGE = 4096, DYNAMIC = 256 << 10, ALIGNMENT = 1024;
// An unreadable page, the stack, and room to move it: at the same place in a page, the tops of 32 stacks
// would displace each other from the processor's cache.
constexpr size_t STACK_SPAN = PAGE + STACK + PAGE;
constexpr unsigned char POISON = 0xFF;  // as a float: NaN; as an int: -1

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

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGINT, SIGALRM};
constexpr int NUM_SIGNALS = sizeof SIGNALS / sizeof *SIGNALS;
static struct sigaction before[NUM_SIGNALS];
static pthread_t launching;
static volatile sig_atomic_t interrupted;
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

void stop_if_interrupted() {
    if (interrupted) fail(current->site, "interrupted");
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
    interrupted = 1;
    char* address = interrupted_address(context);
    // Another library is not interrupted: it may hold a lock.
    if (current && in_library(address)) fail(here(address + 1), "interrupted");
}

void catch_faults() {
    launching = pthread_self();
    interrupted = 0;
    touching = nullptr;  // an interrupt may have ended the last launch within `touch`
    stack_t stack{signal_stack, 0, sizeof signal_stack};
    sigaltstack(&stack, &stack_before);
    for (int i = 0; i < NUM_SIGNALS; i++) {
        struct sigaction action {};
        action.sa_sigaction = i < 3 ? on_fault : on_interrupt;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGNALS[i], &action, &before[i]);
    }
}

void release_faults() {
    for (int i = 0; i < NUM_SIGNALS; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

void touch(const void* address, size_t size, Site site) {
    stop_if_interrupted();  // the interrupt arrived in another library, in a loop without barriers
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
