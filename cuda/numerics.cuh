// Loads and stores of tensor elements as floats, up to 16 bytes at a time; sums over a warp or a block; a
// test whether a block is the last of several to arrive.
#pragma once

#include "intrinsics.cuh"

template <class T, int N> struct alignas(sizeof(T) * N) Vector {
    T values[N];
};

// The number of elements in 16 bytes, the most that one load or store moves.
template <class T> constexpr int WIDE = 16 / sizeof(T);

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(signed char x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Rounds two floats to T and packs them into one 32-bit register of an MMA fragment, `low` in the lower half.
template <class T> __device__ inline unsigned pack(float low, float high);
template <> __device__ inline unsigned pack<__half>(float low, float high) {
    __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned*>(&both);
}
template <> __device__ inline unsigned pack<__nv_bfloat16>(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned*>(&both);
}

// Loads N elements as floats. The address is aligned to the size of N elements, or to 16 bytes if that is less.
template <int N, class T> __device__ inline void load(float (&to)[N], const T* from) {
    constexpr int STEP = N < WIDE<T> ? N : WIDE<T>;
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
        Vector<T, STEP> vector = *reinterpret_cast<const Vector<T, STEP>*>(from + i);
#pragma unroll
        for (int j = 0; j < STEP; j++) to[i + j] = to_float(vector.values[j]);
    }
}

// Stores N floats as elements; the address is aligned as for `load`.
template <int N, class T> __device__ inline void store(T* to, const float (&from)[N]) {
    constexpr int STEP = N < WIDE<T> ? N : WIDE<T>;
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
        Vector<T, STEP> vector;
#pragma unroll
        for (int j = 0; j < STEP; j++) vector.values[j] = from_float<T>(from[i + j]);
        *reinterpret_cast<Vector<T, STEP>*>(to + i) = vector;
    }
}

// Returns, in every lane, the sum over that lane's group of LANES adjacent lanes. LANES is a power of two.
template <int LANES = 32> __device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

// Returns, in every thread, the sum over a block of up to 32 full warps. `partial` may be reused after
// the block's next barrier.
__device__ inline float block_sum(float x, float (&partial)[32]) {
    x = warp_sum(x);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
}

// Returns whether this block is the last of `count` blocks to call this function. All threads of the last
// block then see the writes of all the blocks. `*arrived` is 0 before the first call and after the last.
//
// The first barrier orders the writes of a block's threads before thread 0's atomic, which releases the
// writes. The last block's atomic acquires them; the second barrier passes them on to its other threads.
__device__ inline bool is_last_block(unsigned* arrived, int count) {
    __syncthreads();
    unsigned last = count - 1;  // the atomic resets the counter from `last` to 0
    return __syncthreads_or(threadIdx.x == 0 && ptx::atomic_inc_acq_rel(arrived, last) == last);
}
