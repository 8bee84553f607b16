// Definitions shared by kernels that choose tokens from a row of logits, in blocks of THREADS threads.
#pragma once

#include "numerics.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;

struct Params {  // PARAMS of sampling.py
    unsigned long long seed;
    long long top_k;  // 0: all
    double top_p, min_p;
    float temperature;
    bool greedy;

    __device__ float scaled(float logit) const {
        return temperature == 1 ? logit : __fdiv_rn(logit, temperature);
    }
};

// Maps floats to integers of the same order; both zeros have the same key.
__device__ inline unsigned to_key(float x) {
    unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_key(unsigned key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// Returns the k-th largest key of some elements. `count(key)` must return, in all threads of the block, the
// number of elements with at least this key.
template <class F> __device__ unsigned kth_key(long long k, F count) {
    unsigned key = 0;
#pragma unroll 1
    for (unsigned bit = 1u << 31; bit; bit >>= 1) {
        if (count(key | bit) >= k) key |= bit;
    }
    return key;
}

// A row of logits divided by a temperature. NaN counts as -inf, and values above `ceiling` as `ceiling`.
template <class T, int WIDTH> struct ScaledRow {
    const T* logits;
    int size;
    float temperature, ceiling;

    __device__ float scaled(float logit) const {
        float value = __fdiv_rn(logit, temperature);
        return isnan(value) ? -INFINITY : fminf(value, ceiling);
    }

    // Calls visit(values, id of the first value) for each group of WIDTH values that the thread has, with
    // LOADS loads in flight. Values past the end of the row are -inf.
    template <int LOADS, class F> __device__ void each(F visit) const {
        constexpr int STEP = THREADS * WIDTH;
        for (int first = threadIdx.x * WIDTH; first < size; first += LOADS * STEP) {
            float values[LOADS][WIDTH];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                if (first + i * STEP < size) {
                    load(values[i], logits + first + i * STEP);
                } else {
#pragma unroll
                    for (int j = 0; j < WIDTH; j++) values[i][j] = -INFINITY;
                }
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
#pragma unroll
                for (int j = 0; j < WIDTH; j++) values[i][j] = scaled(values[i][j]);
                visit(values[i], first + i * STEP);
            }
        }
    }
};

// The largest of some values, and the sum of e^(value - largest), which is 0 if all are -inf.
struct Mass {
    float largest;
    double sum;

    __device__ Mass with(Mass other) const {
        float most = fmaxf(largest, other.largest);
        return {most, sum * share(largest, most) + other.sum * share(other.largest, most)};
    }
    __device__ static float share(float value, float largest) {
        if (value == -INFINITY) return 0.0f;
        return ptx::exp2_approx((value - largest) * 1.4426950408889634f);
    }
};

// Returns, in every thread, the mass of a row, computed in one pass. `own_best` becomes the thread's
// largest value.
template <class T, int WIDTH>
__device__ Mass block_mass(const ScaledRow<T, WIDTH>& row, float& own_best) {
    __shared__ Mass masses[WARPS];
    float best = -INFINITY, sum = 0;
    row.template each<4>([&](const float(&values)[WIDTH], int) {
        float most = values[0];
#pragma unroll
        for (int i = 1; i < WIDTH; i++) most = fmaxf(most, values[i]);
        if (most > best) {
            sum *= Mass::share(best, most);
            best = most;
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i++) sum += Mass::share(values[i], best);
    });
    own_best = best;
    Mass mass{best, sum};
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        float largest = __shfl_xor_sync(~0u, mass.largest, step);
        mass = mass.with({largest, __shfl_xor_sync(~0u, mass.sum, step)});
    }
    if (threadIdx.x % 32 == 0) masses[threadIdx.x / 32] = mass;
    __syncthreads();
    mass = masses[0];
    for (int warp = 1; warp < WARPS; warp++) mass = mass.with(masses[warp]);
    return mass;
}
