// softmax(q @ keys^T * scale, causal) @ values for rows of several query tokens, over the pages.
//
// FlashAttention-2: a block holds a tile of queries and passes over keys and values in tiles of 64 or
// 32 tokens, which are copied while the ones before are computed with. The query heads of one KV
// head are packed: packed query m of a row is token m / group, head m % group of the group.
#include "pages.cuh"

constexpr int WARPS = 4, THREADS = WARPS * 32;

// What a kernel is made for: queries of T, heads of D.
template <class Element, int HEAD_DIM, bool IS_CAPPED, bool HAS_SINK> struct Kind {
    using T = Element;
    static constexpr int D = HEAD_DIM;
    static constexpr bool SOFTCAP = IS_CAPPED, SINK = HAS_SINK;
    // 16-row matrices of a warp: with two, each fragment of keys and values is used twice; the
    // results of 256 dimensions leave no registers for that, nor do those of 128 beside a sink.
    static constexpr int MATRICES = D > 128 || (D == 128 && SINK) ? 1 : 2;
    static constexpr int QUERIES = WARPS * 16 * MATRICES;
    // of a tile of keys and values: what shared memory holds twice, and registers have scores for
    static constexpr int TOKENS = D > 128 || (D == 128 && SOFTCAP) ? 32 : 64;
};

struct Item {  // packed queries of a row from `first_query` on, which see keys in [first, last)
    int row, first_query, first, last;
};

struct Window {  // a query at a position sees the keys in (position - size, position]
    int size;    // 0: all up to its own
    __device__ bool sees(int position, int key) const {
        return key <= position && (size == 0 || key > position - size);
    }
};

struct Tile {  // TOKENS positions; while sinking, those that are the sink's
    int start;
    bool sinking;
};

// What a block works on. It lies in shared memory: the registers are for its results.
template <class K> struct Work {
    using T = typename K::T;
    static constexpr int D = K::D;
    Item item;
    int num_packed, group, num_heads;
    int first_position;  // of the row's first query
    int low, high;       // positions of the item's first and last query
    int sink;            // so many first keys are seen besides
    size_t first_head;   // of its packed queries, in `queries` and `out`
    Pages<T, D> pages;
    const T* value_memory;
    int rows[2][K::TOKENS];  // of a tile's tokens in the pages, -1 where nothing is to be read

    __device__ int position(int packed) const {
        return first_position + min(packed, num_packed - 1) / group;
    }
    // Tiles of the sink come first, and then those of the item from behind it on.
    __device__ Tile first_tile() const { return {K::SINK ? 0 : item_tile(), K::SINK}; }
    __device__ Tile tile_after(Tile tile) const {
        int start = tile.start + K::TOKENS;
        if (!K::SINK || !tile.sinking || start < sink) return {start, tile.sinking};
        return {max(item_tile(), sink / K::TOKENS * K::TOKENS), false};
    }
    __device__ int item_tile() const { return item.first / K::TOKENS * K::TOKENS; }
    // Elements from the beginning of `queries` or `out`.
    __device__ size_t offset(int packed) const {
        return (first_head + size_t(packed / group) * num_heads + packed % group) * D;
    }
};

template <class K> struct WarpState {
    float out[K::MATRICES][K::D / 8][4];  // (row g, d = 2t, 2t + 1), (row g + 8, ...)
    float largest[K::MATRICES][2];        // score of rows g and g + 8, not scaled
    float sum[K::MATRICES][2];            // of this lane's columns only
};

// The pages' table is read a tile ahead of its use.
template <class K> __device__ inline void find_rows(Work<K>& work, int stage, Tile tile) {
    if (threadIdx.x >= K::TOKENS) return;
    int position = tile.start + threadIdx.x;
    // Pages outside of the item may be gone, and rows behind its end were never written.
    bool seen = position >= work.item.first || (K::SINK && position < work.sink);
    bool valid = seen && position < work.item.last;
    work.rows[stage][threadIdx.x] = valid ? work.pages.row(position) : -1;
}

template <class K, class T = typename K::T>
__device__ inline void copy_tokens(T* keys, T* values, const Work<K>& work, int stage) {
    // Some rows are read before the copies, which no reading can overtake: as many as fit.
    constexpr int D = K::D, VECTORS = D / 8, COUNT = K::TOKENS * VECTORS / THREADS;
    constexpr int STEP = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : COUNT;
    const T *key_memory = work.pages.memory, *value_memory = work.value_memory;
#pragma unroll 1
    for (int first = 0; first < COUNT; first += STEP) {
        int rows[STEP];
#pragma unroll
        for (int i = 0; i < STEP; i++)
            rows[i] = work.rows[stage][((first + i) * THREADS + threadIdx.x) / VECTORS];
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            unsigned index = (first + i) * THREADS + threadIdx.x;
            unsigned token = index / VECTORS, element = index % VECTORS * 8;
            unsigned to = token * ROW<D> + element;
            ptrdiff_t from = ptrdiff_t(max(rows[i], 0)) * D;
            ptx::cp_async_16(keys + to, key_memory + element + from, rows[i] >= 0);
            ptx::cp_async_16(values + to, value_memory + element + from, rows[i] >= 0);
        }
    }
}

template <class K, class T = typename K::T>
__device__ inline void copy_queries(T* to, const T* from, const Work<K>& work) {
    constexpr int D = K::D, VECTORS = D / 8;
#pragma unroll 2
    for (int i = 0; i < K::QUERIES * VECTORS / THREADS; i++) {
        int index = i * THREADS + threadIdx.x;
        int query = index / VECTORS, element = index % VECTORS * 8;
        int packed = work.item.first_query + query;
        bool valid = packed < work.num_packed;
        size_t offset = valid ? work.offset(packed) : 0;
        ptx::cp_async_16(to + query * ROW<D> + element, from + offset + element, valid);
    }
}

template <class K, class T = typename K::T>
__device__ inline void multiply_keys(float (&scores)[K::MATRICES][K::TOKENS / 8][4], const T* queries,
                                     const T* keys) {
    constexpr int D = K::D;
    int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const T* query = queries + (matrix % 2 * 8 + row) * ROW<D> + matrix / 2 * 8;
    const T* key = keys + (matrix / 2 * 8 + row) * ROW<D> + matrix % 2 * 8;
#pragma unroll D == 128 ? 1 : 2  // what fits into registers
    for (int k = 0; k < D / 16; k++) {
        unsigned a[K::MATRICES][4];
#pragma unroll
        for (int m = 0; m < K::MATRICES; m++)
            ptx::load_matrix_x4(a[m], query + m * 16 * ROW<D> + k * 16);
#pragma unroll
        for (int n = 0; n < K::TOKENS / 16; n++) {
            unsigned b[4];
            ptx::load_matrix_x4(b, key + n * 16 * ROW<D> + k * 16);
#pragma unroll
            for (int m = 0; m < K::MATRICES; m++) {
                ptx::mma_m16n8k16(scores[m][2 * n], a[m], b[0], b[1], T());
                ptx::mma_m16n8k16(scores[m][2 * n + 1], a[m], b[2], b[3], T());
            }
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
    const T* value = values + (matrix % 2 * 8 + row) * ROW<D> + matrix / 2 * 8;
#pragma unroll
    for (int k = 0; k < K::TOKENS / 16; k++) {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            unsigned b[4];
            ptx::load_matrix_x4_transposed(b, value + k * 16 * ROW<D> + n * 16);
#pragma unroll
            for (int m = 0; m < K::MATRICES; m++) {
                ptx::mma_m16n8k16(state.out[m][2 * n], weights[m][k], b[0], b[1], T());
                ptx::mma_m16n8k16(state.out[m][2 * n + 1], weights[m][k], b[2], b[3], T());
            }
        }
    }
}

// Grid: (items, kv heads). Dynamic shared memory: QUERIES + 4 * TOKENS rows.
template <class T, int D, bool SOFTCAP, bool SINK>
__global__ void __launch_bounds__(THREADS) context_attention(
    T* out,                   // [tokens, heads, D]
    const T* queries,         // [tokens, heads, D]
    const T* keys,            // [blocks, kv_heads, tokens_per_block, D]
    const T* values,          // [blocks, kv_heads, tokens_per_block, D]
    const Item* items,        // [items]; row -1: nothing to do
    const int* row_starts,    // [rows + 1]
    const int* kv_lengths,    // [rows]
    const int* slots,         // [rows]
    const int* block_tables,  // [slots, table_width]
    int num_heads, int table_width, int tokens_per_block, int window_size, int sink, float scale,
    float softcap) {
    using K = Kind<T, D, SOFTCAP, SINK>;
    __shared__ Work<K> work;
    if (items[blockIdx.x].row < 0) return;
    if (threadIdx.x == 0) {
        Item item = items[blockIdx.x];
        int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
        int row_start = row_starts[item.row], num_new = row_starts[item.row + 1] - row_start;
        const int* table = block_tables + size_t(slots[item.row]) * table_width;
        auto pages = find_pages<T, D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
        work = {item, num_new * group, group, num_heads, kv_lengths[item.row] - num_new, 0, 0, sink,
                size_t(row_start) * num_heads + kv_head * group, pages,
                values + (pages.memory - keys)};
        work.low = work.position(item.first_query);
        work.high = work.position(item.first_query + K::QUERIES - 1);
    }
    __syncthreads();
    constexpr int TILE = K::TOKENS * ROW<D>;
    T* query_tile = reinterpret_cast<T*>(ptx::dynamic_shared());
    T* tiles = query_tile + K::QUERIES * ROW<D>;
    find_rows(work, 0, work.first_tile());
    find_rows(work, 1, work.tile_after(work.first_tile()));
    __syncthreads();
    copy_queries<K>(query_tile, queries, work);
    copy_tokens<K>(tiles, tiles + TILE, work, 0);
    ptx::cp_async_commit();

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    WarpState<K> state = {};
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++)
        state.largest[m][0] = state.largest[m][1] = -INFINITY;
    Window window{window_size};
    Scores to_score(scale, softcap);
    float weight_scale = SOFTCAP ? 1.0f : to_score.scale;  // from what `scores` holds to exponents
    Tile tile = work.first_tile();
    for (int stage = 0; tile.start < work.item.last; stage ^= 1, tile = work.tile_after(tile)) {
        T* next_tiles = tiles + (stage ^ 1) * 2 * TILE;
        Tile next = work.tile_after(tile);
        if (next.start < work.item.last)
            copy_tokens<K>(next_tiles, next_tiles + TILE, work, stage ^ 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncthreads();
        find_rows(work, stage, work.tile_after(next));
        const T* key_tile = tiles + stage * 2 * TILE;
        float scores[K::MATRICES][K::TOKENS / 8][4] = {};
        unsigned weights[K::MATRICES][K::TOKENS / 16][4];
        int own_queries = warp * 16 * K::MATRICES;
        multiply_keys<K>(scores, query_tile + own_queries * ROW<D>, key_tile);
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
        add_values<K>(state, weights, key_tile + TILE);
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < K::MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor = 1 / warp_sum<4>(state.sum[m][half]);
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

// float32 has no tensor cores of its precision: a warp takes a packed query, lanes its elements.
template <int D>
__global__ void __launch_bounds__(THREADS, 4) context_attention_float(
    float* out, const float* queries, const float* keys, const float* values, const Item* items,
    const int* row_starts, const int* kv_lengths, const int* slots, const int* block_tables,
    int num_heads, int table_width, int tokens_per_block, int window_size, int sink, float scale,
    float softcap) {
    constexpr int COUNT = (D + 31) / 32;
    Item item = items[blockIdx.x];
    if (item.row < 0) return;
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int row_start = row_starts[item.row], num_new = row_starts[item.row + 1] - row_start;
    int lane = threadIdx.x % 32;
    const int* table = block_tables + size_t(slots[item.row]) * table_width;
    auto pages = find_pages<float, D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
    const float* value_memory = values + (pages.memory - keys);
    Scores to_score(scale, softcap);
    using WithSink = Kind<float, D, false, true>;
    int tile = sink ? WithSink::QUERIES : Kind<float, D, false, false>::QUERIES;
    int end = min(item.first_query + tile, num_new * group);
    for (int packed = item.first_query + threadIdx.x / 32; packed < end; packed += WARPS) {
        int token = row_start + packed / group;
        size_t index = (size_t(token) * num_heads + kv_head * group + packed % group) * D;
        int position = kv_lengths[item.row] - num_new + packed / group;
        float query[COUNT], result[COUNT] = {};
        for (int i = 0; i < COUNT; i++)
            query[i] = lane + 32 * i < D ? queries[index + lane + 32 * i] : 0.0f;
        Softmax softmax;
        int first = window_size ? max(0, position - window_size + 1) : 0;
        for (int key = min(sink, first) > 0 ? 0 : first; key <= position; key++) {
            if (key == sink) key = max(key, first);
            size_t from = pages.offset(key) + lane;
            float product = 0;
            for (int i = 0; i < COUNT; i++)
                if (lane + 32 * i < D) product += query[i] * pages.memory[from + 32 * i];
            float score = to_score(warp_sum(product));
            float factor = softmax.raise(score), weight = ptx::exp2_approx(score - softmax.largest);
            softmax.sum += weight;
            for (int i = 0; i < COUNT; i++)
                if (lane + 32 * i < D)
                    result[i] = result[i] * factor + weight * value_memory[from + 32 * i];
        }
        for (int i = 0; i < COUNT; i++)
            if (lane + 32 * i < D) out[index + lane + 32 * i] = result[i] / softmax.sum;
    }
}
