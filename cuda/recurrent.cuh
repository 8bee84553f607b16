// What recurrent layers share: the convolution of their channels, and softplus.
#pragma once

#include "activation_kinds.cuh"

// Convolves the channels of a row, applies SiLU, and keeps the last inputs of each channel. A thread has one
// channel. W: 4 or 8, at least the width of a filter. Grid: (rows, parts of the channels). Rows without
// tokens need no slot.
template <class T, int W>
__global__ void __launch_bounds__(128) convolve(
    float* mixed,        // [tokens, channels]
    T* inputs,           // [slots, width - 1, channels], changed
    const T* projected,  // [tokens, stride], the channels from column `offset` on
    const T* conv,       // [width, channels]
    const T* bias,       // [channels] or null
    const int* row_starts, const int* slots, int channels, int width, int stride, int offset) {
    constexpr int AHEAD = 8;  // tokens that are loaded together
    ptx::wait_for_previous();
    int channel = blockIdx.y * blockDim.x + threadIdx.x;
    int first = row_starts[blockIdx.x], stop = row_starts[blockIdx.x + 1];
    if (channel >= channels || first == stop) return;
    T* kept = inputs + size_t(slots[blockIdx.x]) * (width - 1) * channels + channel;
    projected += offset + channel;
    float window[W], taps[W], constant = bias ? to_float(bias[channel]) : 0.0f;
#pragma unroll
    for (int i = 0; i < W; i++) {  // the last `width` elements are used
        int own = i - (W - width);
        taps[i] = own >= 0 ? to_float(conv[own * channels + channel]) : 0.0f;
        // the first token shifts the window by one
        window[i] = own >= 1 ? to_float(kept[(own - 1) * channels]) : 0.0f;
    }
    for (int start = first; start < stop; start += AHEAD) {
        float next[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (start + i < stop) next[i] = to_float(projected[size_t(start + i) * stride]);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (start + i >= stop) break;
#pragma unroll
            for (int j = 0; j < W - 1; j++) window[j] = window[j + 1];
            window[W - 1] = next[i];
            float sum = constant;
#pragma unroll
            for (int j = 0; j < W; j++) sum += taps[j] * window[j];
            mixed[size_t(start + i) * channels + channel] = activated<SILU>(sum);
        }
    }
#pragma unroll
    for (int i = 1; i < W; i++) {
        int own = i - (W - width);
        if (own >= 1) kept[(own - 1) * channels] = from_float<T>(window[i]);
    }
}

// Returns log(1 + e^x), with a small relative error also where the result is small.
__device__ inline float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
