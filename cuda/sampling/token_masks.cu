// Sets logits to -inf for each token with a 0 in the row's mask. Logits are not read.
#include "intrinsics.cuh"

constexpr int THREADS = 256, WORDS = 32;  // WORDS: mask words per warp, one per lane

// Grid: (masks, parts of the vocabulary).
__global__ void __launch_bounds__(THREADS) mask_logits(
    float* logits,          // [rows, vocab_size]
    const int* rows,        // [masks]: the row of each mask, or -1 for a mask that is not applied
    const unsigned* masks,  // [masks, num_words]
    int vocab_size, int num_words) {
    ptx::wait_for_previous();
    int row = rows[blockIdx.x], lane = threadIdx.x % 32;
    if (row < 0) return;
    float* own = logits + size_t(row) * vocab_size;
    const unsigned* mask = masks + size_t(blockIdx.x) * num_words;
    int first = (blockIdx.y * THREADS + threadIdx.x) / 32 * WORDS;
    unsigned bits = first + lane < num_words ? mask[first + lane] : 0;
    unsigned changed = __ballot_sync(~0u, bits != ~0u);
    for (; changed; changed &= changed - 1) {
        int word = __ffs(changed) - 1;
        unsigned allowed = __shfl_sync(~0u, bits, word);
        int token = (first + word) * 32 + lane;
        if (token < vocab_size && !(allowed >> lane & 1)) own[token] = __int_as_float(0xFF800000);
    }
}
