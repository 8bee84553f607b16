// Converts weights in 8-bit floats (e4m3) to the dtype T of the activations. T represents them exactly.
#pragma once

#include "attention/fp8.cuh"
#include "gemm/widening.cuh"

template <class T> struct Stored<T, __nv_fp8_e4m3> {
    __device__ static unsigned pair(unsigned bytes, int half) { return expand<T>(bytes >> 16 * half); }
    __device__ static float one(unsigned bytes) {
        __nv_fp8_e4m3 element;
        element.__x = bytes;
        return to_float(element);
    }
};
