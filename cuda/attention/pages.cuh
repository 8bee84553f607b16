// Rows of paged keys and values, their layout in shared memory, and the softmax over their scores.
#pragma once

#include "attention/fp8.cuh"

// The pages `[blocks, kv_heads, tokens_per_block, D]` of one layer, for one sequence and one KV head, as
// rows of D elements. Row numbers fit 31 bits: a layer with more rows would not fit a device.
template <class C, int D> struct Pages {
    const C* memory;   // first row of the KV head in block 0
    const int* table;  // position / tokens_per_block -> block
    int tokens_per_block;
    int shift;       // log2(tokens_per_block); -1 if it is not a power of two
    int block_rows;  // rows from one block to the next

    // The row of the token at a position, relative to `memory`. `early`: see `ptx::load_early`.
    __device__ int row(int position, bool early = false) const {
        int number = shift >= 0 ? position >> shift : position / tokens_per_block;
        int block = early ? ptx::load_early(table + number) : table[number];
        return block * block_rows + position - number * tokens_per_block;
    }
    __device__ size_t offset(int position) const { return size_t(row(position)) * D; }
};

struct Window {  // a query sees the keys in [first(position), position]
    // Above 0: the last `size` keys. Below 0: the query's chunk, where chunks begin at multiples of -size, a
    // power of two. 0: all keys.
    int size;
    __device__ int first(int position) const { return before(position) + 1; }
    __device__ int before(int position) const {
        return size > 0 ? position - size : (position & size) - 1;
    }
    __device__ bool sees(int position, int key) const {
        return key <= position && key >= first(position);
    }
};

// The stride of rows of D elements in shared memory, in elements: an odd multiple of 16 bytes, so that
// eight rows at the same column are in different banks.
template <class T, int D> constexpr int ROW = D + (D / WIDE<T> % 2 ? 0 : WIDE<T>);

template <class C, int D>
__device__ inline Pages<C, D> find_pages(
    const C* pages, const int* table, int kv_head, int num_kv_heads, int tokens_per_block) {
    bool is_power = __popc(tokens_per_block) == 1;
    return {pages + size_t(kv_head) * tokens_per_block * D, table, tokens_per_block,
            is_power ? __ffs(tokens_per_block) - 1 : -1,
            num_kv_heads * tokens_per_block};
}

// The state of an online softmax: the largest score (an exponent of 2), and the sum of 2^(score - largest).
struct Softmax {
    float largest = -INFINITY, sum = 0;

    // Raises `largest` to at least `score`. Returns the factor that rescales earlier results to the new
    // `largest`; `sum` is rescaled.
    __device__ float raise(float score) {
        float before = largest;
        largest = fmaxf(largest, score);
        float factor = ptx::exp2_approx(before - largest);
        sum *= factor;
        return factor;
    }
};

// Converts q . k to a score, as an exponent of 2.
struct Scores {
    static constexpr float LOG2_E = 1.4426950408889634f;
    float scale, softcap;  // both times log2(e)
    float tanh_scale;      // 2 log2(e) * scale / softcap; 0 without a softcap
    __device__ Scores(float scale, float softcap)
        : scale(scale * LOG2_E), softcap(softcap * LOG2_E),
          tanh_scale(softcap > 0 ? 2 * LOG2_E * scale / softcap : 0.0f) {}
    __device__ float operator()(float dot) const {
        return tanh_scale == 0 ? dot * scale : capped(dot);
    }
    // softcap * tanh(score / softcap), where tanh(x) = 1 - 2 / (e^2x + 1).
    __device__ float capped(float dot) const {
        return softcap * (1 - 2 * __fdividef(1, ptx::exp2_approx(dot * tanh_scale) + 1));
    }
};

// Returns the state of a softmax that has seen only the learned score of a head. This score is in the sum of
// the softmax, but no value belongs to the score. Such scores are `sinks` of AttentionShape, as in gpt-oss;
// `sink`, the number of first tokens that all queries see, is unrelated. Only kernels for heads with such
// scores have one more template argument, `const T*`, and one more parameter of this type.
template <class T> __device__ inline Softmax begin_with(const T* head_scores, int head) {
    return {to_float(head_scores[head]) * Scores::LOG2_E, 1};
}
