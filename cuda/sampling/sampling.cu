// Chooses one token from each row of logits by temperature, top-k, top-p and min-p, with the row's own
// parameters, seed and position. The rules are those of gptmanager.decoding.sampling.sampling.
//
// Nothing is sorted. A draw inverts the cumulative distribution over ascending ids. A token outside of the
// nucleus is rejected, and the next draw is from the tokens that rank above it. With top-k, draws are only
// from the tokens that reach the k-th best, which are copied if they are few.
//
// The first pass finds the best logit of each piece, and the sum of the piece's weights relative to it.
// Greedy rows and draws from all tokens need no other pass, but read one piece again. If there are few rows,
// several blocks share the first pass of a row. Each draw of top-p reads the row once more, as do top-k and
// min-p; a large top-k reads it twice. A piece is skipped if its best logit shows that none of its tokens
// counts.
#include "sampling/kth_best.cuh"

// Returns 53 random bits as a number in [0, 1): Philox4x32-10, key = seed, counter = (position, draw, 0).
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

__device__ inline float weigh(float scaled, float largest) {
    return ptx::exp2_approx((scaled - largest) * 1.4426950408889634f);
}

// Sets the best logit of each of this block's pieces and, if the row is drawn without top-k, the sum of the
// piece's weights. Returns the best of the logits that the thread read; NaN counts as +inf.
template <class R>
__device__ inline float find_best(
    const R& row, const Params& own, int part, int parts, Pieces& pieces) {
    constexpr int AT_ONCE = 16 / R::EACH;  // loads in a group; a group's weights need its best logit
    bool weighs = !own.greedy && own.top_k == 0;
    float own_best = -INFINITY;
    row.each_piece([&](int number, int first, int end) {
        float best = -INFINITY;
        Mass mass{-INFINITY, 0};  // the mass of this lane
#pragma unroll 1
        for (int start = first; start < end; start += R::LOADS * R::STEP) {
            typename R::Loaded loaded;
            row.load(loaded, start);
#pragma unroll
            for (int from = 0; from < R::LOADS; from += AT_ONCE) {
                float most = -INFINITY;
                bool odd = false;
#pragma unroll
                for (int i = from; i < from + AT_ONCE; i++) {
                    float values[R::EACH];
                    row.expand(values, loaded[i]);
#pragma unroll
                    for (int j = 0; j < R::EACH; j++) {
                        most = fmaxf(most, values[j]);
                        odd |= isnan(values[j]);
                    }
                }
                most = odd ? INFINITY : most;
                own_best = fmaxf(own_best, most);
                most = warp_max(most);
                best = fmaxf(best, most);
                float largest = own.scaled(most);
                if (!weighs || !isfinite(largest)) continue;
                double sum = 0;
#pragma unroll
                for (int i = from; i < from + AT_ONCE; i++) {
                    float values[R::EACH], several = 0;
                    row.expand(values, loaded[i]);
#pragma unroll
                    for (int j = 0; j < R::EACH; j++)
                        several += weigh(own.scaled(values[j]), largest);
                    sum += several;
                }
                mass = mass.with({largest, sum});
            }
        }
        double sum = warp_total(mass.sum);
        if (threadIdx.x % 32 == 0) {
            pieces.best[number] = best;
            pieces.sums[number] = sum;
        }
    }, part, parts);
    __syncthreads();
    return own_best;
}

// The results that the blocks of a row write for the block of the row that finishes last.
struct SharedRow {
    Pieces* pieces;     // [rows]
    float* own_bests;   // [rows, parts, THREADS]
    unsigned* arrived;  // [rows]; zeros before and after the launch
};

// Returns whether this block is the last block of its row to finish. The last block completes `pieces` and
// `own_best`, as if the block had read the whole row.
__device__ inline bool gather(
    const SharedRow& shared, int row, int part, int parts, int count, Pieces& pieces,
    float& own_best) {
    if (parts == 1) return true;
    Pieces& all = shared.pieces[row];
    float* bests = shared.own_bests + size_t(row) * parts * THREADS + threadIdx.x;
    bests[part * THREADS] = own_best;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        if (i / WARPS % parts != part) continue;
        all.sums[i] = pieces.sums[i];
        all.best[i] = pieces.best[i];
    }
    if (!is_last_block(shared.arrived + row, parts)) return false;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {  // bypasses L1, which may hold stale bytes
        pieces.sums[i] = __ldcg(all.sums + i);
        pieces.best[i] = __ldcg(all.best + i);
    }
#pragma unroll 1
    for (int i = 0; i < parts; i++) own_best = fmaxf(own_best, __ldcg(bests + i * THREADS));
    __syncthreads();
    return true;
}

// The tokens that may be drawn: those that rank above `limit` and have at least the weight `floor`. The
// weight is e^(scaled - largest), so the best token has weight 1.
struct Drawable {
    Token limit;
    float largest, floor;

    __device__ float weight(float scaled, int id) const {
        float value = Token{scaled, id}.above(limit) ? weigh(scaled, largest) : 0.0f;
        return value >= floor ? value : 0.0f;
    }
};

// For each piece, sums the weights of logits above `limit.logit`, and the weights of logits equal to
// `limit.logit`. Pieces with a best logit below `limit.logit` are not read.
template <class R>
__device__ inline void sum_weights(
    const R& row, const Params& own, const Drawable& drawable, Pieces& pieces) {
    __syncthreads();  // all threads have read the previous sums, and `keep` is complete
    row.each_piece([&](int number, int first, int end) {
        double above = 0, ties = 0;
        if (own.scaled(pieces.best[number]) >= drawable.limit.logit) {
            row.each_step(first, end, [&](const float(&values)[R::EACH], int id) {
                float higher = 0, equal = 0;
#pragma unroll
                for (int j = 0; j < R::EACH; j++) {
                    float scaled = own.scaled(values[j]), value = drawable.weight(scaled, id + j);
                    if (scaled > drawable.limit.logit) higher += value;
                    else equal += value;
                }
                above += higher;
                ties += equal;
            });
            above = warp_total(above);
            ties = warp_total(ties);
        }
        if (threadIdx.x % 32 == 0) {
            pieces.sums[number] = above;
            pieces.ties[number] = ties;
        }
    });
    __syncthreads();
}

// Adds the ties to the sums, and returns the total.
__device__ inline double add_ties(Pieces& pieces, int count) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) pieces.sums[i] += pieces.ties[i];
    __syncthreads();
    return sum_pieces(pieces.sums, count);
}

// Draws a token of the row from those that rank above `limit`. `largest`: the best of the logits divided by
// the temperature. `is_weighed`: `pieces` already has the sums, each relative to the best of its piece.
template <class R>
__device__ inline int draw_token(
    const R& row, const Params& own, long long position, float largest, Token limit, Pieces& pieces,
    bool is_weighed) {
    __shared__ int drawn;
    int count = row.num_pieces();
    Drawable drawable{limit, largest, 0};
    if (is_weighed) {
        for (int i = threadIdx.x; i < count; i += THREADS) {
            pieces.sums[i] *= Mass::share(own.scaled(pieces.best[i]), largest);
            pieces.ties[i] = 0;
        }
    } else {
        sum_weights(row, own, drawable, pieces);
    }
    double total = add_ties(pieces, count), kept = total;
    if (own.min_p > 0) {
        drawable.floor = float(own.min_p);
        sum_weights(row, own, drawable, pieces);
        kept = add_ties(pieces, count);
    }
    for (unsigned draw = 0;; draw++) {
        if (threadIdx.x < 32) {
            double spot = uniform(own.seed, position, draw) * kept;  // < kept, which is at least 1
            int id = find_token(row, pieces.sums, spot, [&](float logit, int id) {
                return drawable.weight(own.scaled(logit), id);
            });
            if (threadIdx.x == 0) drawn = id;
        }
        __syncthreads();
        int token = drawn;
        if (own.top_p >= 1) return token;
        drawable.limit = {own.scaled(to_float(row.logits[token])), token};
        sum_weights(row, own, drawable, pieces);
        // The token is outside the nucleus if the tokens above it (`kept`) have top_p or more of `total`.
        auto outside = [&] { return kept > 0 && float(1 - kept / total) <= float(1 - own.top_p); };
        kept = sum_pieces(pieces.sums, count);
        if (outside()) {
            drawable.limit.id = 0;  // all tokens with an equal logit are outside, too
            continue;
        }
        kept = add_ties(pieces, count);
        if (!outside()) return token;
    }
}

// Draws a token from those that top-k keeps.
__device__ inline int draw_kept(
    const Candidates& kept, int size, const Params& own, long long position, float largest,
    Token limit, Pieces& pieces) {
    Row<float, 1> few{kept.logits, size};
    for (int i = threadIdx.x; i < few.num_pieces(); i += THREADS) pieces.best[i] = INFINITY;
    return kept.ids[draw_token(few, own, position, largest, limit, pieces, false)];
}

// The results for rows from which no token can be chosen, as in gptmanager.step.
constexpr int NO_TOKEN = -1;    // all logits are -inf
constexpr int NOT_FINITE = -2;  // a logit is NaN or +inf

// Grid: (rows * parts).
template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1) sample(
    int* tokens,                 // [rows]: a token id, NO_TOKEN or NOT_FINITE
    int* inputs,                 // [cells]: the same, but 0 for NO_TOKEN and NOT_FINITE
    const T* logits,             // [rows, vocab_size]
    const Params* params,        // [slots]
    const int* slots,            // [rows], -1: nothing is chosen
    const long long* positions,  // [rows]: of the token to be chosen
    const long long* cells,      // [rows]: index in `inputs`, -1: not written; null: the row's number
    Pieces* all_pieces, float* own_bests, unsigned* arrived,  // SharedRow; null if parts == 1
    int vocab_size, int parts) {
    ptx::wait_for_previous();
    __shared__ Candidates found;
    __shared__ Scratch scratch;
    __shared__ Pieces pieces;
    int number = blockIdx.x / parts, part = blockIdx.x % parts, slot = slots[number];
    if (slot < 0) return;
    const Params& own = params[slot];  // a reference: reading again is cheaper than registers
    long long position = positions[number];
    Row<T, WIDTH> row{logits + size_t(number) * vocab_size, vocab_size};
    int count = row.num_pieces();
    float own_best = find_best(row, own, part, parts, pieces);
    SharedRow shared{all_pieces, own_bests, arrived};
    if (!gather(shared, number, part, parts, count, pieces, own_best)) return;
    auto choose = [&](int token) {
        if (threadIdx.x != 0) return;
        tokens[number] = token;
        long long cell = cells ? cells[number] : number;
        if (cell >= 0) inputs[cell] = max(token, 0);
    };
    float best = -INFINITY;
    for (int i = threadIdx.x % 32; i < count; i += 32) best = fmaxf(best, pieces.best[i]);
    best = warp_max(best);
    if (!isfinite(best)) return choose(best > 0 ? NOT_FINITE : NO_TOKEN);
    float largest = own.scaled(best);
    if (own.greedy || !isfinite(largest)) {
        if (threadIdx.x < 32) choose(find_equal(row, pieces, best));
        return;
    }
    Token limit{-INFINITY, vocab_size};  // tokens above it may be drawn; with top-k, also all of equal logit
    if (own.top_k > 0) {
        int num_found;
        limit.logit =
            kth_best(row, own, own_best, largest, pieces, found, scratch.bins, num_found);
        if (num_found <= CANDIDATES) {  // the row itself is not read again
            int size = keep(scratch.kept, found, num_found, limit.logit, own);
            return choose(draw_kept(scratch.kept, size, own, position, largest, limit, pieces));
        }
    }
    choose(draw_token(row, own, position, largest, limit, pieces, own.top_k == 0));
}
