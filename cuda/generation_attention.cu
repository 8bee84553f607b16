// softmax(q @ keys^T * scale) @ values for one query token a row, over the pages.
//
// A block works on an item of the plan, a stretch of one row, for one KV head: keys and values are
// read once for its whole group of query heads. Results of a row with several items are merged.
#include "pages.cuh"

constexpr int WARPS = 4, TILE = 16, STAGES = 3;

struct Item {  // [first, last) of a row; partial: where its result goes, -1 if it is the row's only one
    int row, first, last, partial;
};

// Tensor cores take the transposed product, keys [16 tokens, D] @ queries^T [D, 8 heads]: a group of
// 8 heads fills them. A warp takes every fourth tile of 16 tokens, through its own shared memory.
template <class T, int D, int TILES> struct WarpState {
    unsigned queries[TILES][D / 16][2];
    float out[TILES][D / 16][4];  // transposed: (d = g, heads 2t, 2t + 1), (d = g + 8, ...)
    Softmax softmax[TILES][2];    // heads 2t and 2t + 1; sums of this lane's tokens only
};

// `rows`: of the tile's tokens in the pages, a lane each; -1 where nothing is to be read.
template <class T, int D>
__device__ inline void copy_tile(T* keys, T* values, const T* key_memory, const T* value_memory, int rows) {
    constexpr int VECTORS = D / 8;
#pragma unroll
    for (int i = 0; i < TILE * VECTORS / 32; i++) {
        int index = i * 32 + threadIdx.x % 32;
        int token = index / VECTORS, element = index % VECTORS * 8;
        int row = __shfl_sync(0xFFFFFFFFu, rows, token);
        ptrdiff_t from = ptrdiff_t(max(row, 0)) * D;
        ptx::cp_async_16(keys + token * ROW<D> + element, key_memory + element + from, row >= 0);
        ptx::cp_async_16(values + token * ROW<D> + element, value_memory + element + from, row >= 0);
    }
}

template <class T, int D, int TILES>
__device__ inline void attend_tile(WarpState<T, D, TILES>& state, const T* keys, const T* values,
                                   int start, Item item, Scores to_score) {
    int lane = threadIdx.x % 32, g = lane / 4, matrix = lane / 8, row = lane % 8;
    float scores[TILES][4] = {};
    const T* key = keys + (matrix % 2 * 8 + row) * ROW<D> + matrix / 2 * 8;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        unsigned a[4];
        ptx::load_matrix_x4(a, key + k * 16);
#pragma unroll
        for (int n = 0; n < TILES; n++)
            ptx::mma_m16n8k16(scores[n], a, state.queries[n][k][0], state.queries[n][k][1], T());
    }
    unsigned weights[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int position = start + g + i / 2 * 8;
            bool seen = position >= item.first && position < item.last;
            scores[n][i] = seen ? to_score(scores[n][i]) : -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float largest = fmaxf(scores[n][i], scores[n][i + 2]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
            Softmax& softmax = state.softmax[n][i];
            float factor = softmax.raise(largest);
#pragma unroll
            for (int m = 0; m < D / 16; m++) {
                state.out[n][m][i] *= factor;
                state.out[n][m][i + 2] *= factor;
            }
            scores[n][i] = ptx::exp2_approx(scores[n][i] - softmax.largest);
            scores[n][i + 2] = ptx::exp2_approx(scores[n][i + 2] - softmax.largest);
            softmax.sum += scores[n][i] + scores[n][i + 2];
        }
        weights[n][0] = ptx::transpose_matrix(pack<T>(scores[n][0], scores[n][1]));
        weights[n][1] = ptx::transpose_matrix(pack<T>(scores[n][2], scores[n][3]));
    }
    const T* value = values + (matrix / 2 * 8 + row) * ROW<D> + matrix % 2 * 8;
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
        unsigned a[4];
        ptx::load_matrix_x4_transposed(a, value + m * 16);
#pragma unroll
        for (int n = 0; n < TILES; n++)
            ptx::mma_m16n8k16(state.out[n][m], a, weights[n][0], weights[n][1], T());
    }
}

// The four warps' results as one, to `out` or, with its logarithm of the sum, to the partial one.
template <class T, int D, int TILES>
__device__ inline void merge_warps(WarpState<T, D, TILES>& state, T* out, float* partial,
                                   float* partial_log, int group, bool whole) {
    constexpr int HEADS = TILES * 8, STRIDE = D + 4;
    __shared__ float largest[WARPS][HEADS], sums[WARPS][HEADS];
    float* results = reinterpret_cast<float*>(ptx::dynamic_shared());  // [warp, head, STRIDE]
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int head = n * 8 + 2 * t + i;
            Softmax softmax = state.softmax[n][i];
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                softmax.sum += __shfl_xor_sync(0xFFFFFFFFu, softmax.sum, step);
            if (g == 0) {
                largest[warp][head] = softmax.largest;
                sums[warp][head] = softmax.sum;
            }
            float* result = results + (warp * HEADS + head) * STRIDE + g;
#pragma unroll
            for (int m = 0; m < D / 16; m++) {
                result[m * 16] = state.out[n][m][i];
                result[m * 16 + 8] = state.out[n][m][i + 2];
            }
        }
    }
    __syncthreads();
    for (int index = threadIdx.x; index < group * D; index += WARPS * 32) {
        int head = index / D, d = index % D;
        float most = largest[0][head], sum = 0, result = 0;
#pragma unroll
        for (int w = 1; w < WARPS; w++) most = fmaxf(most, largest[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float factor = ptx::exp2_approx(largest[w][head] - most);
            sum += factor * sums[w][head];
            result += factor * results[(w * HEADS + head) * STRIDE + d];
        }
        if (whole) {
            out[index] = from_float<T>(result / sum);
        } else {
            partial[index] = result / sum;
            if (d == 0) partial_log[head] = most + log2f(sum);
        }
    }
}

// Grid: (items, kv heads). Dynamic shared memory: WARPS * STAGES * 2 * TILE rows.
template <class T, int D, int TILES>
__global__ void __launch_bounds__(WARPS * 32) generation_attention(
    T* out,                   // [tokens, heads, D]
    float* partial,           // [partials, heads, D]
    float* partial_log,       // [partials, heads]: log2 of the sum of 2^score
    const T* queries,         // [tokens, heads, D]
    const T* keys,            // [blocks, kv_heads, tokens_per_block, D]
    const T* values,          // [blocks, kv_heads, tokens_per_block, D]
    const Item* items,        // [items]; row -1: nothing to do
    const int* row_starts,    // [rows + 1]: a row's only token
    const int* slots,         // [rows]
    const int* block_tables,  // [slots, table_width]
    int num_heads, int table_width, int tokens_per_block, float scale, float softcap) {
    Item item = items[blockIdx.x];
    if (item.row < 0) return;
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    size_t first_head = size_t(row_starts[item.row]) * num_heads + kv_head * group;
    const int* table = block_tables + size_t(slots[item.row]) * table_width;
    auto pages = find_pages<T, D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
    const T* value_memory = values + (pages.memory - keys);
    constexpr int TILE_SIZE = TILE * ROW<D>;
    T* mine = reinterpret_cast<T*>(ptx::dynamic_shared()) + warp * STAGES * 2 * TILE_SIZE;

    // This warp's tiles begin at start, start + step, ...
    constexpr int STEP = WARPS * TILE;
    int start = item.first / TILE * TILE + warp * TILE;
    int num_tiles = start < item.last ? (item.last - start + STEP - 1) / STEP : 0;
    auto rows_of = [&](int tile) {  // the table is read ahead of its use
        int position = start + tile * STEP + lane % TILE;
        // Pages outside of the item may be gone, and rows behind its end were never written.
        return position >= item.first && position < item.last ? pages.row(position) : -1;
    };
    auto copy = [&](int tile, int rows) {
        T* to = mine + tile % STAGES * 2 * TILE_SIZE;
        if (tile < num_tiles)
            copy_tile<T, D>(to, to + TILE_SIZE, pages.memory, value_memory, rows);
        ptx::cp_async_commit();
    };
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; tile++) copy(tile, rows_of(tile));
    int next_rows = rows_of(STAGES - 1);

    WarpState<T, D, TILES> state = {};
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const T* query = queries + (first_head + n * 8 + g) * D + 2 * t;
#pragma unroll
        for (int k = 0; k < D / 8; k++)
            state.queries[n][k / 2][k % 2] =
                n * 8 + g < group ? *reinterpret_cast<const unsigned*>(query + k * 8) : 0;
    }
    Scores to_score(scale, softcap);
    for (int tile = 0; tile < num_tiles; tile++) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncwarp();  // this tile has come for all lanes, and all have done with the one before
        copy(tile + STAGES - 1, next_rows);
        next_rows = rows_of(tile + STAGES);
        const T* from = mine + tile % STAGES * 2 * TILE_SIZE;
        attend_tile(state, from, from + TILE_SIZE, start + tile * STEP, item, to_score);
    }
    ptx::cp_async_wait<0>();
    size_t to = size_t(item.partial) * num_heads + kv_head * group;
    merge_warps(state, out + first_head * D, partial + to * D, partial_log + to, group,
                item.partial < 0);
}

// float32 has no tensor cores of its precision: a warp takes a query head, lanes its elements.
template <int D>
__global__ void __launch_bounds__(WARPS * 32, 4) generation_attention_float(
    float* out, float* partial, float* partial_log, const float* queries, const float* keys,
    const float* values, const Item* items, const int* row_starts, const int* slots,
    const int* block_tables, int num_heads, int table_width, int tokens_per_block, float scale,
    float softcap) {
    constexpr int COUNT = (D + 31) / 32;
    Item item = items[blockIdx.x];
    if (item.row < 0) return;
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int lane = threadIdx.x % 32;
    const int* table = block_tables + size_t(slots[item.row]) * table_width;
    auto pages = find_pages<float, D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
    const float* value_memory = values + (pages.memory - keys);
    Scores to_score(scale, softcap);
    for (int own = threadIdx.x / 32; own < group; own += WARPS) {
        int head = kv_head * group + own;
        size_t index = (size_t(row_starts[item.row]) * num_heads + head) * D;
        float query[COUNT], result[COUNT] = {};
        for (int i = 0; i < COUNT; i++)
            query[i] = lane + 32 * i < D ? queries[index + lane + 32 * i] : 0.0f;
        Softmax softmax;
        for (int position = item.first; position < item.last; position++) {
            size_t from = pages.offset(position) + lane;
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
        bool whole = item.partial < 0;
        size_t place = size_t(item.partial) * num_heads + head;
        float* to = whole ? out + index : partial + place * D;
        for (int i = 0; i < COUNT; i++)
            if (lane + 32 * i < D) to[lane + 32 * i] = result[i] / softmax.sum;
        if (!whole && lane == 0) partial_log[place] = softmax.largest + log2f(softmax.sum);
    }
}

// out = sum of 2^(log - largest log) * partial / sum of 2^(log - largest log), over a row's partials.
// Grid: (rows, heads), D threads.
template <class T, int D>
__global__ void merge_partials(
    T* out,                     // [tokens, heads, D]
    const float* partial,       // [partials, heads, D]
    const float* partial_log,   // [partials, heads]
    const int* partial_starts,  // [rows + 1]
    const int* row_starts) {    // [rows + 1]
    int row = blockIdx.x, head = blockIdx.y, num_heads = gridDim.y, d = threadIdx.x;
    int first = partial_starts[row], last = partial_starts[row + 1];
    if (first == last) return;
    float largest = -INFINITY, sum = 0, result = 0;
    for (int i = first; i < last; i++) largest = fmaxf(largest, partial_log[i * num_heads + head]);
    for (int i = first; i < last; i++) {
        size_t place = size_t(i) * num_heads + head;
        float weight = ptx::exp2_approx(partial_log[place] - largest);
        sum += weight;
        result += weight * partial[place * D + d];
    }
    out[(size_t(row_starts[row]) * num_heads + head) * D + d] = from_float<T>(result / sum);
}
