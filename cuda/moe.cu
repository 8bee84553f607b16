// A mixture of experts. Each token chooses `per_token` experts. Slot `token * per_token + i` is choice i of a
// token. The slots are sorted by expert and cut into tiles; the matmuls of a tile read the matrices of its
// expert; and the outputs of a token's slots are summed. The launches do not depend on which experts are
// chosen, so they can be captured in a CUDA graph.
//
// The bits of a row of a result depend neither on other rows nor on the size of tiles.
#include "gemm/float8_weights.cuh"
#include "gemm/gemm_tiles.cuh"

constexpr int MAX_EXPERTS = 1024;  // equal to that in moe.py
enum Score { SOFTMAX, SIGMOID, SOFTMAX_OF_BEST, SIGMOID_OF_BEST };

struct Best {
    float value = -INFINITY;
    int index = 1 << 30;

    __device__ void consider(float other, int at) {
        if (other > value || (other == value && at < index)) value = other, index = at;
    }
};

// Returns the index of the largest of `values`, in every lane; of equal values the first. NaN is ignored.
__device__ inline int best_of(const float* values, int count) {
    Best best;
    for (int i = threadIdx.x; i < count; i += 32) best.consider(values[i], i);
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        best.consider(__shfl_xor_sync(0xFFFFFFFFu, best.value, step),
                      __shfl_xor_sync(0xFFFFFFFFu, best.index, step));
    return best.index;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

// Returns the mark of a value that has been chosen: NaN, which `best_of` ignores.
__device__ inline float taken() { return __int_as_float(0x7FC00000); }

// Returns x, or inf if x is NaN, which `best_of` would ignore: an expert with NaN is chosen, as in torch, so
// that the output shows it.
__device__ inline float ranking(float x) { return x == x ? x : INFINITY; }

// Sets the ranks of experts to -inf in all groups except the `top_groups` best. The quality of a group is its
// best rank, or with `two_best` the sum of its two best ranks. A lane writes what it alone reads in `best_of`:
// elements lane, lane + 32, ... of `quality`, then of `ranks`.
__device__ inline void keep_best_groups(float* ranks, float* quality, int num_experts, int groups,
                                        int top_groups, bool two_best) {
    int size = num_experts / groups;
    for (int group = threadIdx.x; group < groups; group += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < size; i++) {
            float rank = ranks[group * size + i];
            second = fmaxf(second, fminf(first, rank));
            first = fmaxf(first, rank);
        }
        quality[group] = ranking(two_best && size > 1 ? first + second : first);
    }
    for (int i = 0; i < top_groups; i++) {
        int group = best_of(quality, groups);
        __syncwarp();
        if (threadIdx.x == 0) quality[group] = taken();
        __syncwarp();
    }
    for (int expert = threadIdx.x; expert < num_experts; expert += 32)
        if (quality[expert / size] == quality[expert / size]) ranks[expert] = -INFINITY;
}

// Chooses the experts of each token, the best first. Grid: (tokens), a warp each.
__global__ void __launch_bounds__(32) choose_experts(
    int* chosen,              // [tokens, per_token]
    float* weights,           // [tokens, per_token]
    const float* logits,      // [tokens, experts]
    const float* correction,  // [experts], added to the scores for the choice, not for the weights; or null
    int num_experts, int per_token, int score, int groups, int top_groups, int two_best,
    int renormalize, float factor, float sum_eps) {
    __shared__ float scores[MAX_EXPERTS], ranks[MAX_EXPERTS], quality[MAX_EXPERTS];
    ptx::wait_for_previous();
    logits += size_t(blockIdx.x) * num_experts;
    float largest = -INFINITY, sum = 0;
    for (int expert = threadIdx.x; expert < num_experts; expert += 32)
        largest = fmaxf(largest, logits[expert]);
    largest = warp_max(largest);
    for (int expert = threadIdx.x; expert < num_experts; expert += 32)
        sum += expf(logits[expert] - largest);
    sum = warp_sum(sum);
    for (int expert = threadIdx.x; expert < num_experts; expert += 32) {
        float logit = logits[expert], own = logit;
        if (score == SOFTMAX) own = expf(logit - largest) / sum;
        if (score == SIGMOID) own = 1 / (1 + expf(-logit));
        scores[expert] = own;
        ranks[expert] = ranking(correction ? own + correction[expert] : own);
    }
    __syncwarp();
    if (groups > 1) keep_best_groups(ranks, quality, num_experts, groups, top_groups, two_best);
    int mine = 0, lane = threadIdx.x;  // lane i has choice i
    for (int i = 0; i < per_token; i++) {
        int expert = best_of(ranks, num_experts);
        __syncwarp();
        if (lane == 0) ranks[expert] = taken();
        __syncwarp();
        if (lane == i) mine = expert;
    }
    bool has = lane < per_token;
    float weight = has ? scores[mine] : 0.0f;
    if (score == SOFTMAX_OF_BEST) {
        float most = warp_max(has ? weight : -INFINITY);
        weight = has ? expf(weight - most) : 0.0f;
        weight /= warp_sum(weight);
    }
    if (score == SIGMOID_OF_BEST) weight = has ? 1 / (1 + expf(-weight)) : 0.0f;
    if (renormalize) weight /= warp_sum(weight) + sum_eps;
    if (!has) return;
    chosen[blockIdx.x * per_token + lane] = mine;
    weights[blockIdx.x * per_token + lane] = weight * factor;
}

// The sorted slots [first, last) of the expert `first_expert + expert`; no tile if `expert` is -1.
struct ExpertTile {
    int expert, first, last;
};

// Returns the sum of x over the earlier threads of the block, and in `total` the sum over all threads.
__device__ inline int sum_before(int x, int (&sums)[33], int& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp + 1] = sum;
    if (threadIdx.x == 0) sums[0] = 0;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i <= blockDim.x / 32; i++) sums[i] += sums[i - 1];
    __syncthreads();
    total = sums[blockDim.x / 32];
    return sums[warp] + sum - x;
}

// Sorts the slots of `num_experts` experts, from `first_expert` on, by expert, and cuts them into tiles.
// Grid: one block. The order of an expert's slots varies from run to run, but changes no bits of a row.
__global__ void __launch_bounds__(MAX_EXPERTS, 1) sort_slots(
    int* sorted,        // [slots]
    ExpertTile* tiles,  // [max_tiles]
    const int* chosen,  // [slots]
    int num_slots, int first_expert, int num_experts, int max_tiles, int tile_rows) {
    __shared__ int counts[MAX_EXPERTS], sums[2][33];
    ptx::wait_for_previous();
    int own = threadIdx.x, num_tiles, total;
    counts[own] = 0;
    __syncthreads();
    for (int slot = own; slot < num_slots; slot += MAX_EXPERTS) {
        int expert = chosen[slot] - first_expert;
        if (expert >= 0 && expert < num_experts) atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
    int count = counts[own], tiles_of_expert = (count + tile_rows - 1) / tile_rows;
    int first = sum_before(count, sums[0], total);
    int tile = sum_before(tiles_of_expert, sums[1], num_tiles);
    for (int i = 0; i < tiles_of_expert; i++) {
        int begin = first + i * tile_rows;
        tiles[tile + i] = {own, begin, min(begin + tile_rows, first + count)};
    }
    for (int i = num_tiles + own; i < max_tiles; i += MAX_EXPERTS) tiles[i] = {-1, 0, 0};
    counts[own] = first;  // the place of the expert's next slot
    __syncthreads();
    for (int slot = own; slot < num_slots; slot += MAX_EXPERTS) {
        int expert = chosen[slot] - first_expert;
        if (expert >= 0 && expert < num_experts) sorted[atomicAdd(&counts[expert], 1)] = slot;
    }
}

// out[slot] = x[slot / slots_per_row] @ weight[expert]^T (+ bias[expert]), by tensor cores. GATED is as in
// gemm_tiles.cuh. Grid: (max_tiles, parts of the width). Dynamic shared memory: STAGES stages.
template <class T, int M, int STAGES, bool GATED, Activation KIND, class W = T>
__global__ void __launch_bounds__(THREADS, 2) expert_gemm(
    T* out,                   // [slots, width]
    const T* x,               // [slots / slots_per_row, depth]
    const W* weight,          // [experts, width, depth], with GATED [experts, 2 * width, depth]
    const float* scales,      // [experts, width], with GATED [experts, 2 * width]; null unless W has 8 bits
    const T* bias,            // shaped like `scales`; or null
    const int* sorted,        // [slots]
    const ExpertTile* tiles,  // [max_tiles]
    int slots_per_row, int width, int depth) {  // depth: a multiple of 8, or of 16 if W has 8 bits
    using K = Kind<T, M, 4, STAGES, 2, GATED, KIND, W>;
    ptx::wait_for_previous();
    ExpertTile tile = tiles[blockIdx.x];
    if (tile.expert < 0) return;
    T* stages = reinterpret_cast<T*>(ptx::dynamic_shared());
    size_t expert_rows = size_t(tile.expert) * width * (GATED ? 2 : 1);
    const W* own_weight = weight + expert_rows * depth;
    int num_rows = tile.last - tile.first, rounds = (depth + DEPTH - 1) / DEPTH;
    int own = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;
    const T* sources[M];  // the rows of x that this thread copies
#pragma unroll
    for (int i = 0; i < M; i++) {
        int row = tile.first + min(own + i * COPIED, num_rows - 1);
        sources[i] = x + size_t(sorted[row] / slots_per_row) * depth;
    }
    auto copy = [&](int round) {
        if (round < rounds) {
            T* stage = stages + round % STAGES * K::STAGE;
            T* to = stage + own * DEPTH + swizzled(own, vector);
            copy_weights<K>(stage + K::ROWS * DEPTH, own_weight, round, blockIdx.y, width, depth);
            int element = round * DEPTH + vector * 8;
            bool inside = element < depth;
            int start = inside ? element : 0;  // the address must be valid even if nothing is copied
#pragma unroll
            for (int i = 0; i < M; i++)
                ptx::cp_async_16(to + i * COPIED * DEPTH, sources[i] + start,
                                 inside && own + i * COPIED < num_rows);
        }
        ptx::cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) copy(i);
    TileSums<K> sums(num_rows);
    for (int round = 0; round < rounds; round++) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncthreads();
        copy(round + STAGES - 1);  // overwrites the round that all warps have finished
        sums.add_round(stages + round % STAGES * K::STAGE);
    }
    auto place = [&](int row) { return sorted[tile.first + row]; };
    const T* own_bias = bias ? bias + expert_rows : nullptr;
    const float* own_scales = scales ? scales + expert_rows : nullptr;
    sums.store(out, own_scales, own_bias, blockIdx.y * K::COLUMNS, num_rows, width, place);
}

// `expert_gemm` without tensor cores, for float32 and for any depth: a warp computes a column for all rows
// of a tile. Grid: (max_tiles, parts of 4 columns).
template <class T, bool GATED, Activation KIND, class W = T>
__global__ void __launch_bounds__(128) expert_columns(
    T* out, const T* x, const W* weight, const float* scales, const T* bias, const int* sorted,
    const ExpertTile* tiles, int slots_per_row, int width, int depth) {
    ptx::wait_for_previous();
    ExpertTile tile = tiles[blockIdx.x];
    int lane = threadIdx.x % 32, column = blockIdx.y * 4 + threadIdx.x / 32;
    if (tile.expert < 0 || column >= width) return;
    size_t first = size_t(tile.expert) * width * (GATED ? 2 : 1) + column;
    const W *own = weight + first * depth, *other = own + size_t(GATED ? width : 0) * depth;
    auto scale_of = [&](size_t row) { return sizeof(W) < sizeof(T) ? scales[row] : 1.0f; };
    for (int row = tile.first; row < tile.last; row++) {
        int slot = sorted[row];
        const T* from = x + size_t(slot / slots_per_row) * depth;
        float sum = 0, up = 0;
        for (int k = lane; k < depth; k += 32) {
            float value = to_float(from[k]);
            sum += value * to_float(own[k]);
            if constexpr (GATED) up += value * to_float(other[k]);
        }
        sum = warp_sum(sum) * scale_of(first) + (bias ? to_float(bias[first]) : 0.0f);
        if constexpr (GATED) {
            up = warp_sum(up) * scale_of(first + width) + (bias ? to_float(bias[first + width]) : 0.0f);
            sum = gated<KIND>(sum, up);
        }
        if (lane == 0) out[size_t(slot) * width + column] = from_float<T>(sum);
    }
}

// out[token] = sum of weight * output over the token's slots, in their order. Slots of experts that are not
// among the `num_experts` from `first_expert` on are left out. Grid: (tokens, parts of the width). A thread
// computes WIDTH elements.
template <class T, int WIDTH>
__global__ void mix_outputs(
    T* out,                // [tokens, width]
    const T* outputs,      // [tokens, per_token, width]
    const int* chosen,     // [tokens, per_token]
    const float* weights,  // [tokens, per_token]
    int per_token, int first_expert, int num_experts, int width) {
    ptx::wait_for_previous();
    int column = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
    if (column >= width) return;
    float sums[WIDTH] = {};
    for (int i = 0; i < per_token; i++) {
        size_t slot = size_t(blockIdx.x) * per_token + i;
        int expert = chosen[slot] - first_expert;
        if (expert < 0 || expert >= num_experts) continue;
        float own[WIDTH], weight = weights[slot];
        load(own, outputs + slot * width + column);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sums[j] += weight * own[j];
    }
    store(out + size_t(blockIdx.x) * width + column, sums);
}
