// A layer of Mamba-2: its convolution, then the memories of its heads, then the norm of its outputs.
// gptmanager/kernels/recurrent/state_space_formulas.py has the formulas. All sums are float32.
#include "recurrent.cuh"

constexpr int TOKENS = 8;    // tokens that are in shared memory at a time
constexpr int COLUMNS = 64;  // columns of a head's memory in a block

// Updates columns of a head's memory with the tokens of a row, one after another, and writes what each
// token reads, plus its input times `skip`. Grid: (rows, heads, parts of the columns). STATE: 128 or
// 256 threads, at least the rows of a memory. The dimensions of heads and states are multiples of 4.
//
// The memory is in registers. Of each STATE / 4 rows, LANES adjacent lanes have 4 rows, and a lane has 4
// columns of them. While a block computes some tokens, it copies the next ones.
template <class T, int STATE>
__global__ void __launch_bounds__(STATE, 512 / STATE) scan(
    float* read,         // [tokens, heads, head_dim]
    float* memory,       // [slots, heads, state, head_dim], changed
    const float* mixed,  // [tokens, channels]: inputs, B and C, convolved
    const T* projected,  // [tokens, stride]; the last `heads` columns have arguments of steps
    const float* decay,  // [heads]: a token's decay is exp(-exp(decay) * its step)
    const float* step,   // [heads]: a token's step is softplus(argument + step)
    const float* skip,   // [heads]
    const int* row_starts, const int* slots, int head_dim, int size, int groups, int stride) {
    constexpr int LANES = 512 / STATE, PARTS = 4, ROWS = 4 * PARTS;
    constexpr int WIDTH = 2 * STATE + COLUMNS;                // values of a token: B, C, inputs
    __shared__ __align__(16) float staged[2][TOKENS][WIDTH];  // some tokens, and the next ones
    __shared__ float steps[2][TOKENS], decays[2][TOKENS];
    ptx::wait_for_previous();
    int first = row_starts[blockIdx.x], stop = row_starts[blockIdx.x + 1];
    if (first == stop) return;
    int head = blockIdx.y, heads = gridDim.y, inner = heads * head_dim, left = blockIdx.z * COLUMNS;
    int channels = inner + 2 * groups * size, group = head / (heads / groups);
    int lane = threadIdx.x % 32, row = lane / LANES * 4;
    int own_column = (threadIdx.x / 32 * LANES + lane % LANES) * 4, column = left + own_column;

    float argument = 0;  // for the step of the next token `threadIdx.x`
    auto stage = [&](int start, int buffer) {
        int count = min(TOKENS, stop - start);
        for (int i = threadIdx.x; i < count * (WIDTH / 4); i += STATE) {
            int token = i / (WIDTH / 4), at = i % (WIDTH / 4) * 4;
            const float* from = mixed + size_t(start + token) * channels;
            bool valid;
            if (at < 2 * STATE) {
                int element = at % STATE;
                valid = element < size;
                from += inner + ((at < STATE ? 0 : groups) + group) * size + element;
            } else {
                int element = left + at - 2 * STATE;
                valid = element < head_dim;
                from += head * head_dim + element;
            }
            ptx::cp_async_16(&staged[buffer][token][at], valid ? from : mixed, valid);
        }
        ptx::cp_async_commit();
        if (threadIdx.x < count)
            argument = to_float(projected[size_t(start + threadIdx.x) * stride + stride - heads + head]);
    };
    stage(first, 0);
    float* own = memory + (size_t(slots[blockIdx.x]) * heads + head) * size * head_dim + column;
    float state[ROWS][4];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int at = i / 4 * (STATE / PARTS) + row + i % 4;
#pragma unroll
        for (int j = 0; j < 4; j++) state[i][j] = 0;
        if (at < size && column < head_dim) load(state[i], own + size_t(at) * head_dim);
    }
    float speed = -expf(decay[head]), bias = step[head], factor = skip[head];
    int buffer = 0;
    for (int start = first; start < stop; start += TOKENS, buffer ^= 1) {
        if (threadIdx.x < min(TOKENS, stop - start)) {
            float own_step = softplus(argument + bias);
            steps[buffer][threadIdx.x] = own_step;
            decays[buffer][threadIdx.x] = expf(speed * own_step);
        }
        ptx::cp_async_wait<0>();
        __syncthreads();  // also: no thread reads the other buffer any more
        if (start + TOKENS < stop) stage(start + TOKENS, buffer ^ 1);
#pragma unroll 1
        for (int i = 0; i < min(TOKENS, stop - start); i++) {
            const float* from = staged[buffer][i];
            float x[4], change[4], found[4] = {}, own_step = steps[buffer][i], by = decays[buffer][i];
            load(x, from + 2 * STATE + own_column);
#pragma unroll
            for (int k = 0; k < 4; k++) change[k] = x[k] * own_step;
#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                float b[4], c[4];
                load(b, from + j * (STATE / PARTS) + row);
                load(c, from + STATE + j * (STATE / PARTS) + row);
#pragma unroll
                for (int r = 0; r < 4; r++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        float& element = state[4 * j + r][k];
                        element = element * by + b[r] * change[k];
                        found[k] += c[r] * element;
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int far = 16; far >= LANES; far /= 2)
                    found[k] += __shfl_xor_sync(0xFFFFFFFFu, found[k], far);
                found[k] += factor * x[k];
            }
            if (row == 0 && column < head_dim)
                store(read + size_t(start + i) * inner + head * head_dim + column, found);
        }
    }
    row = ptx::thread_index() % 32 / LANES * 4;  // so that no registers keep places from the loads above
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int at = i / 4 * (STATE / PARTS) + row + i % 4;
        if (at < size && column < head_dim) store(own + size_t(at) * head_dim, state[i]);
    }
}

// Multiplies a group of a token's outputs with the SiLU of their gates, and normalizes them (RMSNorm).
// Grid: (tokens, groups). A thread has up to MAX_EACH outputs in registers.
constexpr int MAX_EACH = 16;
template <class T>
__global__ void __launch_bounds__(1024, 1) norm_gated(
    T* out,              // [tokens, inner]
    const float* read,   // [tokens, inner]
    const T* projected,  // [tokens, stride], the gates first
    const T* norm,       // [inner]
    int size, int stride, float eps) {
    __shared__ float sums[32];
    ptx::wait_for_previous();
    size_t inner = size_t(gridDim.y) * size, token = blockIdx.x, first = size_t(blockIdx.y) * size;
    float values[MAX_EACH], square = 0;
#pragma unroll
    for (int i = 0; i < MAX_EACH; i++) {
        int at = i * blockDim.x + threadIdx.x;
        values[i] = 0;
        if (at >= size) continue;
        values[i] = read[token * inner + first + at];
        values[i] *= activated<SILU>(to_float(projected[token * stride + first + at]));
    }
#pragma unroll
    for (int i = 0; i < MAX_EACH; i++) square += values[i] * values[i];
    float scale = rsqrtf(block_sum(square, sums) / size + eps);
#pragma unroll
    for (int i = 0; i < MAX_EACH; i++) {
        int at = i * blockDim.x + threadIdx.x;
        if (at < size)
            out[token * inner + first + at] =
                from_float<T>(values[i] * scale * to_float(norm[first + at]));
    }
}
