// Every inline PTX instruction of the project, each in a function, and what differs by compiler.
//
// On a CPU these are declarations: the emulator defines them (emulator/intrinsics_cpu.h). Fragment
// layouts are those of the PTX manual: g = lane / 4, t = lane % 4.
#pragma once
#define GPTMANAGER_INTRINSICS

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef GPTMANAGER_EMULATOR
#define PTX(...) ;
#else
#define PTX(...) { __VA_ARGS__ }
#endif

// What only sm_90 and later can do, and what need not be done before.
#if __CUDA_ARCH__ >= 900
#define SM_90(...) __VA_ARGS__
#else
#define SM_90(...)
#endif

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

namespace ptx {

// The block's dynamic shared memory, aligned for any copy.
__device__ inline unsigned char* dynamic_shared() PTX(
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
)

__device__ inline unsigned shared_address(const void* pointer) PTX(
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
)

// Launches that begin early ----------------------------------------------------------------------

// A kernel of a Program that is `dependent` may begin while the kernel before it in the stream still
// runs. Every thread calls this before it touches global memory. It returns when the kernel before
// has ended and all that it wrote can be seen (at once, where the launch did not begin early), and
// only then allows the kernel behind to begin. Why nothing more is needed, for A, B, C in a stream:
// - C begins when all blocks of B have come here or ended. Each thread of B that came here saw A end.
//   So when C begins, A has ended: no more than two kernels ever run side by side.
// - Where C passes this line, B has ended, and therefore all that B waited for: by induction every
//   kernel before C. So C may write what any of them read, and memory that was freed behind them.
// - A kernel without the attribute (of torch or cuBLAS, a copy) begins when C has ended, which is
//   then true of all before. Where such a kernel comes first, it allows nothing early: C begins when
//   its blocks have ended, and sees here what they wrote.
// - C has blocks on the device only when all blocks of B are there: B never waits for its room.
// Loads before this line would need another argument: what they read may lie in a cache since before
// it was written. `prefetch_l2` is none, as all that reads and writes global memory goes through L2.
__device__ inline void wait_for_previous() PTX(
    SM_90(asm volatile("griddepcontrol.wait;" ::: "memory");)
    SM_90(asm volatile("griddepcontrol.launch_dependents;" ::: "memory");)
)

// Brings the cache line of this address, inside of an array, to L2. Nothing waits for it.
__device__ inline void prefetch_l2(const void* address) PTX(
    asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
)

// Arithmetic --------------------------------------------------------------------------------------

// 2^x to about 2 ulp; 0 for -inf.
__device__ inline float exp2_approx(float x) PTX(
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
)

// Loads --------------------------------------------------------------------------------------------

// 16 bytes, aligned to them, that nothing writes while the kernel runs and no thread reads again:
// past L1. Where not `valid`, nothing is read and they are zeros.
__device__ inline uint4 load_once_16(const void* address, bool valid) PTX(
    uint4 to;
    asm volatile("{ .reg .pred valid;"
        " setp.ne.u32 valid, %5, 0;"
        " mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
        " @valid ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w) : "l"(address), "r"(int(valid)));
    return to;
)

// Atomics -----------------------------------------------------------------------------------------

// atomicInc that also releases what comes before it, by barriers of the block too, and acquires what
// earlier ones at this address have released: less to wait for than between two __threadfence().
__device__ inline unsigned atomic_inc_acq_rel(unsigned* address, unsigned last) PTX(
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
        : "=r"(before) : "l"(address), "r"(last) : "memory");
    return before;
)

// Copies from global to shared memory in the background -------------------------------------------

// 16 bytes, both addresses aligned to them; past L1, since each byte is read once. Where not `valid`,
// nothing is read and zeros are written.
__device__ inline void cp_async_16(void* to, const void* from, bool valid = true) PTX(
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::
        "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
)

__device__ inline void cp_async_commit() PTX(asm volatile("cp.async.commit_group;" ::: "memory");)

// Until all groups of this thread but the latest PENDING have arrived.
template <int PENDING> __device__ inline void cp_async_wait() PTX(
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
)

// Matrices of 8 x 8 16-bit elements in registers --------------------------------------------------

// Lane 8 i + r names row r of matrix i, 16 aligned bytes in shared memory. Register i of a lane then
// holds matrix i's row g, columns 2 t and 2 t + 1.
__device__ inline void load_matrix_x4(unsigned (&registers)[4], const void* row) PTX(
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
        : "r"(shared_address(row)) : "memory");
)

// The same of the transposed matrices: column g, rows 2 t and 2 t + 1.
__device__ inline void load_matrix_x4_transposed(unsigned (&registers)[4], const void* row) PTX(
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
        : "r"(shared_address(row)) : "memory");
)

// The matrix whose row g, columns 2 t and 2 t + 1 a lane holds, transposed: column g, those rows.
__device__ inline unsigned transpose_matrix(unsigned elements) PTX(
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(elements));
    return result;
)

// Tensor cores ------------------------------------------------------------------------------------

// d [16, 8] += a [16, 16] @ b [16, 8], all 32 lanes.
// a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with the column after it.
// b: (2t, g), (2t + 8, g), each with the row below. d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (.., + 1).
__device__ inline void mma_m16n8k16(
    float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) PTX(
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
)

__device__ inline void mma_m16n8k16(
    float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) PTX(
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
)

}  // namespace ptx

#undef PTX
#undef SM_90
