// A row of logits as a block reads it, and what its threads make of it together.
#pragma once

#include "choice.cuh"

struct Token {
    float logit;
    int id;
    // Equal logits rank by ascending id.
    __device__ bool above(Token other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

template <int WIDTH> struct Row {
    const float* logits;
    int size, forbidden;  // a token that may not come yet, or -1

    // A warp takes a stretch of ids, so that sums by warp are in their order.
    __device__ int stretch() const {
        constexpr int STEP = 32 * WIDTH;
        return (size + WARPS * STEP - 1) / (WARPS * STEP) * STEP;
    }
    __device__ int begin() const { return threadIdx.x / 32 * stretch(); }
    __device__ int end() const { return min(begin() + stretch(), size); }

    // The logits of ids start to start + WIDTH - 1, -inf where there is none, +inf for NaN.
    __device__ void read(float (&to)[WIDTH], int start) const {
        if (start < size) load(to, logits + start);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            bool none = start >= size || start + i == forbidden;
            if (none || isnan(to[i])) to[i] = none ? -INFINITY : INFINITY;
        }
    }
    // visit(logit, id) for every token of the warp's stretch, ascending in each thread.
    template <class F> __device__ void each(F visit) const {
        for (int start = begin() + threadIdx.x % 32 * WIDTH; start < end(); start += 32 * WIDTH) {
            float values[WIDTH];
            read(values, start);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) visit(values[i], start + i);
        }
    }
};

__device__ inline Token better(Token a, Token b) { return b.above(a) ? b : a; }

__device__ inline Token block_best(Token best) {
    __shared__ Token bests[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        best = better(best, {__shfl_xor_sync(~0u, best.logit, step), __shfl_xor_sync(~0u, best.id, step)});
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < WARPS; warp++) best = better(best, bests[warp]);
    return best;
}

// Sums by warp in the order of ids, and their sum. Every thread gets it.
__device__ inline double block_sums(double (&sums)[WARPS], double x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    double total = 0;
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp];
    return total;
}
