// activate: out = activation(x). activate_gated: out = activation(gate) * up.
#include "activation_kinds.cuh"

// Grid: (tokens, blocks along the width). A thread computes WIDTH elements.
template <class T, int WIDTH, Activation KIND>
__global__ void activate_gated(
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
    for (int i = 0; i < WIDTH; i++) gate[i] = gated<KIND>(gate[i], up[i]);
    store(out + size_t(blockIdx.x) * width + column, gate);
}

// Grid: (blocks along `size`). A thread computes WIDTH elements.
template <class T, int WIDTH, Activation KIND>
__global__ void activate(
    T* out,      // [size], may be x
    const T* x,  // [size]
    size_t size) {
    ptx::wait_for_previous();
    size_t start = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * WIDTH;
    if (start >= size) return;
    float values[WIDTH];
    load(values, x + start);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) values[i] = activated<KIND>(values[i]);
    store(out + start, values);
}
