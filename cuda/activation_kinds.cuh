// The activations of MLPs, with the names in gptmanager/kernels/activation_kinds.py.
#pragma once

#include "numerics.cuh"

// __fdividef, the fast division below, returns 0 if the divisor exceeds 2^126. The exact quotient would
// then have a magnitude below 1e-35.
enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU };

template <Activation KIND> __device__ inline float activated(float x) {
    if constexpr (KIND == SILU) {
        return __fdividef(x, 1.0f + __expf(-x));
    } else if constexpr (KIND == GELU) {
        return x * 0.5f * erfcf(x * -0.7071067811865476f);
    } else if constexpr (KIND == GELU_TANH) {
        // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
        float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return __fdividef(x, 1.0f + __expf(-2.0f * u));
    } else {
        float positive = x < 0 ? 0.0f : x;  // NaN stays NaN
        return KIND == RELU ? positive : positive * positive;
    }
}

// Returns activation(gate) * up. CLAMPED_SWIGLU limits gate and up and adds 1 to up, as in gpt-oss.
template <Activation KIND> __device__ inline float gated(float gate, float up) {
    if constexpr (KIND == CLAMPED_SWIGLU) {
        constexpr float LIMIT = 7, SLOPE = 1.702f;
        gate = gate > LIMIT ? LIMIT : gate;  // NaN stays NaN
        up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
        return __fdividef((up + 1) * gate, 1.0f + __expf(-SLOPE * gate));
    } else {
        return activated<KIND>(gate) * up;
    }
}
