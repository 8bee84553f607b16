// All inline PTX of the project, about one instruction per function, and macros that depend on the compiler.
//
// On a CPU, functions with PTX are only declared here: emulator/intrinsics_cpu.h defines them. Fragment
// layouts are those of the PTX manual, where g = lane / 4 and t = lane % 4.
#pragma once
#define GPTMANAGER_INTRINSICS

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef GPTMANAGER_EMULATOR
#define PTX(...) ;
#else
#define PTX(...) { __VA_ARGS__ }
#endif

// Code that only sm_90 and later support, and what older architectures need in its place, if anything.
#if __CUDA_ARCH__ >= 900
#define SM_90(...) __VA_ARGS__
#define BEFORE_SM_90(...)
#else
#define SM_90(...)
#define BEFORE_SM_90(...) __VA_ARGS__
#endif

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

namespace ptx {

// Returns the block's dynamic shared memory, aligned for any copy.
__device__ inline unsigned char* dynamic_shared() PTX(
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
)

__device__ inline unsigned shared_address(const void* pointer) PTX(
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
)

// Returns threadIdx.x, read anew: what a kernel computes from it needs no registers before this call.
__device__ inline int thread_index() PTX(
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
)

// Programmatic dependent launch --------------------------------------------------------------------

// A kernel of a `dependent` Program may begin while the previous kernel in the stream still
// runs. Every thread calls this before it accesses global memory. The call returns when the previous
// kernel has ended and its writes are visible (immediately, if the launch did not begin early), and
// only then allows the next kernel to begin. Why this is sufficient, for kernels A, B, C in a stream:
// - C begins when each block of B has allowed that (in this call, after it saw A end) or has ended.
//   So A has ended when C begins: at most two kernels run at the same time.
// - When C returns from this call, B has ended, and so has everything that B waited for: by induction
//   every kernel before C. So C may overwrite what any of them read, and use memory that was freed
//   after them.
// - A kernel that is not `dependent` (of torch or cuBLAS, or a copy) begins when C has ended; by then all
//   kernels before C have ended, too. If such a kernel K precedes C, it does not let C begin early: C
//   begins when the blocks of K have ended, and sees their writes after this call.
// - C has blocks on the device only when all blocks of B are on it: B never waits for the resources of C.
// Plain loads before the call are not covered: L1 may keep data that is overwritten later. All reads and
// writes of global memory pass through L2, so there, `prefetch_l2` is safe before the call, and `load_early`
// is for data that B does not write: what wrote it has ended when C begins.
__device__ inline void wait_for_previous() PTX(
    SM_90(asm volatile("griddepcontrol.wait;" ::: "memory");)
    SM_90(asm volatile("griddepcontrol.launch_dependents;" ::: "memory");)
)

// Starts to load the cache line of this address, which must be inside an array, into L2. Does not wait.
__device__ inline void prefetch_l2(const void* address) PTX(
    asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
)

// Loads a number that the previous kernel of the stream does not write, such as one of a plan or a block
// table. Of all loads, only this one may precede `wait_for_previous`. It bypasses L1.
// Not volatile, which would cost registers: no thread of this kernel writes such a number.
__device__ inline int load_early(const int* address) PTX(
    int value = 0;
    SM_90(asm("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(address));)
    BEFORE_SM_90(value = *address;)
    return value;
)
__device__ inline long long load_early(const long long* address) PTX(
    long long value = 0;
    SM_90(asm("ld.global.cg.s64 %0, [%1];" : "=l"(value) : "l"(address));)
    BEFORE_SM_90(value = *address;)
    return value;
)

// Arithmetic --------------------------------------------------------------------------------------

// Returns 2^x to about 2 ulp; 0 for -inf.
__device__ inline float exp2_approx(float x) PTX(
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
)

// Adds two pairs of 16-bit elements. Each pair is in one register.
__device__ inline unsigned add_pair(unsigned a, unsigned b, __nv_bfloat16) PTX(
    unsigned sum;  // a * 1 + b, since only sm_90 has an addition
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3F803F80u), "r"(b));
    return sum;
)
__device__ inline unsigned add_pair(unsigned a, unsigned b, __half) PTX(
    unsigned sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
)

// Loads --------------------------------------------------------------------------------------------

// Loads 16 aligned bytes that nothing writes while the kernel runs and no thread reads again, without
// allocating a line of L1. If not `valid`, nothing is read and the result is zeros.
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

// atomicInc that also releases the earlier writes of this thread, and the writes of all threads of the block
// before the latest barrier. It also acquires what earlier calls for this address released. The thread waits
// for less than with an atomicInc between two __threadfence().
__device__ inline unsigned atomic_inc_acq_rel(unsigned* address, unsigned last) PTX(
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
        : "=r"(before) : "l"(address), "r"(last) : "memory");
    return before;
)

// Asynchronous copies from global to shared memory --------------------------------------------------

// Copies 16 bytes between addresses that are aligned to 16 bytes, bypassing L1, since each byte is
// read once. If not `valid`, nothing is read and zeros are written.
#ifdef COPIES_AT_ONCE  // for debugging: shows whether the asynchronous copies cause an error
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

// Waits until all copies of this thread have arrived, except its latest PENDING groups.
template <int PENDING> __device__ inline void cp_async_wait() PTX(
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
)
#endif

// Warps -------------------------------------------------------------------------------------------

// Called before `ldmatrix`, `mma` and `wgmma`, which all lanes of a warp must execute together. The compiler
// makes lanes reconverge after a branch by itself. EXTRA_SYNCWARP, for debugging, shows whether it did.
__device__ inline void gather_lanes() {
#ifdef EXTRA_SYNCWARP
    __syncwarp();
#endif
}

// Matrices of 8 x 8 16-bit elements in registers --------------------------------------------------

// Loads four matrices. Lane 8 i + r passes the address of row r of matrix i, 16 aligned bytes in shared
// memory. Register i of a lane then holds columns 2 t and 2 t + 1 of row g of matrix i.
__device__ inline void load_matrix_x4(unsigned (&registers)[4], const void* row) PTX(
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
        : "r"(shared_address(row)) : "memory");
)

// Loads four matrices transposed: register i holds rows 2 t and 2 t + 1 of column g of matrix i.
__device__ inline void load_matrix_x4_transposed(unsigned (&registers)[4], const void* row) PTX(
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
        : "r"(shared_address(row)) : "memory");
)

// Transposes a matrix: a lane passes columns 2 t and 2 t + 1 of row g, and receives rows 2 t and 2 t + 1
// of column g.
__device__ inline unsigned transpose_matrix(unsigned elements) PTX(
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(elements));
    return result;
)

// Tensor cores ------------------------------------------------------------------------------------

// Computes d [16, 8] += a [16, 16] @ b [16, 8] with all 32 lanes. A lane holds these elements, as
// (row, column); each register of a and b holds two:
// a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with the next column;
// b: (2t, g), (2t + 8, g), each with the next row;
// d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
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

// Matmuls of a warpgroup (Hopper) ------------------------------------------------------------------
//
// Four warps (4 i to 4 i + 3 of a block) issue a matmul together, and it runs asynchronously. If
// operands are in shared memory, each thread that wrote them by ordinary stores or cp.async first
// calls `fence_proxy_async`, and a barrier follows. The registers of a matmul must not be
// accessed between the `warpgroup_fence` before the matmul and the `warpgroup_wait` after it.

// Makes the earlier writes of this thread to shared memory visible to asynchronous matmuls.
__device__ inline void fence_proxy_async() PTX(
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
)

// Returns the descriptor of a matrix of 16-bit elements in shared memory with the 128-byte swizzle. Its
// rows (K-major) or columns (MN-major) have 128 bytes. Eight rows or columns form a pattern of 1024 aligned
// bytes, in which address bits 4-6 are xored with bits 7-9. `stride`: bytes from one pattern to the next.
// `leading`, for MN-major: bytes from one column of 64 elements to the next 64 elements along MN.
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

// Keeps the compiler from moving writes of these registers down, or reads of them up, across this call.
template <int N> __device__ inline void settle(float (&d)[N][4]) PTX(
    _Pragma("unroll") for (int i = 0; i < N; i++) asm volatile("" : PTX_ROW("+f", d, i) :: "memory");
)
template <int N> __device__ inline void settle(unsigned (&a)[N][4]) PTX(
    _Pragma("unroll") for (int i = 0; i < N; i++) asm volatile("" : PTX_ROW("+r", a, i) :: "memory");
)

// Must be called before the first matmul, and before any matmul with registers that were accessed since the
// last fence: orders the accesses to `d` before the matmul.
template <int N> __device__ inline void warpgroup_fence(float (&d)[N][4]) PTX(
    settle(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
)

__device__ inline void warpgroup_commit() PTX(
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
)

// Waits until all groups of matmuls have finished, except the latest PENDING groups. `d` must be the result
// of a group that has then finished.
template <int PENDING, int N> __device__ inline void warpgroup_wait(float (&d)[N][4]) PTX(
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
    settle(d);
)

// Computes d [64, 128] = a [64, 16] @ b [128, 16]^T, plus d if `add`; a and b are K-major. Warp w of the
// four holds rows 16 w + g and 16 w + g + 8 of d: d[i][0..3] are as in mma_m16n8k16, for columns 8 i to
// 8 i + 7.
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

// Computes d [64, N] += a [64, 16] @ b [16, N] for N of 128 or 64, where b is MN-major. Each warp holds its
// 16 rows of a, as in mma_m16n8k16, and of d, as above.
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
