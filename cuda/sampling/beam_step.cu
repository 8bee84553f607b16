// Finds the best continuations of beams, separately for each row of logits.
//
// Nothing is sorted: tokens that may be among the best are collected, and for each of them the number of
// tokens that rank above it is counted.
#include "sampling/choice.cuh"

constexpr int CANDIDATES = 4 * THREADS;

// Returns a token's rank. A higher log probability ranks higher; at equal log probabilities, a lower id.
__device__ inline unsigned long long to_rank(float value, int id) {
    return (unsigned long long)to_key(value) << 32 | (0xFFFFFFFFu - unsigned(id));
}
__device__ inline float value_of(unsigned long long rank) { return from_key(rank >> 32); }
__device__ inline int id_of(unsigned long long rank) { return int(0xFFFFFFFFu - unsigned(rank)); }

__device__ inline unsigned long long block_max(unsigned long long x) {
    __shared__ unsigned long long highest[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) highest[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 0; warp < WARPS; warp++) x = max(x, highest[warp]);
    return x;
}

// Grid: (rows).
template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 2) best_of_rows(
    int* tokens,           // [rows, most]
    float* log_probs,      // [rows, most]
    const T* logits,       // [rows, vocab_size]
    const Params* params,  // [slots]
    const int* slots,      // [rows]
    const int* counts,     // [rows]: the number of continuations to find; 0: nothing is written
    int vocab_size, int most) {
    ptx::wait_for_previous();
    __shared__ unsigned long long candidates[CANDIDATES];
    __shared__ int num_candidates;
    int wanted = min(counts[blockIdx.x], most), k = min(wanted, vocab_size);
    if (k <= 0) return;
    float temperature = params[slots[blockIdx.x]].temperature;
    ScaledRow<T, WIDTH> row{
        logits + size_t(blockIdx.x) * vocab_size, vocab_size, temperature, 3.402823466e38f};
    float own_best;
    Mass mass = block_mass(row, own_best);
    float log_sum = float(log(mass.sum));
    auto score = [&](float scaled) {
        if (scaled == -INFINITY) return -INFINITY;
        return __fsub_rn(__fsub_rn(scaled, mass.largest), log_sum);
    };
    auto count_row = [&](unsigned key) {
        int above = 0;
        row.template each<4>([&](const float(&values)[WIDTH], int id) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                above += to_key(score(values[i])) >= key && id + i < vocab_size;
            }
        });
        __syncthreads();
        if (threadIdx.x == 0) num_candidates = 0;
        __syncthreads();
        atomicAdd(&num_candidates, above);
        __syncthreads();
        return num_candidates;
    };
    // The k-th best token of the row does not rank below the k-th best of the threads' best tokens. If k
    // exceeds the number of threads, all tokens of the row are counted instead.
    unsigned own = to_key(score(own_best));
    unsigned bound = k <= THREADS
        ? kth_key(k, [&](unsigned key) { return __syncthreads_count(own >= key); })
        : kth_key(k, count_row);
    __syncthreads();
    if (threadIdx.x == 0) num_candidates = 0;
    __syncthreads();
    row.template each<4>([&](const float(&values)[WIDTH], int id) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            float value = score(values[i]);
            if (to_key(value) < bound || id + i >= vocab_size) continue;
            int index = atomicAdd(&num_candidates, 1);
            if (index < CANDIDATES) candidates[index] = to_rank(value, id + i);
        }
    });
    __syncthreads();
    int count = num_candidates;
    int* own_tokens = tokens + size_t(blockIdx.x) * most;
    float* own_log_probs = log_probs + size_t(blockIdx.x) * most;
    auto put = [&](int index, unsigned long long rank) {
        own_tokens[index] = id_of(rank);
        own_log_probs[index] = value_of(rank);
    };
    for (int i = k + int(threadIdx.x); i < most; i += THREADS) {
        own_tokens[i] = -1;
        own_log_probs[i] = -INFINITY;
    }
    if (count <= CANDIDATES) {
        for (int i = threadIdx.x; i < count; i += THREADS) {
            int above = 0;
            for (int j = 0; j < count && above < k; j++) above += candidates[j] > candidates[i];
            if (above < k) put(above, candidates[i]);
        }
        return;
    }
    unsigned long long last = ~0ull;  // too many tokens to collect: find one after the other
    for (int index = 0; index < k; index++) {
        unsigned long long best = 0;
        row.template each<1>([&](const float(&values)[WIDTH], int id) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                unsigned long long rank = to_rank(score(values[i]), id + i);
                if (rank < last && id + i < vocab_size) best = max(best, rank);
            }
        });
        last = block_max(best);
        if (threadIdx.x == 0) put(index, last);
    }
}
