// softmax(q @ keys^T * scale, causal) @ values for rows of several query tokens, over the pages.
//
// FlashAttention-2: a block holds a tile of queries and passes over keys and values in tiles of 64 or
// 32 tokens, which are copied while the ones before are computed with. The query heads of one KV
// head are packed: packed query m of a row is token m / group, head m % group of the group.
#include "context_tiles.cuh"

template <class K> struct WarpState {
    float out[K::MATRICES][K::D / 8][4];  // (row g, d = 2t, 2t + 1), (row g + 8, ...)
    float largest[K::MATRICES][2];        // score of rows g and g + 8, not scaled
    float sum[K::MATRICES][2];            // of this lane's columns only
};

// The left side of products with keys, of a warp's queries: in registers where these have room for
// all of it, and else loaded again for each tile of keys.
template <class K, class T = typename K::T> struct Queries {
    const T* from;  // the row that the lane names
    unsigned held[K::HOLDS ? K::D / 16 : 1][K::MATRICES][4];

    __device__ explicit Queries(const T* tile) {
        int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
        from = tile + (matrix % 2 * 8 + row) * ROW<T, K::D> + matrix / 2 * 8;
        if constexpr (K::HOLDS) {
#pragma unroll
            for (int k = 0; k < K::D / 16; k++) {
#pragma unroll
                for (int m = 0; m < K::MATRICES; m++) load(held[k][m], m, k);
            }
        }
    }
    __device__ void load(unsigned (&a)[4], int m, int k) const {
        ptx::load_matrix_x4(a, from + m * 16 * ROW<T, K::D> + k * 16);
    }
};

template <class K, class T = typename K::T>
__device__ inline void multiply_keys(float (&scores)[K::MATRICES][K::TOKENS / 8][4],
                                     const Queries<K>& queries, const T* keys) {
    constexpr int D = K::D;
    int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const T* key = keys + (matrix / 2 * 8 + row) * ROW<T, D> + matrix % 2 * 8;
    auto multiply = [&](const unsigned (&a)[K::MATRICES][4], int k) {
#pragma unroll
        for (int n = 0; n < K::TOKENS / 16; n++) {
            unsigned b[4];
            ptx::load_matrix_x4(b, key + n * 16 * ROW<T, D> + k * 16);
#pragma unroll
            for (int m = 0; m < K::MATRICES; m++) {
                ptx::mma_m16n8k16(scores[m][2 * n], a[m], b[0], b[1], T());
                ptx::mma_m16n8k16(scores[m][2 * n + 1], a[m], b[2], b[3], T());
            }
        }
    };
    if constexpr (K::HOLDS) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) multiply(queries.held[k], k);
    } else {
#pragma unroll D == 128 ? 1 : 2  // what fits into registers
        for (int k = 0; k < D / 16; k++) {
            unsigned a[K::MATRICES][4];
#pragma unroll
            for (int m = 0; m < K::MATRICES; m++) queries.load(a[m], m, k);
            multiply(a, k);
        }
    }
}

// Scores of what a query must not see are -inf. `packed`: of the lane's first row, g.
template <class K>
__device__ inline void hide(float (&scores)[K::MATRICES][K::TOKENS / 8][4], const Work<K>& work,
                            int packed, Tile tile, Window window) {
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int position = work.position(packed + m * 16 + half * 8);
            int key = tile.start + threadIdx.x % 4 * 2;
            // Seen is what lies behind `low`, up to `high`.
            int low = window.size ? position - window.size : -1, high = position;
            if (K::SINK) {
                low = tile.sinking ? -1 : max(low, work.sink - 1);
                high = tile.sinking ? min(high, work.sink - 1) : high;
            }
#pragma unroll
            for (int n = 0; n < K::TOKENS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int at = key + n * 8 + i;
                    if (at <= low || at > high) scores[m][n][2 * half + i] = -INFINITY;
                }
            }
        }
    }
}

// Scores to weights, as the left side of the next product, and all that was summed before brought to
// the new largest score.
template <class K>
__device__ inline void weigh(unsigned (&weights)[K::TOKENS / 16][4], float (&scores)[K::TOKENS / 8][4],
                             WarpState<K>& state, int m, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = state.largest[m][half];
#pragma unroll
        for (int n = 0; n < K::TOKENS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                largest = fmaxf(largest, scores[n][2 * half + i]);
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        // Where nothing was seen yet all weights are 0.
        float zero = largest == -INFINITY ? 0.0f : largest * scale;
        float factor = ptx::exp2_approx(state.largest[m][half] * scale - zero);
        state.largest[m][half] = largest;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < K::TOKENS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& score = scores[n][2 * half + i];
                score = ptx::exp2_approx(score * scale - zero);
                sum += score;
            }
        }
        state.sum[m][half] = state.sum[m][half] * factor + sum;
#pragma unroll
        for (int n = 0; n < K::D / 8; n++) {
            state.out[m][n][2 * half] *= factor;
            state.out[m][n][2 * half + 1] *= factor;
        }
    }
#pragma unroll
    for (int k = 0; k < K::TOKENS / 16; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float(&both)[4] = scores[2 * k + i / 2];
            weights[k][i] = pack<typename K::T>(both[i % 2 * 2], both[i % 2 * 2 + 1]);
        }
    }
}

template <class K, class T = typename K::T>
__device__ inline void add_values(WarpState<K>& state,
                                  unsigned (&weights)[K::MATRICES][K::TOKENS / 16][4],
                                  const T* values) {
    constexpr int D = K::D;
    int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const T* value = values + (matrix % 2 * 8 + row) * ROW<T, D> + matrix / 2 * 8;
#pragma unroll
    for (int k = 0; k < K::TOKENS / 16; k++) {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            unsigned b[4];
            ptx::load_matrix_x4_transposed(b, value + k * 16 * ROW<T, D> + n * 16);
#pragma unroll
            for (int m = 0; m < K::MATRICES; m++) {
                ptx::mma_m16n8k16(state.out[m][2 * n], weights[m][k], b[0], b[1], T());
                ptx::mma_m16n8k16(state.out[m][2 * n + 1], weights[m][k], b[2], b[3], T());
            }
        }
    }
}

// Grid: (items, kv heads). Dynamic shared memory: QUERIES rows of T, then two tiles of keys and values;
// where the cache is of 8 bits one of T and one of it.
// `SMALL`: for devices with 99 KiB of it for a block.
template <class T, int D, bool SOFTCAP, bool SINK, class C = T, bool SMALL = false>
__global__ void __launch_bounds__(THREADS) context_attention(
    T* out,                   // [tokens, heads, D]
    const T* queries,         // [tokens, heads, D]
    const C* keys,            // [blocks, kv_heads, tokens_per_block, D]
    const C* values,          // [blocks, kv_heads, tokens_per_block, D]
    const Item* items,        // [items]; row -1: nothing to do
    const int* row_starts,    // [rows + 1]
    const int* kv_lengths,    // [rows]
    const int* slots,         // [rows]
    const int* block_tables,  // [slots, table_width]
    const float* scales,      // [2, kv_heads] of a cache of 8 bits
    int num_heads, int table_width, int tokens_per_block, int window_size, int sink, float scale,
    float softcap) {
    using K = Kind<T, D, SOFTCAP, SINK, C, SMALL>;
    __shared__ Work<K> work;
    if (items[blockIdx.x].row < 0) return;
    if (threadIdx.x == 0) {
        Item item = items[blockIdx.x];
        int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
        int row_start = row_starts[item.row], num_new = row_starts[item.row + 1] - row_start;
        const int* table = block_tables + size_t(slots[item.row]) * table_width;
        auto pages = find_pages<C, D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
        work = {item, num_new * group, group, num_heads, kv_lengths[item.row] - num_new, 0, 0, sink,
                size_t(row_start) * num_heads + kv_head * group, pages,
                values + (pages.memory - keys)};
        work.low = work.position(item.first_query);
        work.high = work.position(item.first_query + K::QUERIES - 1);
    }
    __syncthreads();
    T* query_tile = reinterpret_cast<T*>(ptx::dynamic_shared());
    T* tiles = query_tile + K::QUERIES * ROW<T, D>;
    C* raw_tiles = reinterpret_cast<C*>(K::FP8 ? tiles + K::TILE : tiles);
    find_rows(work, 0, work.first_tile());
    find_rows(work, 1, work.tile_after(work.first_tile()));
    __syncthreads();
    copy_queries<K>(query_tile, queries, work);
    ptx::cp_async_commit();
    copy_tokens<K>(raw_tiles, work, 0);
    ptx::cp_async_commit();
    if constexpr (K::HOLDS) {
        ptx::cp_async_wait<1>();
        __syncthreads();
    }

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int own_queries = warp * 16 * K::MATRICES;
    Queries<K> own(query_tile + own_queries * ROW<T, D>);
    WarpState<K> state = {};
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++)
        state.largest[m][0] = state.largest[m][1] = -INFINITY;
    Window window{window_size};
    if constexpr (K::FP8) scale *= scales[blockIdx.y];
    Scores to_score(scale, softcap);
    float weight_scale = SOFTCAP ? 1.0f : to_score.scale;  // from what `scores` holds to exponents
    Tile tile = work.first_tile();
    for (int stage = 0; tile.start < work.item.last; stage ^= 1, tile = work.tile_after(tile)) {
        Tile next = work.tile_after(tile);
        const T* key_tile = tiles;
        if constexpr (K::FP8) {  // expanded, a tile makes room for the next
            ptx::cp_async_wait<0>();
            __syncthreads();
            expand_tokens<K>(tiles, raw_tiles);
            __syncthreads();
            if (next.start < work.item.last) copy_tokens<K>(raw_tiles, work, stage ^ 1);
            ptx::cp_async_commit();
        } else {
            key_tile += stage * K::TILE;
            if (next.start < work.item.last)
                copy_tokens<K>(raw_tiles + (stage ^ 1) * K::TILE, work, stage ^ 1);
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();
            __syncthreads();
        }
        find_rows(work, stage, work.tile_after(next));
        float scores[K::MATRICES][K::TOKENS / 8][4] = {};
        unsigned weights[K::MATRICES][K::TOKENS / 16][4];
        multiply_keys<K>(scores, own, key_tile);
        if constexpr (SOFTCAP) {
#pragma unroll
            for (int i = 0; i < K::MATRICES * K::TOKENS / 2; i++) {
                float& score = scores[i * 2 / K::TOKENS][i / 4 % (K::TOKENS / 8)][i % 4];
                score = to_score.capped(score);
            }
        }
        // Tiles that all of the block's queries see need no mask.
        if (SINK || !window.sees(work.low, tile.start + K::TOKENS - 1) ||
            !window.sees(work.high, tile.start)) {
            int packed = work.item.first_query + own_queries + g;
            hide<K>(scores, work, packed, tile, window);
        }
#pragma unroll
        for (int m = 0; m < K::MATRICES; m++)
            weigh<K>(weights[m], scores[m], state, m, weight_scale);
        add_values<K>(state, weights, key_tile + K::TOKENS * ROW<T, D>);
        if constexpr (!K::FP8) __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor = 1 / warp_sum<4>(state.sum[m][half]);
            if constexpr (K::FP8) factor *= scales[gridDim.y + blockIdx.y];
            int packed = work.item.first_query + (warp * K::MATRICES + m) * 16 + half * 8 + g;
            if (packed >= work.num_packed) continue;
            T* to = out + work.offset(packed) + 2 * t;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *reinterpret_cast<unsigned*>(to + n * 8) = pack<T>(
                    state.out[m][n][2 * half] * factor, state.out[m][n][2 * half + 1] * factor);
        }
    }
}
