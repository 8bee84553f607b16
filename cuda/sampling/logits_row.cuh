// A row of logits, divided into pieces. One warp reads a piece, and sums the weights of its tokens. The
// weight of a token is proportional to its probability.
#pragma once

#include "sampling/choice.cuh"

constexpr int PIECES = 256;  // the maximum number of pieces of a row

struct Token {
    float logit;
    int id;
    // Whether this token ranks above `other`. Equal logits rank by ascending id.
    __device__ bool above(Token other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

// For each piece of a row: the sum of the weights of its logits, and its best logit. Logits that are equal
// to the limit of a top-k or top-p have their weights in `ties`, and not in `sums`, until `add_ties`.
struct Pieces {
    double sums[PIECES], ties[PIECES];
    float best[PIECES];
};

// In a step, each lane loads WIDTH logits, and the warp STEP logits; LOADS steps are in flight. Only the
// size of the row decides WIDTH and the pieces. So the sum of a piece has the same bits for every type T,
// for every number of blocks, and in whichever block it is computed.
template <class T, int WIDTH> struct Row {
    static constexpr int EACH = WIDTH, STEP = 32 * WIDTH;
    static constexpr int LOADS = WIDTH == 1 ? 16 : WIDE<T> / 2;
    static constexpr int UNIT = WIDTH == 1 ? 512 : 1024;         // logits
    using Loaded = Vector<T, WIDTH>[LOADS];
    const T* logits;
    int size;

    // The number of logits in a piece: one unit, or several if the vocabulary is huge.
    __device__ int piece() const { return (size + PIECES * UNIT - 1) / (PIECES * UNIT) * UNIT; }
    __device__ int num_pieces() const { return (size + piece() - 1) / piece(); }

    // Loads the lane's logits of the LOADS steps from `start` on; past the end of the row, -inf.
    __device__ void load(Loaded& loaded, int start) const {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int id = id_of(start, i);
            if (id < size) {
                loaded[i] = *reinterpret_cast<const Vector<T, WIDTH>*>(logits + id);
            } else {
#pragma unroll
                for (int j = 0; j < WIDTH; j++) loaded[i].values[j] = from_float<T>(-INFINITY);
            }
        }
    }
    // The token id of the lane's first logit in step i.
    __device__ static int id_of(int start, int i) { return start + i * STEP + threadIdx.x % 32 * WIDTH; }
    __device__ void expand(float (&to)[WIDTH], const Vector<T, WIDTH>& from) const {
#pragma unroll
        for (int j = 0; j < WIDTH; j++) to[j] = to_float(from.values[j]);
    }

    // Calls visit(logits of the lane, id of the first of them) for each step from `first` to `end`.
    template <class F> __device__ void each_step(int first, int end, F visit) const {
#pragma unroll 1
        for (int start = first; start < end; start += LOADS * STEP) {
            Loaded loaded;
            load(loaded, start);
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                float values[WIDTH];
                expand(values, loaded[i]);
                visit(values, id_of(start, i));
            }
        }
    }
    // Calls visit(number of the piece, first id, end of the ids) for each piece of this warp. The warps of
    // `parts` blocks share the pieces; this block is block `part` of them.
    template <class F> __device__ void each_piece(F visit, int part = 0, int parts = 1) const {
        int count = num_pieces(), length = piece();
#pragma unroll 1
        for (int i = part * WARPS + threadIdx.x / 32; i < count; i += parts * WARPS)
            visit(i, i * length, min((i + 1) * length, size));
    }
    // Calls visit(logit, id) for every token of the pieces for which `wanted(piece)` is true.
    template <class P, class F> __device__ void each(P wanted, F visit) const {
        each_piece([&](int number, int first, int end) {
            if (!wanted(number)) return;
            each_step(first, end, [&](const float(&values)[WIDTH], int id) {
#pragma unroll
                for (int j = 0; j < WIDTH; j++) visit(values[j], id + j);
            });
        });
    }
};

__device__ inline double warp_total(double x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Returns the largest value of the lanes of a warp.
__device__ inline float warp_max(float x) { return from_key(__reduce_max_sync(~0u, to_key(x))); }

// Returns the sum of `sums`, to every lane. Warps do not share the work: each computes the whole sum.
__device__ inline double sum_pieces(const double (&sums)[PIECES], int count) {
    double own = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) own += sums[i];
    return warp_total(own);
}

// Returns the first lane at which the running sum of the lanes' `own` exceeds `rest`, or -1 if there is none.
// Subtracts from `rest` the sum of the lanes before the returned lane, or of all lanes if the result is -1.
__device__ inline int lane_passing(double own, double& rest) {
    int lane = threadIdx.x % 32;
    double up_to = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        double other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
    }
    unsigned passed = __ballot_sync(~0u, own > 0 && up_to > rest);
    int found = __ffs(passed) - 1;
    double before = __shfl_sync(~0u, found < 0 ? up_to : up_to - own, found < 0 ? 31 : found);
    rest -= before;
    return found;
}

// Returns the lowest token id with a logit equal to `best`, the best logit of the row. One warp calls this.
template <class R> __device__ int find_equal(const R& row, const Pieces& pieces, float best) {
    int lane = threadIdx.x % 32, count = row.num_pieces(), piece = 0, token = -1;
    for (unsigned found = 0; !found; piece += found ? __ffs(found) - 1 : 32)
        found = __ballot_sync(~0u, piece + lane < count && pieces.best[piece + lane] == best);
    int first = piece * row.piece();
    row.each_step(first, min(first + row.piece(), row.size), [&](const float(&values)[R::EACH], int id) {
        int own = R::EACH;
#pragma unroll
        for (int j = R::EACH - 1; j >= 0; j--) own = values[j] == best ? j : own;
        unsigned found = __ballot_sync(~0u, own < R::EACH);
        if (found && token < 0) token = __shfl_sync(~0u, id + own, __ffs(found) - 1);
    });
    return token;
}

// Returns the first token at which the running sum of the row's weights exceeds `rest`. One warp calls this.
// `sums`: the weight of each piece. If rounding leaves no such token, returns the last token with a weight.
template <class R, class F>
__device__ int find_token(const R& row, const double (&sums)[PIECES], double rest, F weight) {
    int lane = threadIdx.x % 32, count = row.num_pieces(), piece = 0, last = -1, found = -1;
    for (int first = 0; first < count && found < 0; first += 32) {
        double own = first + lane < count ? sums[first + lane] : 0;
        found = lane_passing(own, rest);
        unsigned some = __ballot_sync(~0u, own > 0);
        if (some) piece = first + (found < 0 ? 31 - __clz(some) : found);
    }
    if (found < 0) rest = INFINITY;
    found = -1;
    int first = piece * row.piece();
    row.each_step(first, min(first + row.piece(), row.size), [&](const float(&values)[R::EACH], int id) {
        if (found >= 0) return;
        double sum = 0;
        int own = -1;
#pragma unroll
        for (int j = 0; j < R::EACH; j++) {
            float value = weight(values[j], id + j);
            sum += value;
            if (value > 0) own = id + j;
        }
        found = lane_passing(sum, rest);
        last = max(last, __reduce_max_sync(~0u, own));
        if (found < 0) return;
        double up_to = 0;
        int chosen = own;
#pragma unroll
        for (int j = 0; j < R::EACH; j++) {
            float value = weight(values[j], id + j);
            up_to += value;
            if (value > 0 && up_to > rest && chosen == own) chosen = id + j;
        }
        last = __shfl_sync(~0u, chosen, found);
    });
    return last;
}
