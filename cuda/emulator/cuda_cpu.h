// CUDA C++ for g++: qualifiers, built-in variables and vector types. source.py includes it before a kernel.
//
// If NVIDIA's headers are installed (EMULATOR_CUDA_HEADERS), they define vector types, and conversions in
// cuda_fp16.h and cuda_bf16.h use host code. Kernels that include neither file need no NVIDIA headers.
#pragma once

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "machine.h"

#ifdef EMULATOR_CUDA_HEADERS
#include <vector_types.h>
#include <vector_functions.h>
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#else
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __restrict__ __restrict
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(size) __attribute__((aligned(size)))

#define EMULATOR_VECTORS(T, NAME, A2, A4) \
    struct NAME##1 { T x; }; \
    struct __align__(A2) NAME##2 { T x, y; }; \
    struct NAME##3 { T x, y, z; }; \
    struct __align__(A4) NAME##4 { T x, y, z, w; }; \
    inline NAME##1 make_##NAME##1(T x) { return {x}; } \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; } \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(signed char, char, 2, 4)
EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(unsigned, uint, 8, 16)
EMULATOR_VECTORS(long long, longlong, 16, 16)
EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    operator uint3() const { return {x, y, z}; }
};
#endif

// One OS thread runs a block, so thread_local memory is memory of the block. source.py replaces shared
// arrays without a size by pointers. Without __constinit g++ adds a guard variable to a variable with a
// constructor, even a trivial one; the guard would be poisoned and checked like a variable of the kernel.
// Without the attribute g++ replaces reads of a variable that no code writes by 0.
#define __shared__ __constinit thread_local __attribute__((used))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)

#define threadIdx (uint3{::emulator::thread_index.x, ::emulator::thread_index.y, ::emulator::thread_index.z})
#define blockIdx (uint3{::emulator::block_index.x, ::emulator::block_index.y, ::emulator::block_index.z})
#define blockDim (dim3{::emulator::block_size.x, ::emulator::block_size.y, ::emulator::block_size.z})
#define gridDim (dim3{::emulator::grid_size.x, ::emulator::grid_size.y, ::emulator::grid_size.z})
constexpr int warpSize = 32;

#undef assert
#define assert(condition) \
    ((condition) ? (void)0 : ::emulator::fail({__FILE__, __LINE__, nullptr}, "assertion %s", #condition))

#include "warp.h"
#include "atomics.h"
#include "device_functions.h"
