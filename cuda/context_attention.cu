// softmax(q @ keys^T * scale, causal) @ values for rows of several query tokens, over the pages.
//
// FlashAttention-2: a block holds a tile of queries and passes over keys and values in tiles of 64
// tokens, which are copied while the ones before are computed with. The query heads of one KV head
// are packed: packed query m of a row is token m / group, head m % group of the group.
#include "pages.cuh"

constexpr int WARPS = 4, THREADS = WARPS * 32, TOKENS = 64;
// 16-row matrices of a warp: with two, each fragment of keys and values is used twice; the results
// of 256 dimensions leave no registers for that.
template <int D> constexpr int MATRICES = D > 128 ? 1 : 2;
template <int D> constexpr int QUERIES = WARPS * 16 * MATRICES<D>;

struct Item {  // packed queries of a row from `first_query` on, which see keys in [first, last)
    int row, first_query, first, last;
};

struct Window {  // a query at a position sees the keys in (position - size, position]
    int size;    // 0: all up to its own
    __device__ bool sees(int position, int key) const {
        return key <= position && (size == 0 || key > position - size);
    }
};

template <class T, int D> struct WarpState {
    float out[MATRICES<D>][D / 8][4];  // (row g, d = 2t, 2t + 1), (row g + 8, ...)
    float largest[MATRICES<D>][2];     // of rows g and g + 8
    float sum[MATRICES<D>][2];         // of this lane's columns only
    int position[MATRICES<D>][2];
};

template <class T, int D>
__device__ inline void copy_tokens(T* keys, T* values, const Pages<T, D>& pages,
                                   const T* value_memory, int start, Item item) {
    constexpr int VECTORS = D / 8;
#pragma unroll
    for (int i = 0; i < TOKENS * VECTORS / THREADS; i++) {
        int index = i * THREADS + threadIdx.x;
        int token = index / VECTORS, element = index % VECTORS * 8, position = start + token;
        // Pages outside of the item may be gone, and rows behind its end were never written.
        bool valid = position >= item.first && position < item.last;
        size_t from = valid ? pages.offset(position) + element : 0;
        ptx::cp_async_16(keys + token * ROW<D> + element, pages.memory + from, valid);
        ptx::cp_async_16(values + token * ROW<D> + element, value_memory + from, valid);
    }
}

template <class T, int D>
__device__ inline void copy_queries(T* to, const T* from, int num_heads, int group, Item item,
                                    int num_packed) {
    constexpr int VECTORS = D / 8;
#pragma unroll
    for (int i = 0; i < QUERIES<D> * VECTORS / THREADS; i++) {
        int index = i * THREADS + threadIdx.x;
        int query = index / VECTORS, element = index % VECTORS * 8;
        int packed = item.first_query + query;
        bool valid = packed < num_packed;
        size_t head = valid ? size_t(packed / group) * num_heads + packed % group : 0;
        ptx::cp_async_16(to + query * ROW<D> + element, from + head * D + element, valid);
    }
}

template <class T, int D>
__device__ inline void multiply_keys(float (&scores)[MATRICES<D>][TOKENS / 8][4], const T* queries,
                                     const T* keys) {
    int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const T* query = queries + (matrix % 2 * 8 + row) * ROW<D> + matrix / 2 * 8;
    const T* key = keys + (matrix / 2 * 8 + row) * ROW<D> + matrix % 2 * 8;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        unsigned a[MATRICES<D>][4];
#pragma unroll
        for (int m = 0; m < MATRICES<D>; m++)
            ptx::load_matrix_x4(a[m], query + m * 16 * ROW<D> + k * 16);
#pragma unroll
        for (int n = 0; n < TOKENS / 16; n++) {
            unsigned b[4];
            ptx::load_matrix_x4(b, key + n * 16 * ROW<D> + k * 16);
#pragma unroll
            for (int m = 0; m < MATRICES<D>; m++) {
                ptx::mma_m16n8k16(scores[m][2 * n], a[m], b[0], b[1], T());
                ptx::mma_m16n8k16(scores[m][2 * n + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

// Products to weights, with all that was summed before brought to the new largest score.
template <class T, int D>
__device__ inline void weigh(float (&scores)[TOKENS / 8][4], WarpState<T, D>& state, int m, int start,
                             bool masked, Window window, Scores to_score) {
    int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = state.largest[m][half];
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& score = scores[n][2 * half + i];
                score = to_score(score);
                int key = start + n * 8 + 2 * t + i;
                if (masked && !window.sees(state.position[m][half], key)) score = -INFINITY;
                largest = fmaxf(largest, score);
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        float zero = largest == -INFINITY ? 0.0f : largest;  // nothing seen yet: all weights are 0
        float factor = ptx::exp2_approx(state.largest[m][half] - zero);
        state.largest[m][half] = largest;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& score = scores[n][2 * half + i];
                score = ptx::exp2_approx(score - zero);
                sum += score;
            }
        }
        state.sum[m][half] = state.sum[m][half] * factor + sum;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            state.out[m][n][2 * half] *= factor;
            state.out[m][n][2 * half + 1] *= factor;
        }
    }
}

template <class T, int D>
__device__ inline void add_values(WarpState<T, D>& state,
                                  float (&weights)[MATRICES<D>][TOKENS / 8][4], const T* values) {
    int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const T* value = values + (matrix % 2 * 8 + row) * ROW<D> + matrix / 2 * 8;
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        unsigned a[MATRICES<D>][4];
#pragma unroll
        for (int m = 0; m < MATRICES<D>; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float(&both)[4] = weights[m][2 * k + i / 2];
                a[m][i] = pack<T>(both[i % 2 * 2], both[i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            unsigned b[4];
            ptx::load_matrix_x4_transposed(b, value + k * 16 * ROW<D> + n * 16);
#pragma unroll
            for (int m = 0; m < MATRICES<D>; m++) {
                ptx::mma_m16n8k16(state.out[m][2 * n], a[m], b[0], b[1], T());
                ptx::mma_m16n8k16(state.out[m][2 * n + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

// Grid: (items, kv heads). Dynamic shared memory: QUERIES + 4 * TOKENS rows.
template <class T, int D>
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
    int num_heads, int table_width, int tokens_per_block, int window_size, float scale,
    float softcap) {
    Item item = items[blockIdx.x];
    if (item.row < 0) return;
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int row_start = row_starts[item.row], num_new = row_starts[item.row + 1] - row_start;
    int first_position = kv_lengths[item.row] - num_new, num_packed = num_new * group;
    size_t first_head = size_t(row_start) * num_heads + kv_head * group;
    const int* table = block_tables + size_t(slots[item.row]) * table_width;
    Pages<T, D> pages(keys, table, kv_head, num_kv_heads, tokens_per_block);
    const T* value_memory = values + (pages.memory - keys);
    constexpr int TILE = TOKENS * ROW<D>;
    T* query_tile = reinterpret_cast<T*>(ptx::dynamic_shared());
    T* tiles = query_tile + QUERIES<D> * ROW<D>;

    int start = item.first / TOKENS * TOKENS;
    copy_queries<T, D>(
        query_tile, queries + first_head * D, num_heads, group, item, num_packed);
    copy_tokens<T, D>(tiles, tiles + TILE, pages, value_memory, start, item);
    ptx::cp_async_commit();

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int first_packed = item.first_query + warp * 16 * MATRICES<D>;
    WarpState<T, D> state = {};
#pragma unroll
    for (int m = 0; m < MATRICES<D>; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int packed = min(first_packed + m * 16 + half * 8 + g, num_packed - 1);
            state.position[m][half] = first_position + packed / group;
            state.largest[m][half] = -INFINITY;
        }
    }
    // The positions of the block's queries: tiles that all of them see need no mask.
    int low = first_position + item.first_query / group;
    int high = first_position + (min(item.first_query + QUERIES<D>, num_packed) - 1) / group;
    Window window{window_size};
    Scores to_score(scale, softcap);
    for (int stage = 0; start < item.last; start += TOKENS, stage ^= 1) {
        T* next = tiles + (stage ^ 1) * 2 * TILE;
        if (start + TOKENS < item.last)
            copy_tokens<T, D>(next, next + TILE, pages, value_memory, start + TOKENS, item);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncthreads();
        const T* key_tile = tiles + stage * 2 * TILE;
        float scores[MATRICES<D>][TOKENS / 8][4] = {};
        multiply_keys<T, D>(scores, query_tile + warp * 16 * MATRICES<D> * ROW<D>, key_tile);
        bool masked = !window.sees(low, start + TOKENS - 1) || !window.sees(high, start);
#pragma unroll
        for (int m = 0; m < MATRICES<D>; m++)
            weigh<T, D>(scores[m], state, m, start, masked, window, to_score);
        add_values<T, D>(state, scores, key_tile + TILE);
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < MATRICES<D>; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = warp_sum<4>(state.sum[m][half]);
            int packed = first_packed + m * 16 + half * 8 + g;
            if (packed >= num_packed) continue;
            size_t head = first_head + size_t(packed / group) * num_heads + packed % group;
            T* to = out + head * D + 2 * t;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *reinterpret_cast<unsigned*>(to + n * 8) = pack<T>(
                    state.out[m][n][2 * half] / sum, state.out[m][n][2 * half + 1] / sum);
        }
    }
}

// float32 has no tensor cores of its precision: a warp takes a packed query, lanes its elements.
template <int D>
__global__ void __launch_bounds__(THREADS) context_attention_float(
    float* out, const float* queries, const float* keys, const float* values, const Item* items,
    const int* row_starts, const int* kv_lengths, const int* slots, const int* block_tables,
    int num_heads, int table_width, int tokens_per_block, int window_size, float scale,
    float softcap) {
    constexpr int COUNT = (D + 31) / 32;
    Item item = items[blockIdx.x];
    if (item.row < 0) return;
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int row_start = row_starts[item.row], num_new = row_starts[item.row + 1] - row_start;
    int lane = threadIdx.x % 32;
    const int* table = block_tables + size_t(slots[item.row]) * table_width;
    Pages<float, D> pages(keys, table, kv_head, num_kv_heads, tokens_per_block);
    const float* value_memory = values + (pages.memory - keys);
    Scores to_score(scale, softcap);
    int end = min(item.first_query + QUERIES<D>, num_new * group);
    for (int packed = item.first_query + threadIdx.x / 32; packed < end; packed += WARPS) {
        int token = row_start + packed / group;
        size_t index = (size_t(token) * num_heads + kv_head * group + packed % group) * D;
        int position = kv_lengths[item.row] - num_new + packed / group;
        float query[COUNT], result[COUNT] = {};
        for (int i = 0; i < COUNT; i++)
            query[i] = lane + 32 * i < D ? queries[index + lane + 32 * i] : 0.0f;
        Softmax softmax;
        int key = window_size ? max(0, position - window_size + 1) : 0;
        for (; key <= position; key++) {
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
