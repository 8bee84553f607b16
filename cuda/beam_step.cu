// The best continuations of beams: of each row of logits by itself, then of all beams of a request.
// Nothing is sorted: what may be among the best is collected, and each counts what ranks above it.
#include "choice.cuh"

constexpr int CANDIDATES = 4 * THREADS;

// Ranks log probabilities, equal ones by ascending id; no two are equal.
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
template <int WIDTH>
__global__ void __launch_bounds__(THREADS, 2) best_of_rows(
    int* tokens,           // [rows, most]
    float* log_probs,      // [rows, most]
    const float* logits,   // [rows, vocab_size]
    const Params* params,  // [slots]
    const int* slots,      // [rows]
    const int* counts,     // [rows]: how many are wanted, 0: nothing is written
    int vocab_size, int most) {
    __shared__ unsigned long long candidates[CANDIDATES];
    __shared__ int num_candidates;
    int wanted = min(counts[blockIdx.x], most), k = min(wanted, vocab_size);
    if (k <= 0) return;
    float temperature = params[slots[blockIdx.x]].temperature;
    if (!(temperature > 0)) temperature = 1;
    ScaledRow<WIDTH> row{
        logits + size_t(blockIdx.x) * vocab_size, vocab_size, temperature, 3.402823466e38f};
    float own_best;
    Mass mass = block_mass(row, own_best);
    float log_sum = float(log(mass.sum));
    auto score = [&](float scaled) {
        if (scaled == -INFINITY) return -INFINITY;
        return __fsub_rn(__fsub_rn(scaled, mass.largest), log_sum);
    };
    // The k-th best of the threads' own best ones is not better than the k-th best of all.
    unsigned own = to_key(score(own_best));
    unsigned bound = kth_key(k, [&](unsigned key) { return __syncthreads_count(own >= key); });
    if (threadIdx.x == 0) num_candidates = 0;
    __syncthreads();
    row.template each<4>([&](const float(&values)[WIDTH], int id) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            float value = score(values[i]);
            if (to_key(value) < bound || id + i >= vocab_size) continue;
            int place = atomicAdd(&num_candidates, 1);
            if (place < CANDIDATES) candidates[place] = to_rank(value, id + i);
        }
    });
    __syncthreads();
    int count = num_candidates;
    int* own_tokens = tokens + size_t(blockIdx.x) * most;
    float* own_log_probs = log_probs + size_t(blockIdx.x) * most;
    auto put = [&](int place, unsigned long long rank) {
        own_tokens[place] = id_of(rank);
        own_log_probs[place] = value_of(rank);
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
    unsigned long long last = ~0ull;  // very many ties: one after the other
    for (int place = 0; place < k; place++) {
        unsigned long long best = 0;
        row.template each<1>([&](const float(&values)[WIDTH], int id) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                unsigned long long rank = to_rank(score(values[i]), id + i);
                if (rank < last && id + i < vocab_size) best = max(best, rank);
            }
        });
        last = block_max(best);
        if (threadIdx.x == 0) put(place, last);
    }
}

constexpr int MERGE_THREADS = 128;

// Grid: (requests).
__global__ void __launch_bounds__(MERGE_THREADS) merge_beams(
    int* tokens, int* beams, float* sums, float* log_probs,  // [requests, kept]
    const int* row_tokens,       // [rows, most]: those of best_of_rows
    const float* row_log_probs,  // [rows, most]
    const int* counts,           // [rows]
    const float* totals,         // [rows]: cumulative log probabilities
    const int* firsts,           // [requests + 1]: where the beams of each begin among the rows
    int vocab_size, int most, int kept) {
    int first = firsts[blockIdx.x], num_beams = firsts[blockIdx.x + 1] - first;
    int wanted = num_beams > 0 ? min(counts[first], most) : 0, size = min(wanted, vocab_size);
    int limit = min(min(kept, wanted + size), num_beams * size);
    size_t own = size_t(blockIdx.x) * kept;
    for (int i = max(limit, 0) + int(threadIdx.x); i < kept; i += MERGE_THREADS) {
        tokens[own + i] = beams[own + i] = -1;
        sums[own + i] = log_probs[own + i] = -INFINITY;
    }
    for (int i = threadIdx.x; i < num_beams * size; i += MERGE_THREADS) {
        int beam = i / size, place = i - beam * size, rank = 0;
        size_t from = size_t(first + beam) * most + place;
        int token = row_tokens[from];
        float sum = __fadd_rn(row_log_probs[from], totals[first + beam]);
        for (int other = 0; other < num_beams && rank < limit; other++) {
            const int* list = row_tokens + size_t(first + other) * most;
            const float* scores = row_log_probs + size_t(first + other) * most;
            float total = totals[first + other];
            // How many of a list, which descends, are above; of a lower beam's also those that tie.
            int low = 0, high = size;
            while (low < high) {
                int middle = (low + high) / 2;
                float value = __fadd_rn(scores[middle], total);
                if (value > sum || (other < beam && value == sum)) low = middle + 1;
                else high = middle;
            }
            rank += low;
            if (other != beam) continue;
            for (int tie = low; tie < size && __fadd_rn(scores[tie], total) == sum; tie++)
                rank += list[tie] < token;
        }
        if (rank >= limit) continue;
        tokens[own + rank] = token;
        beams[own + rank] = beam;
        sums[own + rank] = sum;
        log_probs[own + rank] = row_log_probs[from];
    }
}
