// Applies bias, penalties and bans to rows of logits, in place: the rules of
// gptmanager.decoding.sampling.adjustments, in the same order and with the same rounding.
//
// Only the logits of affected tokens are read and written. Tokens of the history are counted in a table
// that is zero before and after the launch.
#include "intrinsics.cuh"

constexpr int THREADS = 256;

struct Adjustments {  // PARAMS of adjustments.py
    long long prompt_len, first_end;  // end ids are banned before position first_end
    // Index of bias ids, followed by bias values, tokens of bad words, ends of these words, end ids.
    long long lists;
    int num_ends, ngram_size, num_biases, num_word_tokens, num_words;
    float repetition, presence, frequency;
    bool adjusts, penalizes;
};

// Sets the logit of a token to -inf. Atomic, because several threads may ban the same token.
__device__ inline void ban(float* row, int size, int token) {
    if (0 <= token && token < size) atomicExch(reinterpret_cast<unsigned*>(row) + token, 0xFF800000u);
}

// Whether the history ends with `tokens`. Compares from the last token to the first.
__device__ inline bool ends_with(const int* history, int length, const int* tokens, int count) {
    if (count > length) return false;
    for (int i = 1; i <= count; i++)
        if (history[length - i] != tokens[count - i]) return false;
    return true;
}

// Applies the penalties. Bit 0 of seen[token] is set if repetition != 1 and the prompt contains the token.
// The other bits count how often it was generated. The thread that zeroes seen[token] penalizes the token.
__device__ void penalize(
    float* row, int size, const Adjustments& own, const int* history, int length, int* seen) {
    int prompt_len = int(min(own.prompt_len, (long long)length));
    int start = own.repetition != 1.0f ? 0 : prompt_len;
    for (int i = start + int(threadIdx.x); i < length; i += THREADS) {
        int token = history[i];
        if (token < 0 || token >= size) continue;
        if (i >= prompt_len) atomicAdd(seen + token, 2);
        else atomicOr(seen + token, 1);
    }
    __syncthreads();
    for (int i = start + int(threadIdx.x); i < length; i += THREADS) {
        int token = history[i];
        int mark = 0 <= token && token < size ? atomicExch(seen + token, 0) : 0;
        if (!mark) continue;
        float value = row[token], times = float(mark >> 1);
        if (own.repetition != 1.0f)
            value = value > 0 ? __fdiv_rn(value, own.repetition) : __fmul_rn(value, own.repetition);
        if (times > 0) {
            value = __fsub_rn(value, __fmul_rn(own.frequency, times));
            value = __fsub_rn(value, own.presence);
        }
        row[token] = value;
    }
    __syncthreads();
}

// Grid: (rows).
__global__ void __launch_bounds__(THREADS) adjust(
    float* logits,               // [rows, size]
    const Adjustments* params,   // [slots]
    const int* lists,            // Adjustments.lists is an index into it
    const int* histories,        // [slots, history_size]
    int* seen,                   // [rows or more, size], all 0
    const int* slots,            // [rows], -1: the row is left as it is
    const long long* positions,  // [rows]: position of the token to be chosen
    int size, int history_size) {
    ptx::wait_for_previous();
    int slot = slots[blockIdx.x];
    if (slot < 0) return;
    Adjustments own = params[slot];
    if (!own.adjusts) return;
    long long position = positions[blockIdx.x];
    int length = int(min(position, (long long)history_size));
    const int* history = histories + size_t(slot) * history_size;
    float* row = logits + size_t(blockIdx.x) * size;
    const int *bias_ids = lists + own.lists, *bias_values = bias_ids + own.num_biases;
    const int *words = bias_values + own.num_biases, *ends = words + own.num_word_tokens;
    for (int i = threadIdx.x; i < own.num_biases; i += THREADS)
        row[bias_ids[i]] = __fadd_rn(row[bias_ids[i]], __int_as_float(bias_values[i]));
    __syncthreads();
    if (own.penalizes) penalize(row, size, own, history, length, seen + size_t(blockIdx.x) * size);
    for (int word = threadIdx.x; word < own.num_words; word += THREADS) {
        int start = word ? ends[word - 1] : 0, count = ends[word] - start - 1;
        if (ends_with(history, length, words + start, count)) ban(row, size, words[start + count]);
    }
    int n = own.ngram_size;
    for (int start = threadIdx.x; n > 0 && start <= length - n; start += THREADS)
        if (ends_with(history, length, history + start, n - 1)) ban(row, size, history[start + n - 1]);
    if (position >= own.first_end) return;
    for (int i = threadIdx.x; i < own.num_ends; i += THREADS) ban(row, size, ends[own.num_words + i]);
}
