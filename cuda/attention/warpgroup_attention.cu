// Context attention with warpgroup matmuls (Hopper), for head dimensions 64 and 128. The formula, the items
// and the arguments are the same as in context_attention.cu.
//
// A warpgroup has 64 queries. While tensor cores multiply the weights of a tile with its values, the warps
// compute the weights of the next tile from its scores, as in FlashAttention-3. All threads copy, with
// cp.async instead of bulk copies (TMA): pages have any size, and tokens after the end must become zeros.
#include "attention/context_softmax.cuh"

template <class Element, int HEAD_DIM, bool IS_CAPPED, bool HAS_SINK> struct Kind {
    using T = Element;
    using C = Element;
    static constexpr int D = HEAD_DIM;
    static constexpr bool SOFTCAP = IS_CAPPED, SINK = HAS_SINK;
    static constexpr int QUERIES = D == 128 && SINK ? 64 : 128;  // same as `_queries` in context_attention.py
    static constexpr int MATRICES = 1, THREADS = 2 * QUERIES;
    static constexpr int TOKENS = 128, ROW_STAGES = 4;
};

// Returns the offset of the 8 elements of a row that start at 8 * `vector`. The matrix is in the layout that
// matrix_descriptor describes. It is stored as one column after the other, each of ROWS rows of 64 elements.
template <int ROWS> __device__ inline unsigned swizzled(unsigned row, unsigned vector) {
    return (vector / 8 * ROWS + row) * 64 + (vector % 8 ^ row % 8) * 8;
}

template <class K, class T = typename K::T>
__device__ inline void copy_queries(T* to, const T* from, const Work<K>& work) {
    constexpr int VECTORS = K::D / 8;
#pragma unroll 4
    for (int i = 0; i < K::QUERIES * VECTORS / K::THREADS; i++) {
        unsigned index = i * K::THREADS + threadIdx.x;
        unsigned query = index / VECTORS, vector = index % VECTORS;
        int packed = work.first_query + query;
        bool valid = packed < work.num_packed;
        size_t offset = valid ? work.offset(packed) : 0;
        ptx::cp_async_16(to + swizzled<K::QUERIES>(query, vector), from + offset + vector * 8, valid);
    }
}

// Starts the copies of a tile of keys or of values.
template <class K, class T = typename K::T>
__device__ inline void copy_tokens(T* to, const T* memory, const int (&rows)[K::TOKENS]) {
    constexpr int VECTORS = K::D / 8, PASSES = K::TOKENS * VECTORS / K::THREADS;
    constexpr int APART = K::THREADS / VECTORS;  // tokens from one pass to the next
    static_assert(APART % 8 == 0, "all tokens of a thread have the same place in their pattern");
    unsigned token = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;
    T* own = to + swizzled<K::TOKENS>(token, vector);
    const T* source = memory + vector * 8;
    int from[PASSES];  // read before the copies start: the compiler does not move reads across copies
#pragma unroll
    for (int i = 0; i < PASSES; i++) from[i] = rows[token + i * APART];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        ptx::cp_async_16(own + i * APART * 64, source + ptrdiff_t(max(from[i], 0)) * K::D, from[i] >= 0);
    }
}

// Waits for the copies of all threads of the block, and makes them visible to warpgroup matmuls.
__device__ inline void wait_for_copies() {
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    __syncthreads();
}

// Returns `x`, which must be equal in all lanes of a warp, and lets the compiler know this. Otherwise the
// compiler would end asynchronous matmuls before a branch on `x`, at which lanes might diverge.
__device__ inline int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

constexpr int PATTERN = 1024;  // bytes of 8 rows of 64 elements, after which the swizzle repeats

template <class K, class T = typename K::T>
__device__ inline void multiply_keys(TileScores<K>& scores, const T* queries, const T* keys) {
    ptx::gather_lanes();
    ptx::warpgroup_fence(scores[0]);
#pragma unroll
    for (int k = 0; k < K::D / 16; k++) {
        int column = k / 4, element = k % 4 * 16;
        ptx::warpgroup_mma(
            scores[0],
            ptx::matrix_descriptor(queries + column * K::QUERIES * 64 + element, 0, PATTERN),
            ptx::matrix_descriptor(keys + column * K::TOKENS * 64 + element, 0, PATTERN), k > 0, T());
    }
    ptx::warpgroup_commit();
}

template <class K, class T = typename K::T>
__device__ inline void add_values(WarpState<K>& state, TileWeights<K>& weights, const T* values) {
    constexpr int COLUMN = K::TOKENS * 64;
    ptx::settle(weights[0]);
    ptx::warpgroup_fence(state.out[0]);
#pragma unroll
    for (int k = 0; k < K::TOKENS / 16; k++)
        ptx::warpgroup_mma(state.out[0], weights[0][k],
                           ptx::matrix_descriptor(values + k * 16 * 64, COLUMN * sizeof(T), PATTERN),
                           T());
    ptx::warpgroup_commit();
}

// Grid: (items, kv heads). Dynamic shared memory, from the first address that is aligned to PATTERN:
// QUERIES rows, then two tiles of keys and two of values.
template <class T, int D, bool SOFTCAP, bool SINK, class... HeadScores>
__global__ void __launch_bounds__(Kind<T, D, SOFTCAP, SINK>::THREADS) warpgroup_attention(
    T* out,                   // [tokens, heads, D]
    const T* queries,         // [tokens, heads, D]
    const T* keys,            // [blocks, kv_heads, tokens_per_block, D]
    const T* values,          // [blocks, kv_heads, tokens_per_block, D]
    const Item* items,        // [items]; row -1: nothing to do
    const int* row_starts,    // [rows + 1]
    const int* kv_lengths,    // [rows]
    const int* slots,         // [rows]
    const int* block_tables,  // [slots, table_width]
    const float* scales,      // null: the cache has elements of T
    int num_heads, int table_width, int tokens_per_block, int window_size, int sink, float scale,
    float softcap, HeadScores... head_scores) {  // nothing, or [heads]
    using K = Kind<T, D, SOFTCAP, SINK>;
    __shared__ Work<K> work;
    __shared__ volatile float unread[K::THREADS * 2];
    Item item = load_early(items + blockIdx.x);
    if (item.row < 0) return ptx::wait_for_previous();
    if (threadIdx.x == 0)
        start_work(work, item, {row_starts, kv_lengths, slots, block_tables, table_width}, keys,
                   values, tokens_per_block, num_heads, sink);
    __syncthreads();
    unsigned char* memory = ptx::dynamic_shared();
    memory += -ptx::shared_address(memory) % PATTERN;
    T* query_tile = reinterpret_cast<T*>(memory);
    constexpr int TILE = K::TOKENS * D;
    T* key_tiles = query_tile + K::QUERIES * D;
    T* value_tiles = key_tiles + 2 * TILE;
    const Tiles<K>& from = work.tiles;
    Tiles<K> seen{uniform(from.first), uniform(from.last), uniform(from.sink), uniform(from.low),
                  uniform(from.high)};
    Tile tile = seen.begin(), next = seen.after(tile), after = seen.after(next);
    store_row(work, 0, find_row(work, tile, true));
    store_row(work, 1, find_row(work, next, true));
    store_row(work, 2, find_row(work, after, true));
    ptx::wait_for_previous();
    __syncthreads();

    int last = seen.last, warp = uniform(threadIdx.x / 32);
    int packed = work.first_query + warp * 16 + threadIdx.x % 32 / 4;
    const T* own_queries = query_tile + warp / 4 * 64 * 64;
    WarpState<K> state;
    reset(state);
    TileScores<K> scores;
    TileWeights<K> weights;
    float factors[2];
    Window window{window_size};
    Scores to_score(scale, softcap);
    float weight_scale = SOFTCAP ? 1.0f : to_score.scale;  // converts `scores` to exponents of 2
    if constexpr (sizeof...(HeadScores) > 0) begin<K>(state, head_scores..., work, warp, weight_scale);
    volatile float* sums = unread + threadIdx.x * 2;
    auto convert_scores = [&](Tile of) {  // `scores` become weights, which stay floats
        if constexpr (SOFTCAP) cap<K>(scores, to_score);
        if (seen.need_mask(of, window)) mask<K>(scores, work, packed, of, window);
        to_weights<K>(scores[0], state, factors, 0, weight_scale);
    };

    copy_queries<K>(query_tile, queries, work);
    copy_tokens<K>(key_tiles, work.pages.memory, work.rows[0]);
    ptx::cp_async_commit();
    wait_for_copies();
    multiply_keys<K>(scores, own_queries, key_tiles);
    if (next.start < last) copy_tokens<K>(key_tiles + TILE, work.pages.memory, work.rows[1]);
    copy_tokens<K>(value_tiles, work.value_memory, work.rows[0]);
    ptx::cp_async_commit();
    ptx::warpgroup_wait<0>(scores[0]);
    convert_scores(tile);
    pack_weights<K>(weights[0], scores[0]);
    int i = 0;
    for (; next.start < last; i++) {
        // After this wait, the keys of `next` and the values of the tile before it have arrived, and all
        // threads have finished with the tiles that the next copies overwrite.
        wait_for_copies();
        multiply_keys<K>(scores, own_queries, key_tiles + (i + 1) % 2 * TILE);
        add_values<K>(state, weights, value_tiles + i % 2 * TILE);
        if (after.start < last)
            copy_tokens<K>(key_tiles + i % 2 * TILE, work.pages.memory,
                           work.rows[(i + 2) % K::ROW_STAGES]);
        copy_tokens<K>(value_tiles + (i + 1) % 2 * TILE, work.value_memory,
                       work.rows[(i + 1) % K::ROW_STAGES]);
        ptx::cp_async_commit();
        tile = next, next = after, after = seen.after(after);
        store_row(work, (i + 3) % K::ROW_STAGES, find_row(work, after));
        ptx::warpgroup_wait<1>(scores[0]);
        convert_scores(tile);
        // ptxas may move the next wait up past arithmetic (here, the computation of weights), but not past a
        // store. So these values are stored, although nothing reads them.
        sums[0] = state.sum[0][0];
        sums[1] = state.sum[0][1];
        ptx::warpgroup_wait<0>(state.out[0]);
        rescale<K>(state, factors, 0);
        pack_weights<K>(weights[0], scores[0]);
    }
    wait_for_copies();
    add_values<K>(state, weights, value_tiles + i % 2 * TILE);
    ptx::warpgroup_wait<0>(state.out[0]);
    store_results<K>(out, state, work, warp, 1.0f);
}
