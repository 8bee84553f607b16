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
// - C begins when all blocks of B have called this or ended. Each thread of B that did so saw A end.
//   So when C begins, A has ended: no more than two kernels ever run side by side.
// - Where C passes this line, B has ended, and therefore all that B waited for: by induction every
//   kernel before C. So C may write what any of them read, and memory that was freed behind them.
// - A kernel without the attribute (of torch or cuBLAS, a copy) begins when C has ended, which is
//   then true of all before. Where such a kernel comes first, it allows nothing early: C begins when
//   its blocks have ended, and sees here what they wrote.
// - C has blocks on the device only when all blocks of B are there: B never waits for its room.
// Loads before this line would need another argument: their data may be in a cache since before
// it was written. `prefetch_l2` is not one: all reads and writes of global memory pass through L2.
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
#ifdef COPIES_AT_ONCE  // to find whether asynchronous copies cause a fault
__device__ inline void cp_async_16(void* to, const void* from, bool valid = true) {
    *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
}
__device__ inline void cp_async_commit() {}
template <int PENDING> __device__ inline void cp_async_wait() {}
#else
__device__ inline void cp_async_16(void* to, const void* from, bool valid = true) PTX(
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::
        "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
)

__device__ inline void cp_async_commit() PTX(asm volatile("cp.async.commit_group;" ::: "memory");)

// Until all groups of this thread but the latest PENDING have arrived.
template <int PENDING> __device__ inline void cp_async_wait() PTX(
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
)
#endif

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

// Transposes a matrix: a lane holds row g, columns 2 t and 2 t + 1, and gets column g, those rows.
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

// Products of a warpgroup (Hopper) -----------------------------------------------------------------
//
// Four warps, the first a multiple of four, multiply together, in the background. What the tensor
// cores read of shared memory was written by ordinary stores or cp.async, then by the same thread
// `fence_proxy_async`, then a barrier. Registers of a matmul may not be touched from
// `warpgroup_fence` before it to `warpgroup_wait` behind it.

// Writes of this thread to shared memory before it are seen by what reads in the background.
__device__ inline void fence_proxy_async() PTX(
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
)

// A matrix of 16-bit elements in shared memory, in bytes: rows (K-major) or columns (MN-major) of 128
// bytes, 8 of which make a pattern of 1024 aligned bytes in which address bits 4-6 are xored with bits
// 7-9. `stride`: from 8 of them to the next 8. `leading`: MN-major, from 64 elements to the next 64.
__device__ inline unsigned long long matrix_descriptor(
    const void* start, unsigned leading, unsigned stride) {
    auto encoded = [](unsigned bytes) { return (unsigned long long)((bytes & 0x3FFFF) >> 4); };
    return encoded(shared_address(start)) | encoded(leading) << 16 | encoded(stride) << 32 | 1ull << 62;
}

#define PTX_ROW(KIND, D, I) KIND(D[I][0]), KIND(D[I][1]), KIND(D[I][2]), KIND(D[I][3])
#define PTX_2_ROWS(D, I) PTX_ROW("+f", D, I), PTX_ROW("+f", D, I + 1)
#define PTX_4_ROWS(D, I) PTX_2_ROWS(D, I), PTX_2_ROWS(D, I + 2)
#define PTX_8_ROWS(D, I) PTX_4_ROWS(D, I), PTX_4_ROWS(D, I + 4)
#define PTX_32_REGISTERS \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_64_REGISTERS PTX_32_REGISTERS ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The compiler sets these registers before it, and uses them behind it.
template <int N> __device__ inline void settle(float (&d)[N][4]) PTX(
    _Pragma("unroll") for (int i = 0; i < N; i++) asm volatile("" : PTX_ROW("+f", d, i) :: "memory");
)
template <int N> __device__ inline void settle(unsigned (&a)[N][4]) PTX(
    _Pragma("unroll") for (int i = 0; i < N; i++) asm volatile("" : PTX_ROW("+r", a, i) :: "memory");
)

// Before the first matmul, and after registers of one were touched: `d` is as it was set.
template <int N> __device__ inline void warpgroup_fence(float (&d)[N][4]) PTX(
    settle(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
)

__device__ inline void warpgroup_commit() PTX(
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
)

// Waits until all groups of matmuls but the latest PENDING are done, including that of `d`.
template <int PENDING, int N> __device__ inline void warpgroup_wait(float (&d)[N][4]) PTX(
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
    settle(d);
)

// d [64, 128] = a [64, 16] @ b [128, 16]^T, plus d where `add`; both K-major. Warp w of the four holds
// rows 16 w + g and 16 w + g + 8 of d: d[i][0..3] as of mma_m16n8k16, for the columns 8 i to 8 i + 7.
#define PTX_KEYS(T, TYPE) \
    __device__ inline void warpgroup_mma( \
        float (&d)[16][4], unsigned long long a, unsigned long long b, bool add, T) PTX( \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, %66, 0; " \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " \
            "{" PTX_64_REGISTERS "}, %64, %65, add, 1, 1, 0, 0; }" \
            : PTX_8_ROWS(d, 0), PTX_8_ROWS(d, 8) : "l"(a), "l"(b), "r"(int(add))); \
    )
PTX_KEYS(__nv_bfloat16, "bf16")
PTX_KEYS(__half, "f16")

// d [64, 8 N] += a [64, 16] @ b [16, 8 N], b MN-major. Of a, each warp holds its 16 rows, as those of
// mma_m16n8k16.
#define PTX_VALUES(T, TYPE) \
    __device__ inline void warpgroup_mma( \
        float (&d)[16][4], const unsigned (&a)[4], unsigned long long b, T) PTX( \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " \
            "{" PTX_64_REGISTERS "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
            : PTX_8_ROWS(d, 0), PTX_8_ROWS(d, 8) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    ) \
    __device__ inline void warpgroup_mma( \
        float (&d)[8][4], const unsigned (&a)[4], unsigned long long b, T) PTX( \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
            "{" PTX_32_REGISTERS "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;" \
            : PTX_8_ROWS(d, 0) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    )
PTX_VALUES(__nv_bfloat16, "bf16")
PTX_VALUES(__half, "f16")

}  // namespace ptx

#undef PTX
#undef SM_90
