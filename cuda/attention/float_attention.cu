// Attention of both phases in float32, a precision that tensor cores do not have. A warp computes the
// result of one query of one head; lane l holds elements l, l + 32, ...
#include "attention/partials.cuh"

constexpr int WARPS = 4;

// The state of one query while a warp iterates over keys and values.
template <int D, class C> struct Query {
    static constexpr int COUNT = (D + 31) / 32;
    int lane;
    Pages<C, D> pages;
    const C* value_memory;
    Scores to_score;
    float elements[COUNT], result[COUNT] = {};
    Softmax softmax;

    __device__ Query(const float* from, Pages<C, D> pages, const C* value_memory, Scores to_score)
        : lane(threadIdx.x % 32), pages(pages), value_memory(value_memory), to_score(to_score) {
        for (int i = 0; i < COUNT; i++)
            elements[i] = lane + 32 * i < D ? from[lane + 32 * i] : 0.0f;
    }
    __device__ void attend(int position) {
        size_t from = pages.offset(position) + lane;
        float product = 0;
        for (int i = 0; i < COUNT; i++)
            if (lane + 32 * i < D) product += elements[i] * to_float(pages.memory[from + 32 * i]);
        float score = to_score(warp_sum(product));
        float factor = softmax.raise(score), weight = ptx::exp2_approx(score - softmax.largest);
        softmax.sum += weight;
        for (int i = 0; i < COUNT; i++)
            if (lane + 32 * i < D)
                result[i] = result[i] * factor + weight * to_float(value_memory[from + 32 * i]);
    }
    __device__ void write(float* to, float value_scale) const {
        for (int i = 0; i < COUNT; i++)
            if (lane + 32 * i < D) to[lane + 32 * i] = result[i] / softmax.sum * value_scale;
    }
};

// The cache of one row and KV head, from the kernel's arguments.
template <int D, class C> struct Cache {
    Pages<C, D> pages;
    const C* value_memory;
    float key_scale = 1, value_scale = 1;

    __device__ Cache(const C* keys, const C* values, const int* table, const float* scales,
                     int tokens_per_block)
        : pages(find_pages<C, D>(keys, table, blockIdx.y, gridDim.y, tokens_per_block)),
          value_memory(values + (pages.memory - keys)) {
        if constexpr (IS_FP8<C>) {
            key_scale = scales[blockIdx.y];
            value_scale = scales[gridDim.y + blockIdx.y];
        }
    }
};

// Grid: (items, kv heads). Arguments as in generation_attention.cu, without `block_starts`: each item has
// its own block.
template <int D, class C = float, class... HeadScores>
__global__ void __launch_bounds__(WARPS * 32, D <= 128 ? 8 : 4) generation_attention_float(
    float* out, float* partial, float* partial_log, unsigned* arrived, const int* partial_starts,
    const float* queries, const C* keys, const C* values, const Item* items, const int* row_starts,
    const int* slots, const int* block_tables, const float* scales, int num_heads, int table_width,
    int tokens_per_block, float scale, float softcap, HeadScores... head_scores) {
    ptx::wait_for_previous();
    Item item = items[blockIdx.x];
    if (item.row < 0) return;
    int group = num_heads / gridDim.y;
    const int* table = block_tables + size_t(slots[item.row]) * table_width;
    Cache<D, C> cache(keys, values, table, scales, tokens_per_block);
    Scores to_score(scale * cache.key_scale, softcap);
    for (int own = threadIdx.x / 32; own < group; own += WARPS) {
        int head = blockIdx.y * group + own;
        size_t index = (size_t(row_starts[item.row]) * num_heads + head) * D;
        Query<D, C> query(queries + index, cache.pages, cache.value_memory, to_score);
        if constexpr (sizeof...(HeadScores) > 0) {
            if (is_first(item, partial_starts)) query.softmax = begin_with(head_scores..., head);
        }
        for (int position = item.first; position < item.last; position++) query.attend(position);
        size_t part = size_t(item.partial) * num_heads + head;
        query.write(item.partial < 0 ? out + index : partial + part * D, cache.value_scale);
        if (item.partial >= 0 && threadIdx.x % 32 == 0)
            partial_log[part] = query.softmax.largest + log2f(query.softmax.sum);
    }
    size_t first_head = size_t(row_starts[item.row]) * num_heads + blockIdx.y * group;
    if (item.partial >= 0)
        merge_if_last<WARPS, D, D <= 128 ? 2 : 1>(
            out + first_head * D, {partial, partial_log, arrived, partial_starts}, item.row, group);
}

// Equal to `Item` in context_work.cuh, under another name, because partials.cuh also defines an `Item`.
struct ContextItem {
    int row, first_query, first, last;
};

// Grid: (items, kv heads). Arguments as in context_attention.cu; `num_queries`: packed queries per item.
template <int D, class C = float, class... HeadScores>
__global__ void __launch_bounds__(WARPS * 32, 4) context_attention_float(
    float* out, const float* queries, const C* keys, const C* values, const ContextItem* items,
    const int* row_starts, const int* kv_lengths, const int* slots, const int* block_tables,
    const float* scales, int num_heads, int table_width, int tokens_per_block, int window_size,
    int sink, float scale, float softcap, int num_queries, HeadScores... head_scores) {
    ptx::wait_for_previous();
    ContextItem item = items[blockIdx.x];
    if (item.row < 0) return;
    int group = num_heads / gridDim.y;
    int row_start = row_starts[item.row], num_new = row_starts[item.row + 1] - row_start;
    const int* table = block_tables + size_t(slots[item.row]) * table_width;
    Cache<D, C> cache(keys, values, table, scales, tokens_per_block);
    Scores to_score(scale * cache.key_scale, softcap);
    int end = min(item.first_query + num_queries, num_new * group);
    for (int packed = item.first_query + threadIdx.x / 32; packed < end; packed += WARPS) {
        int token = row_start + packed / group;
        size_t index = (size_t(token) * num_heads + blockIdx.y * group + packed % group) * D;
        int position = kv_lengths[item.row] - num_new + packed / group;
        Query<D, C> query(queries + index, cache.pages, cache.value_memory, to_score);
        if constexpr (sizeof...(HeadScores) > 0)
            query.softmax = begin_with(head_scores..., blockIdx.y * group + packed % group);
        int first = max(0, Window{window_size}.first(position));
        for (int key = 0; key < min(sink, first); key++) query.attend(key);
        for (int key = first; key <= position; key++) query.attend(key);
        query.write(out + index, cache.value_scale);
    }
}
