// Conversions of 8-bit floats (e4m3), for a KV cache and for weights. An element of the cache stands for
// element * scale. Kernels get `scales` [2, kv_heads]: one row for keys, one for values.
#pragma once

#include <cuda_fp8.h>

#include "numerics.cuh"

template <class C> constexpr bool IS_FP8 = sizeof(C) == 1;

// Rounds to nearest, ties to even; saturates at +-448; NaN stays NaN.
template <> __device__ inline __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float x) {
    __nv_fp8_e4m3 result;
    result.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    return result;
}

__device__ inline float to_float(__nv_fp8_e4m3 x) { return float(x); }

// The number of bits by which exponent and mantissa of e4m3 are shifted left to their positions in T.
template <class T> constexpr int SHIFT = 0;
template <> constexpr int SHIFT<__half> = 7;
template <> constexpr int SHIFT<__nv_bfloat16> = 4;

// Corrects the exponent's bias of two elements, after the bits of e4m3 were moved to their positions in T.
template <class T> __device__ inline unsigned rebase(unsigned both);
template <> __device__ inline unsigned rebase<__half>(unsigned both) {
    __half2 result = __hmul2(*reinterpret_cast<__half2*>(&both), __float2half2_rn(256.0f));
    return *reinterpret_cast<unsigned*>(&result);
}
template <> __device__ inline unsigned rebase<__nv_bfloat16>(unsigned both) {
    __nv_bfloat162 power = __float2bfloat162_rn(0x1p120f);
    __nv_bfloat162 result = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&both), power);
    return *reinterpret_cast<unsigned*>(&result);
}

// Whether the device has instructions that convert elements. A test may define DEVICE_CONVERTS_FP8, to
// run either version of `expand` on the CPU emulator of these kernels.
#ifndef DEVICE_CONVERTS_FP8
#define DEVICE_CONVERTS_FP8 (__CUDA_ARCH__ >= 890)
#endif

// Converts the two elements in the lower 16 bits of `both` to two elements of T, packed as in a register
// of an mma fragment. The conversion is exact, because T has more bits.
template <class T> __device__ inline unsigned expand(unsigned both) {
#if DEVICE_CONVERTS_FP8
    __half2 halves(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(both), __NV_E4M3));
    if constexpr (SHIFT<T> == 7) return *reinterpret_cast<unsigned*>(&halves);
    float2 floats = __half22float2(halves);
    return pack<T>(floats.x, floats.y);
#else  // faster than the conversion of cuda_fp8.h
    unsigned halves = __byte_perm(both, 0, 0x4140), magnitudes = halves & 0x007F007F;
    unsigned nan = (magnitudes + 0x00010001) & 0x00800080;
    unsigned result = rebase<T>((halves & 0x00800080) << 8 | magnitudes << SHIFT<T>);
    return result | ((nan << 8) - (nan >> 7));
#endif
}
