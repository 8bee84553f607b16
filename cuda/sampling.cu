// One token from each row of logits: min_length, temperature, top-k, top-p and min-p, by the row's own
// parameters, seed and position. The rules are those of gptmanager.decoding.sampling.
//
// Nothing is sorted. A draw inverts the cumulative distribution over ascending ids; a token outside of
// the nucleus is replaced by one of those that rank above it. With top-k what is drawn comes from those
// that reach the k-th best alone, if they are few: the row is read once without drawing, twice with
// top-k, three times with a wide one, else twice and twice more for a draw of top-p.
#include "kth_best.cuh"

// Blocks that run at the same time on a multiprocessor, as far as registers go.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int RESIDENT = 1;
#else
constexpr int RESIDENT = 2;
#endif

// 53 random bits as a number in [0, 1): Philox4x32-10, key = seed, counter = (position, draw, 0).
__device__ inline double uniform(unsigned long long seed, unsigned long long position, unsigned draw) {
    unsigned c0 = position, c1 = position >> 32, c2 = draw, c3 = 0, k0 = seed, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
        unsigned high = __umulhi(c0, 0xD2511F53u), low = c0 * 0xD2511F53u;
        c0 = __umulhi(c2, 0xCD9E8D57u) ^ c1 ^ k0;
        c1 = c2 * 0xCD9E8D57u;
        c2 = high ^ c3 ^ k1;
        c3 = low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return double(((unsigned long long)c0 << 32 | c1) >> 11) * 1.1102230246251565e-16;
}

// The token at which the sum of the weights of a warp's stretch passes `rest`; all 32 lanes.
template <int WIDTH, class F>
__device__ int find_in_stretch(const Row<WIDTH>& row, double rest, F weight) {
    int lane = threadIdx.x % 32, last = -1;
    double before = 0;
    for (int start = row.begin(); start < row.end(); start += 32 * WIDTH) {
        float values[WIDTH];
        double sum = 0;
        int id = start + lane * WIDTH, own = -1;
        row.read(values, id);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            values[i] = weight(values[i], id + i);
            sum += values[i];
            if (values[i] > 0) own = id + i;
        }
        double up_to = sum;
        for (int step = 1; step < 32; step *= 2) {
            double other = __shfl_up_sync(~0u, up_to, step);
            if (lane >= step) up_to += other;
        }
        unsigned passed = __ballot_sync(~0u, own >= 0 && before + up_to > rest);
        if (passed) {
            int chosen = own;
            double mine = before + up_to - sum;
            for (int i = WIDTH - 1; i >= 0; i--) {  // the first whose sum passes
                double to_here = mine;
#pragma unroll
                for (int j = 0; j < WIDTH; j++) to_here += j <= i ? values[j] : 0.0f;
                if (values[i] > 0 && to_here > rest) chosen = id + i;
            }
            return __shfl_sync(~0u, chosen, __ffs(passed) - 1);
        }
        before += __shfl_sync(~0u, up_to, 31);
        last = max(last, __reduce_max_sync(~0u, own));
    }
    return last;  // by rounding
}

// A token of the row among those that rank above `limit`, drawn; `largest` is the best of the logits
// divided by the temperature.
template <int WIDTH>
__device__ int draw_token(
    const Row<WIDTH>& row, const Params& own, long long position, float largest, Token limit) {
    __shared__ double sums[WARPS];
    __shared__ int drawn;
    auto weigh = [&](float scaled) { return ptx::exp2_approx((scaled - largest) * 1.4426950408889634f); };
    float floor = float(own.min_p);  // of a weight: the best token's is 1
    auto weight = [&](float logit, int id) {
        float scaled = __fdiv_rn(logit, own.temperature);
        float value = Token{scaled, id}.above(limit) ? weigh(scaled) : 0.0f;
        return value >= floor ? value : 0.0f;
    };
    double total = 0, kept = 0;
    row.each([&](float logit, int id) {
        float scaled = __fdiv_rn(logit, own.temperature);
        float value = Token{scaled, id}.above(limit) ? weigh(scaled) : 0.0f;
        total += value;
        kept += value >= floor ? value : 0.0f;
    });
    total = block_sums(sums, total);
    kept = block_sums(sums, kept);
    for (unsigned draw = 0;; draw++) {
        double spot = uniform(own.seed, position, draw) * kept, up_to = 0;
        if (spot >= kept) spot = __longlong_as_double(__double_as_longlong(kept) - 1);
        int chosen_warp = -1;
        double rest = 0;
        for (int warp = 0; warp < WARPS; warp++) {  // the first whose sum passes, never an empty one
            bool here = sums[warp] > 0 && (chosen_warp < 0 || up_to <= spot);
            if (here) {
                chosen_warp = warp;
                rest = spot - up_to;
            }
            up_to += sums[warp];
        }
        __syncthreads();
        if (threadIdx.x / 32 == chosen_warp) {
            int id = find_in_stretch(row, rest, weight);
            if (threadIdx.x % 32 == 0) drawn = id;
        }
        __syncthreads();
        int token = drawn;
        bool done = own.top_p >= 1;
        if (!done) {
            float value[1];
            Row<1>{row.logits, row.size, row.forbidden}.read(value, token);
            limit = {__fdiv_rn(value[0], own.temperature), token};
            double mass = 0, ties = 0;
            row.each([&](float logit, int id) {
                float value = weight(logit, id);
                if (__fdiv_rn(logit, own.temperature) > limit.logit) mass += value;
                else ties += value;
            });
            // Outside of the nucleus if what ranks above it has p already; compared from below.
            auto outside = [&] { return kept > 0 && float(1 - kept / total) <= float(1 - own.top_p); };
            kept = block_sums(sums, mass);
            if (outside()) {
                limit.id = 0;  // and so are all that tie with it
            } else {
                kept = block_sums(sums, mass + ties);
                done = !outside();
            }
        }
        if (done) return token;
    }
}

// The same, apart from a kernel that has the draw from a row of vectors inlined: both are too much for
// its registers.
__device__ __noinline__ int draw_apart(
    const Row<1>& few, const Params& own, long long position, float largest, Token limit) {
    return draw_token(few, own, position, largest, limit);
}

// Of a row from which no token can be chosen, as in gptmanager.step.
constexpr int NO_TOKEN = -1;    // all are -inf
constexpr int NOT_FINITE = -2;  // one is NaN or +inf

// Grid: (rows).
template <int WIDTH>
__global__ void __launch_bounds__(THREADS, RESIDENT) sample(
    int* tokens,                 // [rows]: NO_TOKEN or NOT_FINITE where there is none
    int* inputs,                 // [rows]: the same, 0 where there is none
    const float* logits,         // [rows, vocab_size]
    const Params* params,        // [slots]
    const int* slots,            // [rows]
    const long long* positions,  // [rows]: of the token to be chosen
    int vocab_size) {
    __shared__ Few found;
    __shared__ Room room;
    const Params& own = params[slots[blockIdx.x]];  // read again rather than kept in registers
    long long position = positions[blockIdx.x];
    int forbidden = position < own.first_end ? int(own.end_id) : -1;
    Row<WIDTH> row{logits + size_t(blockIdx.x) * vocab_size, vocab_size, forbidden};
    Token best{-INFINITY, 0x7FFFFFFF};
    row.each([&](float logit, int id) { best = better(best, {logit, id}); });
    float own_best = best.logit;
    best = block_best(best);
    auto choose = [&](int token) {
        if (threadIdx.x != 0) return;
        tokens[blockIdx.x] = token;
        inputs[blockIdx.x] = max(token, 0);
    };
    if (!isfinite(best.logit)) return choose(best.logit > 0 ? NOT_FINITE : NO_TOKEN);
    float largest = __fdiv_rn(best.logit, own.temperature);
    if (own.greedy || !isfinite(largest)) return choose(best.id);
    Token limit{-INFINITY, vocab_size};  // only what ranks above it is drawn; top-k keeps ties
    int token = -1;
    if (own.top_k > 0) {
        int count;
        limit.logit = kth_best(
            row, own.top_k, own_best, own.temperature, largest, found, room.bins, count);
        if (count <= CANDIDATES) {  // the row itself is not read again
            int size = keep(room.kept, found, count, limit.logit, own.temperature);
            Row<1> few{room.kept.logits, size, -1};
            int index;
            if constexpr (WIDTH == 1) index = draw_token(few, own, position, largest, limit);
            else index = draw_apart(few, own, position, largest, limit);
            token = room.kept.ids[index];
        }
    }
    if (token < 0) token = draw_token(row, own, position, largest, limit);
    choose(token);
}
