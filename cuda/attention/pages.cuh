// Rows of paged keys and values, and their way to shared memory.
#pragma once

#include "attention/fp8.cuh"

// One layer's pages `[blocks, kv_heads, tokens_per_block, D]` of one sequence and one KV head, as rows
// of D elements: fewer than 2^31, or a layer would fill a device.
template <class C, int D> struct Pages {
    const C* memory;   // of the KV head in block 0
    const int* table;  // position / tokens_per_block -> block
    int tokens_per_block;
    int shift;       // its logarithm; -1 if it is not a power of two
    int block_rows;  // from a block to the next

    // The row of the token at a position, counted from `memory`.
    __device__ int row(int position) const {
        int number = shift >= 0 ? position >> shift : position / tokens_per_block;
        return table[number] * block_rows + position - number * tokens_per_block;
    }
    __device__ size_t offset(int position) const { return size_t(row(position)) * D; }
};

// How far rows of D elements are apart in shared memory: an odd number of 16 bytes, so that eight
// rows at the same column are in different banks.
template <class T, int D> constexpr int ROW = D + (D / WIDE<T> % 2 ? 0 : WIDE<T>);

template <class C, int D>
__device__ inline Pages<C, D> find_pages(
    const C* pages, const int* table, int kv_head, int num_kv_heads, int tokens_per_block) {
    bool is_power = __popc(tokens_per_block) == 1;
    return {pages + size_t(kv_head) * tokens_per_block * D, table, tokens_per_block,
            is_power ? __ffs(tokens_per_block) - 1 : -1,
            num_kv_heads * tokens_per_block};
}

// What online softmax knows of a score so far: the largest (base 2), and the sum of 2^(score - it).
struct Softmax {
    float largest = -INFINITY, sum = 0;

    // Take a larger score into account; what was summed before shrinks by the result.
    __device__ float raise(float score) {
        float before = largest;
        largest = fmaxf(largest, score);
        float factor = ptx::exp2_approx(before - largest);
        sum *= factor;
        return factor;
    }
};

// Converts q . k to the score as an exponent of 2.
struct Scores {
    static constexpr float LOG2_E = 1.4426950408889634f;
    float scale, softcap;  // both times log2(e)
    float turns;           // 0 without a softcap, else from q . k to 2 log2(e) * score / softcap
    __device__ Scores(float scale, float softcap)
        : scale(scale * LOG2_E), softcap(softcap * LOG2_E),
          turns(softcap > 0 ? 2 * LOG2_E * scale / softcap : 0.0f) {}
    // With a softcap, softcap * tanh(score / softcap), where tanh(x) = 1 - 2 / (e^2x + 1).
    __device__ float operator()(float product) const {
        return turns == 0 ? product * scale : capped(product);
    }
    __device__ float capped(float product) const {
        return softcap * (1 - 2 * __fdividef(1, ptx::exp2_approx(product * turns) + 1));
    }
};
