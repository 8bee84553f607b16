// The machine that runs a kernel on the CPU: what the headers seen by a kernel need to know of it.
//
// A GPU thread is a fiber. All fibers run in one OS thread; a fiber runs until it must wait, a warp
// until all its lanes wait for the block, and one block after the other. That is the most skewed
// schedule that CUDA allows, so that a missing barrier shows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr int WARP = 32;

struct Index {
    unsigned x, y, z;
};

// Where in the kernel's source something happens: a line, or an address that Python looks up.
struct Site {
    const char* file;
    int line;
    const void* address;
};

inline Site here(const char* file, int line) { return {file, line, nullptr}; }
inline Site here(const void* address) { return {nullptr, 0, address}; }

// As last parameters they take the file and line of the call; EMULATOR_SITE makes a Site of them.
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATOR_SITE ::emulator::here(file, line)
// The same for functions that intrinsics.cuh declares: they must not be inlined.
#define EMULATOR_RETURN ::emulator::here(__builtin_return_address(0))

// The running thread, and the launch it belongs to.
extern Index thread_index, block_index, block_size, grid_size;
unsigned lane();

// Ends the launch with an error; never returns. `@` followed by an address becomes a line.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// One primitive does all warp operations: each lane leaves a pointer to its operands and waits; the
// last one to arrive calls `evaluate(operands of 32 lanes, null where absent)`, and all go on.
using Evaluate = void (*)(void** operands, Site site);
void warp_operation(Evaluate evaluate, const char* name, unsigned mask, void* operands, Site site);
void sync_warp(unsigned mask, Site site);

enum Vote { COUNT, ALL, ANY };
int sync_block(Vote vote, int predicate, const char* name, Site site);

void fence();  // __threadfence
void* dynamic_shared();
bool in_shared(const char* address);

// Memory is read or written by an emulated instruction, which no compiler has instrumented.
void read_memory(void* to, const void* from, size_t size, Site site);
void check_read(const void* address, size_t size, Site site);
void check_write(void* address, size_t size, Site site);
void check_atomic(void* address, size_t size, Site site);

// What the kernel before may still write is not to be touched before this.
void wait_for_previous();
void prefetch(const void* address, Site site);

// cp.async: the destination is NaN until the thread waits for the group the copy belongs to. Until
// then nothing may write to it, nor to the source.
void copy_async(void* to, const void* from, size_t size, size_t source_size, Site site);
void copy_async_commit();
void copy_async_wait(int pending_groups);

// wgmma, as a lane gives it: d [64, columns] = a [64, 16] @ b [16, columns], plus d where it adds. `a` and
// `b` are descriptors; `registers`: of a, in place of one.
struct Product {
    int columns;
    bool adds, transposed;
    uint64_t a, b;
    float (*widen)(unsigned bits);
    float* d;
    const unsigned* registers;
};
void warpgroup_product(Product product, Site site);
void warpgroup_fence(float* d, size_t size, Site site);
void warpgroup_commit(Site site);
void warpgroup_wait(int pending_groups, const float* d, Site site);
void fence_proxy_async();
unsigned shared_address(const void* pointer);  // of dynamic shared memory

}  // namespace emulator
