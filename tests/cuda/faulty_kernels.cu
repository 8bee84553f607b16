// Kernels that are wrong in one way each, and controls that are right. One block of 64 threads where
// nothing else is said. Tests name the lines by the comments.
#include "intrinsics.cuh"

__global__ void divergent_barrier(float* x) {
    if (threadIdx.x < 32) {
        __syncthreads();  // HERE divergent_barrier
    } else {
        __syncthreads();
    }
    x[threadIdx.x] = 1;
}

__global__ void early_return(float* x) {
    if (threadIdx.x == 5) return;
    __syncthreads();  // HERE early_return
    x[threadIdx.x] = 1;
}

__global__ void past_the_array(float* x) {
    x[threadIdx.x + 1] = 1;  // HERE past_the_array
}

__global__ void before_the_array(float* x) {
    x[int(threadIdx.x) - 1] = 1;  // HERE before_the_array
}

__global__ void past_dynamic_shared(float* x) {
    extern __shared__ float memory[];
    memory[threadIdx.x + 1] = 1;  // HERE past_dynamic_shared
    __syncthreads();
    x[threadIdx.x] = memory[threadIdx.x + 1];
}

__global__ void half_a_warp(float* x) {
    float sum = x[threadIdx.x];
    if (threadIdx.x % 32 < 16) sum += __shfl_down_sync(~0u, sum, 1);  // HERE half_a_warp
    x[threadIdx.x] = sum;
}

__global__ void absent_lane(float* x) {
    float value = x[threadIdx.x];
    if (threadIdx.x % 32 < 16) value = __shfl_sync(0xFFFFu, value, 20);  // HERE absent_lane
    x[threadIdx.x] = value;
}

__device__ int deeper(volatile int* x, int depth) {
    volatile int memory[1000];
    memory[depth % 1000] = depth;
    return depth == 0 ? x[0] : deeper(memory, depth - 1) + memory[depth % 1000];
}

__global__ void stack_overflow(int* x) {
    x[0] = deeper(x, 100000);
}

__global__ void null_pointer(float* x) {
    x[threadIdx.x] = 1;  // HERE null_pointer
}

__global__ void failing_assertion(float* x) {
    assert(x[threadIdx.x] > 0);  // HERE failing_assertion
}

__global__ void misaligned_vector(float* x) {
    float4 four = *reinterpret_cast<float4*>(x + 1);  // HERE misaligned_vector
    x[0] = four.x + four.y + four.z + four.w;
}

__global__ void misaligned_struct(float* x) {
    struct alignas(8) Two {
        float values[2];
    };
    *reinterpret_cast<Two*>(x + 2 * threadIdx.x + 1) = {{1, 2}};  // HERE misaligned_struct
}

__global__ void misaligned_register(__half* x) {
    x[0] = __low2half(*reinterpret_cast<__half2*>(x + 5));  // HERE misaligned_register
}

__global__ void misaligned_row(float* x) {
    __shared__ __align__(16) float memory[64];
    unsigned registers[4];
    memory[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    ptx::load_matrix_x4(registers, memory + threadIdx.x % 4 * 2);  // HERE misaligned_row
    x[threadIdx.x] = __uint_as_float(registers[0]);
}

__global__ void misaligned_source(float* x) {
    __shared__ __align__(16) float memory[64];
    ptx::cp_async_16(memory, x + 1);  // HERE misaligned_source
}

__global__ void misaligned_destination(float* x) {
    __shared__ __align__(16) float memory[64];
    ptx::cp_async_16(memory + 2, x);  // HERE misaligned_destination
}

// Of the first threads each copies, and writes where it or its source lies.
__global__ void overwritten_source(float* x) {
    __shared__ __align__(16) float memory[64];
    if (threadIdx.x >= 16) return;
    ptx::cp_async_16(memory + 4 * threadIdx.x, x + 4 * threadIdx.x);  // HERE overwritten_source
    ptx::cp_async_commit();
    x[4 * threadIdx.x + 3] = 0;
    ptx::cp_async_wait<0>();
}

__global__ void overwritten_copy(float* x) {
    __shared__ __align__(16) float memory[64];
    if (threadIdx.x >= 16) return;
    float* own = memory + 4 * threadIdx.x;
    ptx::cp_async_16(own, x + 4 * threadIdx.x), own[3] = 0;  // HERE overwritten_copy
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

__global__ void copied_twice(float* x) {
    __shared__ __align__(16) float memory[4];
    if (threadIdx.x > 0) return;
    for (int i = 0; i < 2; i++) ptx::cp_async_16(memory, x + 4 * i);  // HERE copied_twice
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

__global__ void parted_matrices(float* x) {
    float d[4] = {};
    unsigned a[4] = {};
    if (threadIdx.x % 32 < 16) ptx::mma_m16n8k16(d, a, 0, 0, __half());
    else ptx::mma_m16n8k16(d, a, 0, 0, __half());
    x[threadIdx.x] = d[0];
}

__global__ void wide_shift(unsigned* x) {
    x[threadIdx.x] = 1u << threadIdx.x;  // HERE wide_shift
}

__global__ void too_large_for_int(float* x) {
    x[threadIdx.x] = int(1e10f * x[threadIdx.x]);  // HERE too_large_for_int
}

// From here on, the fast mode can only give NaN or pass.

__global__ void past_static_shared(float* x) {
    __shared__ float memory[64], other[64];
    memory[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = memory[threadIdx.x + 1];  // HERE past_static_shared
    if (x[0] == -5) x[0] = other[0];
}

struct Registers {
    float first[4], last[4] = {};

    __device__ void add(const float* x) {
        for (int i = 0; i <= 4; i++) last[i] += x[i];  // HERE past_the_last_member
    }
};

__global__ void past_the_last_member(float* x) {
    Registers own;
    own.add(x);
    x[threadIdx.x] = own.last[threadIdx.x % 4];
}

__global__ void uninitialized(float* x) {
    __shared__ float memory[64];
    if (threadIdx.x > 0) memory[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = memory[threadIdx.x];  // HERE uninitialized
}

__global__ void never_written(float* x) {
    __shared__ float memory[64];
    x[threadIdx.x] = memory[threadIdx.x];  // HERE never_written
}

__global__ void missing_barrier(float* x) {
    __shared__ float memory[64];
    memory[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = memory[63 - threadIdx.x];  // HERE missing_barrier
}

__global__ void missing_wait(float* x) {
    __shared__ __align__(16) float memory[64];
    if (threadIdx.x < 16) ptx::cp_async_16(memory + 4 * threadIdx.x, x + 4 * threadIdx.x);
    ptx::cp_async_commit();
    __syncthreads();
    x[threadIdx.x] = memory[threadIdx.x];  // HERE missing_wait
}

// Others still read what the copy overwrites.
__global__ void early_copy(float* x) {
    __shared__ __align__(16) float memory[64];
    memory[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = memory[63 - threadIdx.x];
    if (threadIdx.x < 16) ptx::cp_async_16(memory + 4 * threadIdx.x, x);  // HERE early_copy
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

__global__ void missing_sync_warp(float* x) {
    __shared__ float memory[64];
    unsigned warp = threadIdx.x & ~31u, lane = threadIdx.x & 31;
    memory[threadIdx.x] = x[threadIdx.x];
    float sum = __shfl_xor_sync(~0u, x[threadIdx.x], 1);  // orders no memory
    x[threadIdx.x] = sum + memory[warp + (lane ^ 1)];  // HERE missing_sync_warp
}

__global__ void missing_atomics(float* x) {  // two blocks
    x[0] += 1;  // HERE missing_atomics
}

__global__ void missing_fence(float* x, float* partial, unsigned* ticket) {  // four blocks
    if (threadIdx.x == 0) partial[blockIdx.x] = x[blockIdx.x];
    if (threadIdx.x == 0 && atomicAdd(ticket, 1u) == gridDim.x - 1) {
        float sum = 0;
        for (int i = 0; i < gridDim.x; i++) sum += partial[i];  // HERE missing_fence
        x[0] = sum;
    }
}

__global__ void missing_release(float* x, float* partial, unsigned* ticket) {  // four blocks
    partial[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (!__syncthreads_or(threadIdx.x == 0 && atomicInc(ticket, 3) == 3)) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += partial[i * 64 + threadIdx.x];  // HERE missing_release
    x[threadIdx.x] = sum;
}

// Thread 0 releases what the others may not have written yet.
__global__ void missing_release_barrier(float* x, float* partial, unsigned* ticket) {  // four blocks
    partial[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x];
    if (!__syncthreads_or(threadIdx.x == 0 && ptx::atomic_inc_acq_rel(ticket, 3) == 3)) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++)
        sum += partial[i * 64 + threadIdx.x];  // HERE missing_release_barrier
    x[threadIdx.x] = sum;
}

__global__ void race_after_many_barriers(float* x) {
    __shared__ float memory;
    if (threadIdx.x == 0) memory = 0;
    for (int i = 0; i < 65536; i++) __syncthreads();
    if (threadIdx.x == 0) memory = 1;
    x[threadIdx.x] = memory;  // HERE race_after_many_barriers
}

// Controls ----------------------------------------------------------------------------------------

__global__ void with_sync_warp(float* x) {
    __shared__ float memory[64];
    unsigned warp = threadIdx.x & ~31u, lane = threadIdx.x & 31;
    memory[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    x[threadIdx.x] += memory[warp + (lane ^ 1)];
}

// Lane 30 reads what lane 31 wrote, two __syncwarps later; lane 31 had many for itself.
__global__ void many_sync_warps(float* x) {
    __shared__ float memory[64];
    for (int i = 0; i < 65534 && threadIdx.x % 32 == 31; i++) __syncwarp(1u << 31);
    memory[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    __syncwarp();
    x[threadIdx.x] += memory[threadIdx.x ^ 1];
}

struct Pair {
    float first, second;
    Pair() = default;
};

__global__ void shared_half(float* x) {
    __shared__ __half halves[64];
    __shared__ __nv_bfloat16 one;
    __shared__ __half2 two;
    __shared__ Pair pair;
    halves[threadIdx.x] = __float2half(x[threadIdx.x]);
    if (threadIdx.x == 0) {
        one = __float2bfloat16(1.0f);
        two = __floats2half2_rn(2.0f, 2.0f);
        pair.first = 1;
    }
    __syncthreads();
    float factor = __bfloat162float(one) + __low2float(two) + pair.first;
    x[threadIdx.x] = factor * __half2float(halves[threadIdx.x]);
}

// The halves of a warp part, and meet again for what all of it does.
__global__ void joined_matrices(float* x) {
    float d[4] = {};
    unsigned a[4] = {}, ones = 0x3C003C00;  // of __half
    bool first_half = threadIdx.x % 32 < 16;
    if (first_half) a[0] = a[2] = ones;
    ptx::mma_m16n8k16(d, a, ones, ones, __half());
    if (first_half) d[0] -= 12;
    else d[0] += 4;
    x[threadIdx.x] *= d[0];
}

__global__ void with_atomics(float* x) {  // two blocks
    atomicAdd(x, 1.0f);
}

__global__ void with_wait(float* x) {
    __shared__ __align__(16) float memory[64];
    if (threadIdx.x < 16) ptx::cp_async_16(memory + 4 * threadIdx.x, x + 4 * threadIdx.x);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    x[threadIdx.x] = 2 * memory[threadIdx.x];
}

// Where a copy has arrived, and where it came from, may be written to, and copied to again.
__global__ void reused_copy(float* x) {
    __shared__ __align__(16) float memory[64];
    float* own = memory + 4 * threadIdx.x;
    for (int i = 0; threadIdx.x < 16 && i < 2; i++) {
        ptx::cp_async_16(own, x + 4 * threadIdx.x);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        for (int j = 0; j < 4; j++) x[4 * threadIdx.x + j] += own[j];
        own[0] = 0;
    }
}

// Four blocks; all threads write, thread 0 fences for them after the barrier.
__global__ void last_block(float* x, float* partial, unsigned* ticket) {
    __shared__ bool last;
    partial[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += partial[i * 64 + threadIdx.x];
    x[threadIdx.x] = sum;
}

// The same, but each thread fences its own.
__global__ void last_block_own_fences(float* x, float* partial, unsigned* ticket) {
    __shared__ bool last;
    partial[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += partial[i * 64 + threadIdx.x];
    x[threadIdx.x] = sum;
}

// The same, but the atomic releases.
__global__ void last_block_released(float* x, float* partial, unsigned* ticket) {
    partial[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (!__syncthreads_or(threadIdx.x == 0 && ptx::atomic_inc_acq_rel(ticket, 3) == 3)) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += partial[i * 64 + threadIdx.x];
    x[threadIdx.x] = sum;
}

// Each lane copies the row that it names, and gets parts of others'.
template <bool SYNC> __device__ void load_rows(float* x) {
    __shared__ __align__(16) float memory[64][4];
    unsigned registers[4], lane = threadIdx.x % 32;
    ptx::cp_async_16(memory[threadIdx.x], x + lane % 16 * 4);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (SYNC) __syncwarp();
    ptx::load_matrix_x4(registers, memory[threadIdx.x]);
    __syncthreads();
    x[threadIdx.x] = 4 * __uint_as_float(registers[threadIdx.x / 32]);
}

__global__ void rows_without_sync(float* x) { load_rows<false>(x); }
__global__ void rows_with_sync(float* x) { load_rows<true>(x); }

enum Mistake {
    NONE, NO_FENCE, CHANGED_AFTER_FENCE, READ_EARLY, CHANGED_EARLY, OVERWRITTEN, NEVER_WAITED, THREE_WARPS,
    NO_PROXY_FENCE, LATE_PROXY_FENCE, NO_BARRIER, MISPLACED, PARTED_DESCRIPTORS, ANOTHER_GROUP,
    OTHER_REGISTERS
};

// A product of a warpgroup of 128 threads: [64, 16], whose first column is 4, with [16, 64], whose first
// row is x and lies in 2 KiB of dynamic shared memory. One who writes x has read it before a barrier.
template <Mistake MISTAKE> __device__ void multiply_by_4(float* x) {
    auto* matrix = reinterpret_cast<__nv_bfloat16*>(ptx::dynamic_shared());
    for (int i = threadIdx.x; i < 16 * 64; i += 128) {
        int row = i / 64, column = i % 64;
        matrix[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8] =
            __float2bfloat16(row == 0 ? x[column] : 0.0f);
    }
    if (MISTAKE != NO_PROXY_FENCE && MISTAKE != LATE_PROXY_FENCE) ptx::fence_proxy_async();
    if (MISTAKE != NO_BARRIER) __syncthreads();
    if (MISTAKE == LATE_PROXY_FENCE) ptx::fence_proxy_async();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (MISTAKE == THREE_WARPS && warp == 3) return;
    unsigned a[4] = {}, four = 0x4080;
    if (lane % 4 == 0) a[0] = a[1] = four;
    float d[8][4] = {}, other[8][4] = {};
    unsigned long long b = ptx::matrix_descriptor(
        matrix + (MISTAKE == MISPLACED ? 64 : 0), MISTAKE == PARTED_DESCRIPTORS ? warp * 16 : 0, 1024);
    if (MISTAKE != NO_FENCE) ptx::warpgroup_fence(d);
    if (MISTAKE == CHANGED_AFTER_FENCE) d[0][0] = 0;
    ptx::warpgroup_mma(d, a, b, __nv_bfloat16());
    ptx::warpgroup_commit();
    if (MISTAKE == READ_EARLY) x[threadIdx.x % 64] = d[0][0];
    if (MISTAKE == CHANGED_EARLY) d[0][0] = 0;
    if (MISTAKE == OVERWRITTEN) matrix[threadIdx.x] = __float2bfloat16(5);
    if (MISTAKE == NEVER_WAITED) return;
    if (MISTAKE == OTHER_REGISTERS) ptx::warpgroup_wait<0>(other);
    else ptx::warpgroup_wait<MISTAKE == ANOTHER_GROUP ? 1 : 0>(d);
    for (int i = 0; threadIdx.x < 4 && i < 16; i++)
        x[i / 2 * 8 + threadIdx.x * 2 + i % 2] = d[i / 2][i % 2];
    if (MISTAKE == ANOTHER_GROUP) ptx::warpgroup_wait<0>(d);
}

__global__ void product(float* x) { multiply_by_4<NONE>(x); }
__global__ void product_without_fence(float* x) { multiply_by_4<NO_FENCE>(x); }
__global__ void product_changed_after_fence(float* x) { multiply_by_4<CHANGED_AFTER_FENCE>(x); }
__global__ void product_read_early(float* x) { multiply_by_4<READ_EARLY>(x); }
__global__ void product_of_another_group(float* x) { multiply_by_4<ANOTHER_GROUP>(x); }
__global__ void product_of_other_registers(float* x) { multiply_by_4<OTHER_REGISTERS>(x); }
__global__ void product_changed_early(float* x) { multiply_by_4<CHANGED_EARLY>(x); }
__global__ void product_overwritten(float* x) { multiply_by_4<OVERWRITTEN>(x); }
__global__ void product_never_waited(float* x) { multiply_by_4<NEVER_WAITED>(x); }
__global__ void product_of_three_warps(float* x) { multiply_by_4<THREE_WARPS>(x); }
__global__ void product_without_proxy_fence(float* x) { multiply_by_4<NO_PROXY_FENCE>(x); }
__global__ void product_with_late_proxy_fence(float* x) { multiply_by_4<LATE_PROXY_FENCE>(x); }
__global__ void product_without_barrier(float* x) { multiply_by_4<NO_BARRIER>(x); }
__global__ void product_misplaced(float* x) { multiply_by_4<MISPLACED>(x); }
__global__ void product_of_parted_descriptors(float* x) { multiply_by_4<PARTED_DESCRIPTORS>(x); }
