// softmax(q @ keys^T * scale) @ values over paged keys and values, for one query token per row.
//
// A row is a sequence of the batch. The plan (generation_plan.py) divides rows into items, which are ranges
// of positions, and assigns consecutive items to each block. A block works on its items one after another,
// for one KV head: keys and values are read once for the whole group of query heads. If a row has several
// items, the block that finishes last merges their results.
//
// In fragments of mma.m16n8k16, g = lane / 4 and t = lane % 4.
#include "attention/partials.cuh"

constexpr int WARPS = 4, TILE = 16;
// Tiles of a warp in shared memory: one is computed while the others are copied. With 8-bit elements two
// tiles are copied at a time instead of one, so that about as many bytes are in flight.
template <class C> constexpr int STAGES = IS_FP8<C> ? 3 : 2;
// Blocks per multiprocessor for which registers suffice without spilling. The plan relies on this number
// (`resident_blocks` in generation_attention.py).
template <int WIDTH> constexpr int BLOCKS = WIDTH <= 32 ? 5 : WIDTH <= 64 ? 4 : WIDTH <= 160 ? 3 : 2;

// Tensor cores compute the transposed matmul, keys [16 tokens, D] @ queries^T [D, 8 heads], so that a
// group of 8 heads uses them fully. A warp computes every fourth tile of 16 tokens, in shared memory of
// its own.
template <class T, int D, int TILES> struct WarpState {
    unsigned queries[TILES][D / 16][2];
    // Transposed: (row g, heads 2t, 2t + 1), (row g + 8, ...). `Chunks` maps rows to dimensions.
    float out[TILES][D / 16][4];
    Softmax softmax[TILES][2];    // heads 2t and 2t + 1; sums of this lane's tokens only

    template <class Chunks> __device__ void load(const T* from, int group) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const T* query = from + (n * 8 + g) * D + Chunks::COLUMN * t;
#pragma unroll
            for (int k = 0; k < D / 8; k++) {
                int d = k / 2 * 16 + k % 2 * Chunks::LATER_COLUMN;
                queries[n][k / 2][k % 2] =
                    n * 8 + g < group ? *reinterpret_cast<const unsigned*>(query + d) : 0;
            }
        }
    }
    // Begins each softmax with the learned score of its head, as in `begin_with`. Only the first lane of
    // a head has the score in its sum.
    __device__ void begin(const T* head_scores, int group) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int head = n * 8 + 2 * t + i;
                if (head >= group) continue;
                softmax[n][i] = begin_with(head_scores, head);
                if (g > 0) softmax[n][i].sum = 0;
            }
        }
    }
};

// Starts the copies of a tile. `rows`: `Pages::row` of the tile's tokens, one per lane; for -1 nothing is
// read and zeros are written. Tiles after the last have only -1. The caller commits a group for each of
// them, too, because `cp_async_wait` counts groups.
template <class C, int D>
__device__ inline void copy_tile(C* keys, C* values, const C* key_memory, const C* value_memory,
                                 int rows) {
    constexpr int VECTORS = D / WIDE<C>, COUNT = TILE * VECTORS;
#pragma unroll
    for (int i = 0; i < (COUNT + 31) / 32; i++) {
        int index = i * 32 + threadIdx.x % 32;
        int token = index / VECTORS, element = index % VECTORS * WIDE<C>;
        int row = __shfl_sync(0xFFFFFFFFu, rows, token);
        if (COUNT % 32 && index >= COUNT) break;
        ptrdiff_t from = ptrdiff_t(max(row, 0)) * D;
        int to = token * ROW<C, D> + element;
        ptx::cp_async_16(keys + to, key_memory + element + from, row >= 0);
        ptx::cp_async_16(values + to, value_memory + element + from, row >= 0);
    }
}

// A tile of keys and values as left operands of matmuls, in chunks of 16 dimensions. The order of the
// dimensions in columns (of keys) and rows (of values) is free, as long as queries and results agree:
// columns 2t and 2t + 1 of chunk k are the two dimensions from 16k + COLUMN * t on, and columns 2t + 8 and
// 2t + 9 are LATER_COLUMN further. Row g is dimension 16k + ROW_STEP * g, and row g + 8 is LATER_ROW
// further.
template <class T, class C, int D> struct Chunks {
    static constexpr int COLUMN = 2, LATER_COLUMN = 8, ROW_STEP = 1, LATER_ROW = 8;
    const T *key, *value;

    __device__ Chunks(const T* keys, const T* values) {
        int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
        key = keys + (matrix % 2 * 8 + row) * ROW<T, D> + matrix / 2 * 8;
        value = values + (matrix / 2 * 8 + row) * ROW<T, D> + matrix % 2 * 8;
    }
    __device__ void load_key(unsigned (&a)[4], int k) { ptx::load_matrix_x4(a, key + k * 16); }
    __device__ void load_value(unsigned (&a)[4], int k) {
        ptx::load_matrix_x4_transposed(a, value + k * 16);
    }
};

// Two 8-bit elements are loaded as one of 16 bits: a register has four dimensions of a key, or two
// dimensions of the values of two tokens. Chunks are loaded in pairs, so they must be requested in order.
template <class T, int D> struct Chunks<T, __nv_fp8_e4m3, D> {
    static constexpr int COLUMN = 4, LATER_COLUMN = 2, ROW_STEP = 2, LATER_ROW = 1;
    const __nv_fp8_e4m3 *key, *value;
    int later;  // the chunk of a pair that the lane addresses, 0 or 1
    unsigned pair[4];

    __device__ Chunks(const __nv_fp8_e4m3* keys, const __nv_fp8_e4m3* values) {
        int lane = threadIdx.x % 32, row = lane % 16 * ROW<__nv_fp8_e4m3, D>;
        later = lane / 16;
        key = keys + row;
        value = values + row;
    }
    // The first dimension of the lane's chunk. If the number of chunks is odd, the last has no partner.
    __device__ int column(int k) const { return min(k + later, D / 16 - 1) * 16; }
    __device__ void load_key(unsigned (&a)[4], int k) {
        if (k % 2 == 0) ptx::load_matrix_x4(pair, key + column(k));
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = expand<T>(pair[k % 2 * 2 + i % 2] >> i / 2 * 16);
    }
    __device__ void load_value(unsigned (&a)[4], int k) {
        if (k % 2 == 0) {
            ptx::load_matrix_x4_transposed(pair, value + column(k));
#pragma unroll
            for (int i = 0; i < 4; i++) pair[i] = __byte_perm(pair[i], 0, 0x3120);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = expand<T>(pair[k % 2 * 2 + i / 2] >> i % 2 * 16);
    }
};

template <class T, class C, int D, int TILES>
__device__ inline void attend_tile(WarpState<T, D, TILES>& state, const C* keys, const C* values,
                                   int start, Item item, Scores to_score) {
    int g = threadIdx.x % 32 / 4;
    float scores[TILES][4] = {};
    Chunks<T, C, D> chunks(keys, values);
    ptx::gather_lanes();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        unsigned a[4];
        chunks.load_key(a, k);
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
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
        unsigned a[4];
        chunks.load_value(a, m);
#pragma unroll
        for (int n = 0; n < TILES; n++)
            ptx::mma_m16n8k16(state.out[n][m], a, weights[n][0], weights[n][1], T());
    }
}

// Merges the results of the four warps and multiplies them by the scale of values. If the item is a `whole`
// row, the results are written to `out`. Otherwise they are written to `partial`, and log2 of the sum of
// 2^score to `partial_log`.
template <class Chunks, class T, int D, int TILES>
__device__ inline void merge_warps(WarpState<T, D, TILES>& state, T* out, float* partial,
                                   float* partial_log, int group, bool whole, float value_scale) {
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
            float* result = results + (warp * HEADS + head) * STRIDE + Chunks::ROW_STEP * g;
#pragma unroll
            for (int m = 0; m < D / 16; m++) {
                result[m * 16] = state.out[n][m][i];
                result[m * 16 + Chunks::LATER_ROW] = state.out[n][m][i + 2];
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
        result = result / sum * value_scale;
        if (whole) {
            out[index] = from_float<T>(result);
        } else {
            partial[index] = result;
            if (d == 0) partial_log[head] = most + log2f(sum);
        }
    }
}

// Grid: (blocks of the plan, kv heads), all of which run at the same time. Dynamic shared memory: WARPS *
// STAGES * 2 * TILE rows of the cache.
template <class T, int D, int TILES, class C = T, class... HeadScores>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS<D * TILES>) generation_attention(
    T* out,                     // [tokens, heads, D]
    float* partial,             // this and the next three: the fields of Partials
    float* partial_log,
    unsigned* arrived,
    const int* partial_starts,
    const T* queries,           // [tokens, heads, D]
    const C* keys,              // [blocks, kv_heads, tokens_per_block, D]
    const C* values,            // [blocks, kv_heads, tokens_per_block, D]
    const Item* items,          // the items of a row are in ascending order
    const int* block_starts,    // [gridDim.x + 1]: the first item of each thread block
    const int* row_starts,      // [rows + 1]: the index of each row's token
    const int* slots,           // [rows]
    const int* block_tables,    // [slots, table_width]
    const float* scales,        // [2, kv_heads] of an 8-bit cache
    int num_heads, int table_width, int tokens_per_block, float scale, float softcap,
    HeadScores... head_scores) {  // nothing, or [heads]
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int TILE_SIZE = TILE * ROW<C, D>, STAGES = ::STAGES<C>;
    C* mine = reinterpret_cast<C*>(ptx::dynamic_shared()) + warp * STAGES * 2 * TILE_SIZE;
    int end = ptx::load_early(block_starts + blockIdx.x + 1);
    for (int i = ptx::load_early(block_starts + blockIdx.x); i < end; i++) {
        Item item = load_early(items + i);
        size_t first_head =
            size_t(ptx::load_early(row_starts + item.row)) * num_heads + kv_head * group;
        const int* table = block_tables + size_t(ptx::load_early(slots + item.row)) * table_width;
        auto pages = find_pages<C, D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
        const C* value_memory = values + (pages.memory - keys);

        // This warp's tiles begin at start, start + step, ...
        constexpr int STEP = WARPS * TILE;
        int start = item.first / TILE * TILE + warp * TILE;
        int num_tiles = start < item.last ? (item.last - start + STEP - 1) / STEP : 0;
        auto rows_of = [&](int tile, bool early) {  // reads the block table, ahead of the copies
            int position = start + tile * STEP + lane % TILE;
            // Pages before the item may have been freed, and positions after the row were never written.
            return position >= item.first && position < item.last ? pages.row(position, early) : -1;
        };
        auto copy = [&](int tile, int rows) {
            C* to = mine + tile % STAGES * 2 * TILE_SIZE;
            copy_tile<C, D>(to, to + TILE_SIZE, pages.memory, value_memory, rows);
            ptx::cp_async_commit();
        };
        int first_rows[STAGES - 1];
#pragma unroll
        for (int tile = 0; tile < STAGES - 1; tile++) first_rows[tile] = rows_of(tile, true);
        ptx::wait_for_previous();  // returns at once after the first item
        Scores to_score(IS_FP8<C> ? scale * scales[kv_head] : scale, softcap);
#pragma unroll
        for (int tile = 0; tile < STAGES - 1; tile++) copy(tile, first_rows[tile]);
        int next_rows = rows_of(STAGES - 1, false);

        WarpState<T, D, TILES> state = {};
        state.template load<Chunks<T, C, D>>(queries + first_head * D, group);
        if constexpr (sizeof...(HeadScores) > 0) {
            if (warp == 0 && is_first(item, partial_starts))
                state.begin(head_scores + kv_head * group..., group);
        }
        for (int tile = 0; tile < num_tiles; tile++) {
            ptx::cp_async_wait<STAGES - 2>();
            __syncwarp();  // all lanes have loaded this tile, and finished with the previous one
            copy(tile + STAGES - 1, next_rows);
            next_rows = rows_of(tile + STAGES, false);
            const C* from = mine + tile % STAGES * 2 * TILE_SIZE;
            attend_tile<T, C, D>(state, from, from + TILE_SIZE, start + tile * STEP, item, to_score);
        }
        ptx::cp_async_wait<0>();
        size_t to = size_t(item.partial) * num_heads + kv_head * group;
        merge_warps<Chunks<T, C, D>>(state, out + first_head * D, partial + to * D, partial_log + to,
                                     group, item.partial < 0,
                                     IS_FP8<C> ? scales[num_kv_heads + kv_head] : 1.0f);
        if (item.partial >= 0)
            merge_if_last<WARPS, D, D <= 64 ? 32 : D <= 128 ? 16 : 8>(
                out + first_head * D, {partial, partial_log, arrived, partial_starts}, item.row, group);
        __syncthreads();  // the next item uses the same shared memory
    }
    ptx::wait_for_previous();  // for a block without items
}
