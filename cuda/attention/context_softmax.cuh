// Online softmax in registers, from the scores of a tile to weights and results; shared by the kernels of
// context attention. A warp has MATRICES matrices of 16 queries each, in fragments of mma.m16n8k16. A lane
// has rows g and g + 8 (g = lane / 4), and of every 8 columns the columns 2t and 2t + 1 (t = lane % 4).
#pragma once

#include "attention/context_work.cuh"

template <class K> struct WarpState {
    float out[K::MATRICES][K::D / 8][4];  // row g, d = 2t and 2t + 1; row g + 8, same d
    float largest[K::MATRICES][2];        // largest unscaled score of rows g and g + 8
    float sum[K::MATRICES][2];            // sum of weights in this lane's columns only
};

template <class K> using TileScores = float[K::MATRICES][K::TOKENS / 8][4];
// The left operand of the matmul with values.
template <class K> using TileWeights = unsigned[K::MATRICES][K::TOKENS / 16][4];

// Returns threadIdx.x. With D == 128 it is read anew: values computed from it earlier would take registers.
template <class K> __device__ inline int thread_index() {
    if constexpr (K::D == 128) return ptx::thread_index();
    else return threadIdx.x;
}

template <class K> __device__ inline void reset(WarpState<K>& state) {
    state = {};
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++)
        state.largest[m][0] = state.largest[m][1] = -INFINITY;
}

// Begins the softmax of each query with the learned score of its head, as in `begin_with`. Only the first
// of a query's four lanes has the score in its sum. `warp`: index of the warp in the block. `scale`:
// factor that converts scores to exponents of 2.
template <class K, class T = typename K::T>
__device__ inline void begin(WarpState<K>& state, const T* head_scores, const Work<K>& work, int warp,
                             float scale) {
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int packed = work.first_query + (warp * K::MATRICES + m) * 16 + half * 8;
            packed += threadIdx.x % 32 / 4;
            Softmax softmax = begin_with(head_scores, blockIdx.y * work.group + packed % work.group);
            state.largest[m][half] = softmax.largest / scale;
            state.sum[m][half] = threadIdx.x % 4 == 0 ? softmax.sum : 0.0f;
        }
    }
}

template <class K> __device__ inline void cap(TileScores<K>& scores, const Scores& to_score) {
#pragma unroll
    for (int i = 0; i < K::MATRICES * K::TOKENS / 2; i++) {
        float& score = scores[i * 2 / K::TOKENS][i / 4 % (K::TOKENS / 8)][i % 4];
        score = to_score.capped(score);
    }
}

// Sets the scores of keys that a query must not see to -inf. `packed`: index of the packed query
// that has its scores in the lane's row g of the warp's first matrix.
template <class K>
__device__ inline void mask(TileScores<K>& scores, const Work<K>& work, int packed, Tile tile,
                            Window window) {
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int position = work.position(packed + m * 16 + half * 8);
            int key = tile.start + thread_index<K>() % 4 * 2;
            // A query sees the keys in (low, high].
            int low = window.before(position), high = position;
            if (K::SINK) {
                low = tile.sinking ? -1 : max(low, work.tiles.sink - 1);
                high = tile.sinking ? min(high, work.tiles.sink - 1) : high;
            }
#pragma unroll
            for (int n = 0; n < K::TOKENS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int at = key + n * 8 + i;
                    if (at <= low || at > high) scores[m][n][2 * half + i] = -INFINITY;
                }
            }
        }
    }
}

// Converts the scores of matrix `m` to weights, updates `largest` and `sum` of the state, and sets `factors`,
// which rescale earlier results to the new largest score.
template <class K>
__device__ inline void to_weights(float (&scores)[K::TOKENS / 8][4], WarpState<K>& state,
                                  float (&factors)[2], int m, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = state.largest[m][half];
#pragma unroll
        for (int n = 0; n < K::TOKENS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) largest = fmaxf(largest, scores[n][2 * half + i]);
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        // All weights are 0 until the row has seen a key.
        float zero = largest == -INFINITY ? 0.0f : largest * scale;
        factors[half] = ptx::exp2_approx(state.largest[m][half] * scale - zero);
        state.largest[m][half] = largest;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < K::TOKENS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& score = scores[n][2 * half + i];
                score = ptx::exp2_approx(score * scale - zero);
                sum += score;
            }
        }
        state.sum[m][half] = state.sum[m][half] * factors[half] + sum;
    }
}

template <class K>
__device__ inline void rescale(WarpState<K>& state, const float (&factors)[2], int m) {
#pragma unroll
    for (int n = 0; n < K::D / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) state.out[m][n][i] *= factors[i / 2];
    }
}

template <class K>
__device__ inline void pack_weights(unsigned (&weights)[K::TOKENS / 16][4],
                                    const float (&scores)[K::TOKENS / 8][4]) {
#pragma unroll
    for (int k = 0; k < K::TOKENS / 16; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&both)[4] = scores[2 * k + i / 2];
            weights[k][i] = pack<typename K::T>(both[i % 2 * 2], both[i % 2 * 2 + 1]);
        }
    }
}

// Stores the results of warp `warp` of the block, divided by the sums of weights and times `scale`.
template <class K, class T = typename K::T>
__device__ inline void store_results(T* out, WarpState<K>& state, const Work<K>& work, int warp,
                                     float scale) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor = 1 / warp_sum<4>(state.sum[m][half]) * scale;
            int packed = work.first_query + (warp * K::MATRICES + m) * 16 + half * 8 + g;
            if (packed >= work.num_packed) continue;
            T* to = out + work.offset(packed) + 2 * t;
#pragma unroll
            for (int n = 0; n < K::D / 8; n++)
                *reinterpret_cast<unsigned*>(to + n * 8) = pack<T>(
                    state.out[m][n][2 * half] * factor, state.out[m][n][2 * half + 1] * factor);
        }
    }
}
