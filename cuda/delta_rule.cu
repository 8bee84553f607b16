// The gated delta rule of a layer: its convolution, then the memories of its heads.
// gptmanager/kernels/recurrent/delta_formulas.py has the formulas. All sums are float32.
#include "recurrent.cuh"

constexpr int TOKENS = 8;        // tokens that have queries and keys in shared memory at a time
constexpr int MAX_VALUES = 128;  // the largest dimension of a value
constexpr int LANES = 4;         // lanes that share a column of a head's memory
constexpr int COLUMNS = 32 / LANES;

// Scales the `size` elements of `from` to a vector of norm `scale`, and writes it to `to`, padded with
// zeros. One warp calls this.
template <int KEY>
__device__ inline void normalize(float (&to)[KEY], const float* from, int size, float scale) {
    int lane = threadIdx.x % 32;
    float square = 0;
    for (int i = lane; i < size; i += 32) square += from[i] * from[i];
    scale *= rsqrtf(warp_sum(square) + 1e-6f);
    for (int i = lane; i < KEY; i += 32) to[i] = i < size ? from[i] * scale : 0.0f;
}

// Updates the memory of a head with the tokens of a row, one after another, and writes what each query
// reads from the memory, normalized and gated. Grid: (rows, heads). A warp holds COLUMNS columns of the
// memory in registers. KEY: 32, 64 or 128, at least the dimension of a key.
template <class T, int KEY>
__global__ void __launch_bounds__(32 * MAX_VALUES / COLUMNS, 1) advance(
    T* out,              // [tokens, heads, value_dim]
    float* memory,       // [slots, heads, key_dim, value_dim], changed
    const float* mixed,  // [tokens, channels]: queries, keys, values
    const T* projected,  // [tokens, stride]: channels, then gates of the output [heads, value_dim]
    const float* gates,  // [tokens, 2, heads]: gates of the rates, and gates of the decays
    const float* decay,  // [heads]: a token's decay is exp(-exp(decay) * softplus(gate + step))
    const float* step,   // [heads], see `decay`
    const T* norm,       // [value_dim], the weight of the output's norm
    const int* row_starts, const int* slots, int key_heads, int key_dim, int value_dim, int stride,
    float eps) {
    constexpr int ROWS = KEY / LANES, AT_ONCE = 8;  // AT_ONCE: rows loaded ahead; registers limit it
    __shared__ float queries[TOKENS][KEY], keys[TOKENS][KEY], found[TOKENS][MAX_VALUES];
    __shared__ float rates[TOKENS], decays[TOKENS];
    ptx::wait_for_previous();
    int first = row_starts[blockIdx.x], stop = row_starts[blockIdx.x + 1];
    if (first == stop) return;
    int head = blockIdx.y, heads = gridDim.y, key_head = head / (heads / key_heads);
    int all_keys = key_heads * key_dim, channels = 2 * all_keys + heads * value_dim;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int column = warp * COLUMNS + lane / LANES, part = lane % LANES;
    float* own = memory + (size_t(slots[blockIdx.x]) * heads + head) * key_dim * value_dim + column;
    float state[ROWS / 4][4];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = i * LANES + part;
        state[i / 4][i % 4] = row < key_dim && column < value_dim ? own[row * value_dim] : 0.0f;
    }
    for (int start = first; start < stop; start += TOKENS) {
        int count = min(TOKENS, stop - start);
        for (int i = warp; i < 2 * count; i += warps) {
            const float* from = mixed + size_t(start + i / 2) * channels + key_head * key_dim;
            if (i % 2 == 0)
                normalize(queries[i / 2], from, key_dim, rsqrtf(float(key_dim)));
            else
                normalize(keys[i / 2], from + all_keys, key_dim, 1.0f);
        }
        if (threadIdx.x < count) {
            const float* gate = gates + size_t(start + threadIdx.x) * 2 * heads + head;
            rates[threadIdx.x] = 1.0f / (1.0f + expf(-gate[0]));
            decays[threadIdx.x] = expf(-expf(decay[head]) * softplus(gate[heads] + step[head]));
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            float seen = 0, read = 0;
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                seen += keys[i][j * LANES + part] * state[j / 4][j % 4];
                if (j % AT_ONCE == AT_ONCE - 1) ptx::settle(state);
            }
            seen = warp_sum<LANES>(seen) * decays[i];
            size_t at = size_t(start + i) * channels + 2 * all_keys + head * value_dim + column;
            float change = column < value_dim ? (mixed[at] - seen) * rates[i] : 0.0f;
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                float& own = state[j / 4][j % 4];
                own = own * decays[i] + keys[i][j * LANES + part] * change;
                read += queries[i][j * LANES + part] * own;
                if (j % AT_ONCE == AT_ONCE - 1) ptx::settle(state);
            }
            read = warp_sum<LANES>(read);
            if (part == 0 && column < value_dim) found[i][column] = read;
        }
        __syncthreads();
        for (int i = warp; i < count; i += warps) {
            float square = 0;
            for (int j = lane; j < value_dim; j += 32) square += found[i][j] * found[i][j];
            float scale = rsqrtf(warp_sum(square) / value_dim + eps);
            size_t token = start + i;
            const T* gate = projected + token * stride + channels + head * value_dim;
            for (int j = lane; j < value_dim; j += 32) {
                float value = found[i][j] * scale * to_float(norm[j]);
                value *= activated<SILU>(to_float(gate[j]));
                out[(token * heads + head) * value_dim + j] = from_float<T>(value);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = i * LANES + part;
        if (row < key_dim && column < value_dim) own[row * value_dim] = state[i / 4][i % 4];
    }
}
