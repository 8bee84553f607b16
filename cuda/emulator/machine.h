// The machine that runs a kernel on the CPU, as declared for the headers that a kernel includes.
//
// A GPU thread is a fiber; all fibers run in one OS thread. A fiber runs until it must wait, a warp until
// all its lanes wait for the block, and the blocks run one after the other. CUDA allows no schedule in
// which threads are further apart, so a missing barrier has an effect.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr int WARP = 32;

struct Index {
    unsigned x, y, z;
};

// A place in the kernel's source: a line, or an address that Python converts to a line.
struct Site {
    const char* file;
    int line;
    const void* address;
};

inline Site here(const char* file, int line) { return {file, line, nullptr}; }
inline Site here(const void* address) { return {nullptr, 0, address}; }

// The last parameters of a function: their defaults are file and line of the call. EMULATOR_SITE is the
// Site that they describe.
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATOR_SITE ::emulator::here(file, line)
// The Site of the call, for functions that intrinsics.cuh declares; they must not be inlined.
#define EMULATOR_RETURN ::emulator::here(__builtin_return_address(0))

// The indices of the running thread, and the sizes of its launch.
extern Index thread_index, block_index, block_size, grid_size;
unsigned lane();

// Ends the launch with an error; never returns. Python converts `@` and an address to a line.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The primitive of all warp operations: each lane passes a pointer to its operands and waits. The last one
// calls `evaluate` with the operands of 32 lanes (null for lanes that are not in the mask); then all
// lanes continue.
using Evaluate = void (*)(void** operands, Site site);
void warp_operation(Evaluate evaluate, const char* name, unsigned mask, void* operands, Site site);
void sync_warp(unsigned mask, Site site);

enum Vote { COUNT, ALL, ANY };
int sync_block(Vote vote, int predicate, const char* name, Site site);

void fence();  // __threadfence
void* dynamic_shared();
bool in_shared(const char* address);

// Accesses of emulated instructions, which the compiler does not instrument.
void read_memory(void* to, const void* from, size_t size, Site site);
void read_early(void* to, const void* from, size_t size, Site site);  // also before wait_for_previous
void check_read(const void* address, size_t size, Site site);
void check_write(void* address, size_t size, Site site);
void check_atomic(void* address, size_t size, Site site);

// After this call the kernel may access memory that the previous kernel writes.
void wait_for_previous();
void prefetch(const void* address, Site site);

// cp.async: the destination holds NaN until the thread waits for the group of the copy. Until then
// neither the destination nor the source may be written.
void copy_async(void* to, const void* from, size_t size, size_t source_size, Site site);
void copy_async_commit();
void copy_async_wait(int pending_groups);

// The operands that a lane passes to wgmma: d [64, columns] = a [64, 16] @ b [16, columns], plus d if
// `adds`. `a` and `b` are descriptors; `registers`, if not null, holds a in place of its descriptor.
struct Matmul {
    int columns;
    bool adds, transposed;
    uint64_t a, b;
    float (*widen)(unsigned bits);
    float* d;
    const unsigned* registers;
};
void warpgroup_matmul(Matmul matmul, Site site);
void warpgroup_fence(float* d, size_t size, Site site);
void warpgroup_commit(Site site);
void warpgroup_wait(int pending_groups, const float* d, Site site);
void fence_proxy_async();
unsigned shared_address(const void* pointer);  // the address of dynamic shared memory

}  // namespace emulator
