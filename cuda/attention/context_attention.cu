// softmax(q @ keys^T * scale, causal) @ values over paged keys and values, for the sequences of a batch
// ("rows") that have several query tokens each.
//
// FlashAttention-2: a block holds a tile of queries and iterates over keys and values in tiles of 64 or
// 32 tokens; the next tile is copied while the current one is used. The query heads of one KV head are
// packed: with `group` heads per KV head, packed query m of a row is head m % group of token m / group.
#include "attention/context_softmax.cuh"
#include "attention/context_tiles.cuh"

// A warp's queries, the left operand of matmuls with keys: held in registers if all of them fit,
// otherwise loaded again for each tile of keys.
template <class K, class T = typename K::T> struct Queries {
    const T* from;  // the row that the lane passes to ldmatrix
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
__device__ inline void multiply_keys(TileScores<K>& scores, const Queries<K>& queries,
                                     const T* keys) {
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
#pragma unroll D == 128 ? 1 : 2  // limited by registers
        for (int k = 0; k < D / 16; k++) {
            unsigned a[K::MATRICES][4];
#pragma unroll
            for (int m = 0; m < K::MATRICES; m++) queries.load(a[m], m, k);
            multiply(a, k);
        }
    }
}

template <class K, class T = typename K::T>
__device__ inline void add_values(WarpState<K>& state, TileWeights<K>& weights, const T* values) {
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
// with an 8-bit cache one tile of T and one of C.
// SMALL: for devices with only 99 KiB of shared memory per block, and D = 128.
template <class T, int D, bool SOFTCAP, bool SINK, class C = T, bool SMALL = false,
          class... HeadScores>
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
    const float* scales,      // [2, kv_heads] of an 8-bit cache
    int num_heads, int table_width, int tokens_per_block, int window_size, int sink, float scale,
    float softcap, HeadScores... head_scores) {  // nothing, or [heads]: as in `begin_with`
    using K = Kind<T, D, SOFTCAP, SINK, C, SMALL>;
    __shared__ Work<K> work;
    Item item = load_early(items + blockIdx.x);
    if (item.row < 0) return ptx::wait_for_previous();
    if (threadIdx.x == 0)
        start_work(work, item, {row_starts, kv_lengths, slots, block_tables, table_width}, keys,
                   values, tokens_per_block, num_heads, sink);
    __syncthreads();
    T* query_tile = reinterpret_cast<T*>(ptx::dynamic_shared());
    T* tiles = query_tile + K::QUERIES * ROW<T, D>;
    C* raw_tiles = reinterpret_cast<C*>(K::FP8 ? tiles + K::TILE : tiles);
    Tile tile = work.tiles.begin();
    store_row(work, 0, find_row(work, tile, true));
    store_row(work, 1, find_row(work, work.tiles.after(tile), true));
    ptx::wait_for_previous();
    __syncthreads();
    copy_queries<K>(query_tile, queries, work);
    ptx::cp_async_commit();
    copy_tokens<K>(raw_tiles, work, 0);
    ptx::cp_async_commit();
    if constexpr (K::HOLDS) {
        ptx::cp_async_wait<1>();
        __syncthreads();
    }

    int own_queries = threadIdx.x / 32 * 16 * K::MATRICES;
    Queries<K> own(query_tile + own_queries * ROW<T, D>);
    WarpState<K> state;
    reset(state);
    Window window{window_size};
    if constexpr (K::FP8) scale *= scales[blockIdx.y];
    Scores to_score(scale, softcap);
    float weight_scale = SOFTCAP ? 1.0f : to_score.scale;  // converts `scores` to exponents of 2
    if constexpr (sizeof...(HeadScores) > 0)
        begin<K>(state, head_scores..., work, threadIdx.x / 32, weight_scale);
    for (int stage = 0; tile.start < work.tiles.last; stage ^= 1, tile = work.tiles.after(tile)) {
        Tile next = work.tiles.after(tile);
        const T* key_tile = tiles;
        if constexpr (K::FP8) {  // after its expansion, the raw tile is overwritten by the next one
            ptx::cp_async_wait<0>();
            __syncthreads();
            expand_tokens<K>(tiles, raw_tiles);
            __syncthreads();
            if (next.start < work.tiles.last) copy_tokens<K>(raw_tiles, work, stage ^ 1);
            ptx::cp_async_commit();
        } else {
            key_tile += stage * K::TILE;
            if (next.start < work.tiles.last)
                copy_tokens<K>(raw_tiles + (stage ^ 1) * K::TILE, work, stage ^ 1);
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();
            __syncthreads();
        }
        if (threadIdx.x < K::TOKENS) store_row(work, stage, find_row(work, work.tiles.after(next)));
        TileScores<K> scores = {};
        TileWeights<K> weights;
        ptx::gather_lanes();
        multiply_keys<K>(scores, own, key_tile);
        if constexpr (SOFTCAP) cap<K>(scores, to_score);
        if (work.tiles.need_mask(tile, window)) {
            int index = thread_index<K>();
            int packed = work.first_query + index / 32 * 16 * K::MATRICES + index % 32 / 4;
            mask<K>(scores, work, packed, tile, window);
        }
#pragma unroll
        for (int m = 0; m < K::MATRICES; m++) {
            float factors[2];
            to_weights<K>(scores[m], state, factors, m, weight_scale);
            rescale<K>(state, factors, m);
            pack_weights<K>(weights[m], scores[m]);
        }
        add_values<K>(state, weights, key_tile + K::TOKENS * ROW<T, D>);
        if constexpr (!K::FP8) __syncthreads();
    }
    store_results<K>(out, state, work, threadIdx.x / 32, K::FP8 ? scales[gridDim.y + blockIdx.y] : 1.0f);
}
