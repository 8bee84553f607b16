// Finds the k-th best logit of a row without a sort, and the tokens that reach this logit if they are few.
// For k <= THREADS, the k-th best of the threads' own best logits is a lower bound. The tokens that reach the
// bound are collected, and the k-th best is searched among them. If k is larger, or if too many tokens reach
// the bound, logits are counted in bins by their distance to the best logit. The tokens up to the end of the
// bin with the k-th best are collected; if they are too many, only the tokens of this bin.
#pragma once

#include "sampling/logits_row.cuh"

constexpr int CANDIDATES = 4 * THREADS;
constexpr int BINS = 2 * CANDIDATES;  // these ints are as large as `Candidates`: see `Scratch`

// Tokens that were collected from a row.
struct alignas(16) Candidates {
    float logits[CANDIDATES];
    int ids[CANDIDATES];
};

// The bins are no longer needed when `kept` is filled.
union Scratch {
    Candidates kept;
    int bins[BINS];
};

// Returns the distance of a logit to the best logit, in bins. Logits beyond all other bins belong to the last
// bin, which is not counted.
__device__ inline float distance(float scaled, float largest) { return (largest - scaled) * 64; }

struct KthBin {
    int bin, above, inside;  // the bin of the k-th best; the numbers of logits in better bins and in this bin
};

// Returns the bin of the k-th best of the logits divided by the temperature. If all bins except the last one
// together have fewer than k logits, returns the last bin, with counts of 0.
template <class R>
__device__ KthBin find_bin(
    const R& row, long long k, const Params& own, float largest, const Pieces& pieces,
    int (&bins)[BINS]) {
    __shared__ int sums[WARPS];
    __shared__ KthBin kth;
    constexpr int EACH = BINS / THREADS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    if (threadIdx.x == 0) kth = {BINS - 1, 0, 0};
    __syncthreads();
    auto bin_of = [&](float logit) { return distance(own.scaled(logit), largest); };
    auto counts = [&](int piece) { return bin_of(pieces.best[piece]) < BINS - 1; };
    row.each(counts, [&](float logit, int) {
        float bin = bin_of(logit);
        if (bin < BINS - 1) atomicAdd(&bins[int(bin)], 1);
    });
    __syncthreads();
    int mine = 0, first = threadIdx.x * EACH;
    for (int i = 0; i < EACH; i++) mine += bins[first + i];
    int up_to = mine;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    for (int i = 0; i < warp; i++) up_to += sums[i];
    int above = up_to - mine;
    if (above < k && k <= up_to) {
        int bin = first;
        for (; above + bins[bin] < k; bin++) above += bins[bin];
        kth = {bin, above, bins[bin]};
    }
    __syncthreads();
    return kth;
}

// Returns the k-th best of the logits divided by the temperature. `found` gets all tokens that reach the
// result, and perhaps others, in any order; `count` is their number. If `found` is incomplete, `count` is
// above CANDIDATES. `own_best`: the best of the logits that this thread has read.
template <class R>
__device__ inline float kth_best(
    const R& row, const Params& own, float own_best, float largest, const Pieces& pieces,
    Candidates& found, int (&bins)[BINS], int& count) {
    __shared__ int num_found;
    long long k = own.top_k;
    auto key_of = [&](float logit) { return to_key(own.scaled(logit)); };
    count = CANDIDATES + 1;
#pragma unroll 1
    for (bool by_bins = k > THREADS;; by_bins = true) {
        float from = 0, to;  // the distances of the collected logits
        int above = 0;
        if (by_bins) {
            KthBin kth = find_bin(row, k, own, largest, pieces, bins);
            if (kth.bin == BINS - 1 || kth.inside > CANDIDATES) break;
            to = __uint_as_float(__float_as_uint(float(kth.bin + 1)) - 1);  // the largest float in the bin
            if (kth.above + kth.inside > CANDIDATES) {
                from = kth.bin;
                above = kth.above;
            }
        } else {
            unsigned mine = to_key(-distance(own.scaled(own_best), largest));
            to = -from_key(kth_key(k, [&](unsigned key) { return __syncthreads_count(mine >= key); }));
        }
        if (threadIdx.x == 0) num_found = 0;
        __syncthreads();
        auto reaches = [&](int piece) {
            return distance(own.scaled(pieces.best[piece]), largest) <= to;
        };
        row.each(reaches, [&](float logit, int id) {
            float far = distance(own.scaled(logit), largest);
            if (id >= row.size || far < from || far > to) return;
            int index = atomicAdd(&num_found, 1);
            if (index >= CANDIDATES) return;
            found.logits[index] = logit;
            found.ids[index] = id;
        });
        __syncthreads();
        int size = num_found;
        if (size > CANDIDATES) continue;
        if (!above) count = size;
        return from_key(kth_key(k - above, [&](unsigned key) {
            int reached = 0;
            for (int first = 0; first < size; first += THREADS) {
                int i = first + threadIdx.x;
                reached += __syncthreads_count(i < size && key_of(found.logits[i]) >= key);
            }
            return reached;
        }));
    }
    // too many candidates, or the k-th best is in the last bin: search the whole row
    return from_key(kth_key(k, [&](unsigned key) {
        int reached = 0;
        auto reaches = [&](int piece) { return key_of(pieces.best[piece]) >= key; };
        row.each(reaches, [&](float logit, int) { reached += key_of(logit) >= key; });
        __syncthreads();
        if (threadIdx.x == 0) num_found = 0;
        __syncthreads();
        atomicAdd(&num_found, reached);
        __syncthreads();
        return num_found;
    }));
}

// Copies the tokens of `found` that reach `kth` to `kept`, by ascending id, and returns their number.
// A barrier must follow before any thread reads `kept`.
__device__ inline int keep(
    Candidates& kept, Candidates& found, int count, float kth, const Params& own) {
    constexpr int NONE = 0x7FFFFFFF;
    int size = 0;
    for (int first = 0; first < count; first += THREADS) {
        int i = first + threadIdx.x;
        bool reaches = i < count && own.scaled(found.logits[i]) >= kth;
        if (!reaches) found.ids[i] = NONE;  // i < CANDIDATES, also where i >= count
        size += __syncthreads_count(reaches);
    }
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int id = found.ids[i], below = 0;
        if (id == NONE) continue;
#pragma unroll 4
        for (int j = 0; j < count; j++) below += found.ids[j] < id;
        kept.logits[below] = found.logits[i];
        kept.ids[below] = id;
    }
    return size;
}
