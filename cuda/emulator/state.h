// Declarations shared by the parts of the machine: threads, the launch, and the functions of each part.
#pragma once

#include "machine.h"

#include <vector>

namespace emulator {

constexpr int MAX_WARPS = 1024 / WARP;  // warps of a block

enum class State { READY, IN_WARP, IN_BLOCK, RETURNED };

struct AsyncCopy {
    void* to;
    const void* from;
    size_t size, source_size;
    int group;
    Site site;
    unsigned char value[16];  // the source when the copy was issued
};

struct Thread {
    Index index;
    unsigned linear, warp, lane;
    State state;
    // The operation in which it waits.
    const char* operation;
    Site site;
    Evaluate evaluate;
    unsigned mask;
    void* operands;
    int predicate;
    bool has_waited;  // for the previous kernel
    // Copies that have not arrived, oldest first.
    std::vector<AsyncCopy> copies;
    int group;
    // Its fiber.
    void* context[5];  // for __builtin_setjmp, which is much faster than that of the C library
    bool started;

    bool joins(const Thread& other) const {  // waits in the same warp operation
        return evaluate == other.evaluate && mask == other.mask && site.line == other.site.line &&
               site.address == other.site.address;
    }
};

struct Region {  // the memory of an argument, [begin, end)
    char *begin, *end;
    int argument;
};

// Memory that all loaded libraries use, one launch at a time. Each guard page is a mapping of its own, and
// a process has at most vm.max_map_count of them: too few for stacks of each library.
struct Arena {  // library.py has the same structure
    char* stacks;  // each above an unreadable page
    size_t num_stacks;
    char* dynamic;     // between two unreadable pages
    const void* user;  // the library that has its fibers on the stacks
};

struct Launch {  // filled by Python; library.py has the same structure
    void (*body)(void** arguments);
    void** arguments;
    Arena* arena;
    Index grid, block;
    size_t dynamic_shared;
    Region* regions;
    int num_regions;
    int order;  // 0: forward; -1: reverse; other values: the seed of a shuffle
    int checking;
    int dependent;  // it may begin before the previous kernel has ended
    int closed;     // `regions` has all memory that the kernel may access
    char* report;
    size_t report_size;
    double block_timeout_s;  // seconds of the processor; 0: no limit
};

extern const Launch* launch;
extern Thread* current;  // null while the machine itself runs
extern std::vector<Thread> threads;
extern bool checking;

unsigned block_number();
void abandon() __attribute__((noreturn));  // ends the launch
void describe(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* text(Site site, char (&buffer)[256]);

// memory.cpp
constexpr size_t STACK = 256 << 10;
void map_memory(size_t num_threads, size_t dynamic);
char* stack_of(unsigned thread);
void poison();  // shared memory, before each block
void watch_block();  // a block begins
void catch_faults();
void release_faults();
void start_timer();  // for `block_timeout_s`
void stop_timer();
extern const char* volatile interrupted;  // why the kernel must end; null: it need not
inline void stop_if_interrupted(Site site) {
    if (interrupted) fail(site, "%s", interrupted);
}
void touch(const void* address, size_t size, Site site);  // reads it; a fault is reported at `site`
[[noreturn]] void fail_outside(char* address, Site site);
bool in_stacks(const char* address);
bool in_library(const char* address);
struct Span {
    char *begin, *end;
};
Span static_shared();
Span dynamic_span();
char* shared_window();  // the memory of shared address 0
Span library();

// check.cpp
void check_launch();
void check_launch_end();
void check_block();
void check_barrier();
void check_sync_warp(unsigned first_thread, unsigned mask);
void check_fence();
void check_in_flight(void* address, size_t size, Site site);
void check_arrival(void* address, size_t size, Site site);
void check_proxy_fence();
void check_proxy(char* address, size_t size, Site site);

// warpgroup.cpp
void warpgroup_block();
void warpgroup_block_end();
void check_registers(const char* address, size_t size, bool is_write, Site site);

}  // namespace emulator
