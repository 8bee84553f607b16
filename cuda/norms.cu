// With ADD: residual += x, out = normalize(residual) * weight (+ bias).
// Without ADD: out = normalize(x) * weight (+ bias).
// RMSNorm: x / sqrt(mean(x^2) + eps). LayerNorm (CENTERED): (x - mean) / sqrt(variance + eps).
// With PLUS_ONE, the factor is weight + 1 instead of weight, computed in float (not rounded to T).
#include "numerics.cuh"

// If CENTERED, subtracts the row's mean from `values`. Returns 1 / sqrt(mean of the row's squares + eps).
// `values`: the thread's elements of the row. `sum`: the sum of `values`, only used if CENTERED.
template <bool CENTERED, int WIDTH, int COUNT>
__device__ inline float standardize(float (&values)[COUNT][WIDTH], float sum, int width, float eps) {
    __shared__ float sums[32], squares[32];
    float mean = CENTERED ? block_sum(sum, sums) / width : 0.0f;
    float square = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if ((i * blockDim.x + threadIdx.x) * WIDTH >= width) continue;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            values[i][j] -= mean;
            square += values[i][j] * values[i][j];
        }
    }
    return rsqrtf(block_sum(square, squares) / width + eps);
}

// One block per token. Each thread holds COUNT vectors of WIDTH elements in registers, so that each
// element is read once. The residual sum is rounded to T before it is normalized, because the next
// layer reads it rounded. Weight and bias are prefetched while the previous kernel still runs.
template <class T, int WIDTH, int COUNT, bool CENTERED, bool ADD, bool PLUS_ONE = false>
__global__ void __launch_bounds__(1024, 1) norm(
    T* out,           // [tokens, width], may be x
    T* residual,      // [tokens, width], changed; null without ADD
    const T* x,       // [tokens, width]
    const T* weight,  // [width]
    const T* bias,    // [width] or null
    int width, float eps) {
    size_t row = size_t(blockIdx.x) * width;
    float values[COUNT][WIDTH];
    constexpr bool EARLY = COUNT == 1;  // enough registers to load the weight with x
    Vector<T, WIDTH> factors[COUNT], offsets[COUNT] = {};
    auto load_weight = [&](int i, int column) {
        factors[i] = *reinterpret_cast<const Vector<T, WIDTH>*>(weight + column);
        if (bias) offsets[i] = *reinterpret_cast<const Vector<T, WIDTH>*>(bias + column);
    };
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int column = (i * blockDim.x + threadIdx.x) * WIDTH;
        if (column >= width) continue;
        ptx::prefetch_l2(weight + column);
        if (bias) ptx::prefetch_l2(bias + column);
    }
    ptx::wait_for_previous();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int column = (i * blockDim.x + threadIdx.x) * WIDTH;
        if (column >= width) continue;
        load(values[i], x + row + column);
        if constexpr (EARLY) load_weight(i, column);
        if constexpr (ADD) {
            float before[WIDTH];
            load(before, residual + row + column);
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                values[i][j] = to_float(from_float<T>(values[i][j] + before[j]));
            store(residual + row + column, values[i]);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sum += CENTERED ? values[i][j] : 0.0f;
    }
    float scale = standardize<CENTERED>(values, sum, width, eps);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int column = (i * blockDim.x + threadIdx.x) * WIDTH;
        if (column >= width) continue;
        if constexpr (!EARLY) load_weight(i, column);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            if constexpr (PLUS_ONE)
                values[i][j] = values[i][j] * scale * (to_float(factors[i].values[j]) + 1) +
                               to_float(offsets[i].values[j]);
            else
                values[i][j] = values[i][j] * scale * to_float(factors[i].values[j]) +
                               to_float(offsets[i].values[j]);
        }
        store(out + row + column, values[i]);
    }
}

// Normalizes each part (such as a head) of each row of x, in place. A part has `width` columns. The parts
// are adjacent, and the first one begins at column `first`. Grid: (tokens, parts).
template <class T, int WIDTH, int COUNT, bool CENTERED>
__global__ void __launch_bounds__(1024, 1) norm_heads(
    T* x,             // [tokens, stride]
    const T* weight,  // [parts * width]
    int first, int width, int stride, float eps) {
    T* row = x + size_t(blockIdx.x) * stride + first + blockIdx.y * width;
    weight += blockIdx.y * width;
    float values[COUNT][WIDTH], sum = 0;
    ptx::wait_for_previous();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int column = (i * blockDim.x + threadIdx.x) * WIDTH;
        if (column >= width) continue;
        load(values[i], row + column);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sum += CENTERED ? values[i][j] : 0.0f;
    }
    float scale = standardize<CENTERED>(values, sum, width, eps);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int column = (i * blockDim.x + ptx::thread_index()) * WIDTH;
        if (column >= width) continue;
        float factors[WIDTH];
        load(factors, weight + column);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) values[i][j] *= scale * factors[j];
        store(row + column, values[i]);
    }
}
