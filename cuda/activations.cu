// silu_mul: out = gate / (1 + e^-gate) * up
// gelu: out = x * Phi(x), by erf or (TANH) by tanh(sqrt(2 / pi) * (x + 0.044715 x^3))
#include "numerics.cuh"

// Grid: (tokens, parts of the width). A thread computes WIDTH elements.
template <class T, int WIDTH>
__global__ void silu_mul(
    T* out,            // [tokens, width]
    const T* gate_up,  // [tokens, 2 * width]: gate, then up
    int width) {
    ptx::wait_for_previous();
    int column = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
    if (column >= width) return;
    const T* row = gate_up + size_t(blockIdx.x) * 2 * width + column;
    float gate[WIDTH], up[WIDTH];
    load(gate, row);
    load(up, row + width);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) gate[i] = gate[i] / (1.0f + __expf(-gate[i])) * up[i];
    store(out + size_t(blockIdx.x) * width + column, gate);
}

// Grid: (parts of `size`). A thread computes WIDTH elements.
template <class T, int WIDTH, bool TANH>
__global__ void gelu(
    T* out,      // [size], may be x
    const T* x,  // [size]
    size_t size) {
    ptx::wait_for_previous();
    size_t start = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * WIDTH;
    if (start >= size) return;
    float values[WIDTH];
    load(values, x + start);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        float v = values[i];
        if constexpr (TANH) {
            // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
            float u = 0.7978845608028654f * (v + 0.044715f * v * v * v);
            values[i] = v / (1.0f + __expf(-2.0f * u));
        } else {
            values[i] = v * 0.5f * erfcf(v * -0.7071067811865476f);
        }
    }
    store(out + start, values);
}
