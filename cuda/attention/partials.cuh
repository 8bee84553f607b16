// Rows that are divided into several items: a block writes a partial result for each item, and the block that
// finishes last merges the partial results of the row.
#pragma once

#include "attention/pages.cuh"

// Positions [first, last) of a row. `partial`: index of the item's partial result, or -1 if the item is the
// only item of its row.
struct Item {
    int row, first, last, partial;
};

__device__ inline Item load_early(const Item* item) {
    return {ptx::load_early(&item->row), ptx::load_early(&item->first), ptx::load_early(&item->last),
            ptx::load_early(&item->partial)};
}

// Whether the item is the first of its row.
__device__ inline bool is_first(Item item, const int* partial_starts) {
    return item.partial < 0 || item.partial == partial_starts[item.row];
}

// The weighted sum of partial results of one head, computed by a warp; lane l holds elements l, l + 32, ...
// AT_ONCE, a divisor of 32, is the number of partial results that are loaded together.
template <int D, int AT_ONCE> struct PartialSum {
    static constexpr int COUNT = (D + 31) / 32;
    int lane = threadIdx.x % 32;
    Softmax softmax;
    float result[COUNT] = {};

    __device__ bool has(int i) const { return D % 32 == 0 || lane + 32 * i < D; }

    // Adds `count` <= 32 partial results, `stride` heads apart. Loads bypass L1, which may hold stale bytes.
    __device__ void add(const float* partial, const float* partial_log, int count, int stride) {
        float log = lane < count ? __ldcg(partial_log + ptrdiff_t(lane) * stride) : -INFINITY;
        float largest = log;
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
        float factor = softmax.raise(largest);
        float weight = ptx::exp2_approx(log - softmax.largest);  // 0 in lanes from `count` on
#pragma unroll
        for (int i = 0; i < COUNT; i++) result[i] *= factor;
        for (int first = 0; first < count; first += AT_ONCE) {
            float loaded[AT_ONCE][COUNT];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const float* from = partial + ptrdiff_t(first + j) * stride * D + lane;
#pragma unroll
                for (int i = 0; i < COUNT; i++)
                    loaded[j][i] = first + j < count && has(i) ? __ldcg(from + 32 * i) : 0;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                float own = __shfl_sync(0xFFFFFFFFu, weight, first + j);
                softmax.sum += own;
#pragma unroll
                for (int i = 0; i < COUNT; i++) result[i] += own * loaded[j][i];
            }
        }
    }
    template <class T> __device__ void write(T* to) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (has(i)) to[lane + 32 * i] = from_float<T>(result[i] / softmax.sum);
    }
};

// The partial results of all rows, and the number of blocks of each row that have written theirs.
struct Partials {
    float* results;     // [partials, heads, D]
    float* logs;        // [partials, heads]: log2 of the sum of 2^score
    unsigned* arrived;  // [rows, kv heads]; zeros before and after the launch
    const int* starts;  // [rows + 1]: the first partial result of each row
};

// All threads of a block of WARPS warps call this after writing their partial results of a row, for KV
// head blockIdx.y of gridDim.y. The last block to call it writes
//     sum of 2^(log - largest log) * result / sum of 2^(log - largest log)
// to `out` [group, D]. The partial results are added in the order of the items, so `out` does not depend on
// which block is the last.
template <int WARPS, int D, int AT_ONCE, class T>
__device__ inline void merge_if_last(T* out, const Partials& partials, int row, int group) {
    int first = partials.starts[row], count = partials.starts[row + 1] - first;
    if (!is_last_block(partials.arrived + row * gridDim.y + blockIdx.y, count)) return;
    int num_heads = group * gridDim.y;
    for (int own = threadIdx.x / 32; own < group; own += WARPS) {
        PartialSum<D, AT_ONCE> sum;
        for (int i = 0; i < count; i += 32) {
            size_t head = size_t(first + i) * num_heads + blockIdx.y * group + own;
            sum.add(partials.results + head * D, partials.logs + head, min(count - i, 32), num_heads);
        }
        sum.write(out + own * D);
    }
}
