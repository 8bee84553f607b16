// Finds the place of each token in the pages, and writes the keys and values of the token there. Queries
// and keys are normalized (QK norm) and rotated (RoPE) before.
#include "attention/fp8.cuh"

// cells[token] = block * tokens_per_block + offset, the place of the token in the pages, or -1 if the token
// is after the last row. A row has the tokens of one sequence. Runs once per step.
__global__ void locate_tokens(
    int* cells,               // [tokens]
    const int* row_starts,    // [rows + 1]
    const int* kv_lengths,    // [rows]
    const int* slots,         // [rows]
    const int* block_tables,  // [slots, table_width]
    int num_tokens, int num_rows, int table_width, int tokens_per_block) {
    ptx::wait_for_previous();
    int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= num_tokens) return;
    if (token >= row_starts[num_rows]) {
        cells[token] = -1;
        return;
    }
    int first = 0, last = num_rows;  // [first, last) contains the token's row
    while (last - first > 1) {
        int middle = (first + last) / 2;
        if (row_starts[middle] <= token) first = middle;
        else last = middle;
    }
    int position = kv_lengths[first] - row_starts[first + 1] + token;
    const int* table = block_tables + size_t(slots[first]) * table_width;
    int block = table[position / tokens_per_block];
    cells[token] = block * tokens_per_block + position % tokens_per_block;
}

// The number of lanes that process a head of `vectors` vectors, a power of two.
__device__ constexpr int lanes_of(int vectors) {
    return vectors > 16 ? 32 : vectors > 8 ? 16 : vectors > 4 ? 8 : 4;
}

// Splits `qkv` into `queries` and the cache's keys and values; normalizes and rotates queries and keys.
// The first `rotary` elements of a head are rotated, in pairs of the elements i and i + rotary / 2. A group
// of lanes processes a head. LATE: the norm of a head follows the rotation. PLUS_ONE: the stored weight of a
// norm is 1 less than the factor that is applied.
template <class T, int D, int WIDTH, class C = T, bool LATE = false, bool PLUS_ONE = false>
__global__ void __launch_bounds__(128) rope_and_write(
    T* queries,              // [tokens, heads, D]
    C* keys,                 // [blocks, kv_heads, tokens_per_block, D]
    C* values,               // [blocks, kv_heads, tokens_per_block, D]
    const T* qkv,            // [tokens, heads + 2 kv_heads, D]
    const long long* positions,  // [tokens]
    const float* cos_sin,    // [positions, rotary]: cosines, then sines; null: no rotation
    const T* q_norm,         // [D] or null
    const T* k_norm,         // [D] or null
    const int* cells,        // [tokens], from locate_tokens; -1: only the query of the token is written
    const float* scales,     // [2, kv_heads] of an 8-bit cache: of keys, then of values
    int num_tokens, int num_heads, int num_kv_heads, int rotary, int tokens_per_block, float eps) {
    constexpr int LANES = lanes_of(D / WIDTH), COUNT = (D / WIDTH + LANES - 1) / LANES;
    int lane = threadIdx.x % LANES;
    int group = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    int heads = num_heads + 2 * num_kv_heads;
    int token = group / heads, head = group % heads;
    bool inside = token < num_tokens, has_rotation = cos_sin && inside;
    long long position = has_rotation ? ptx::load_early(positions + token) : 0;
    ptx::wait_for_previous();
    int cell = inside ? cells[token] : -1;
    bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
    const T* from = qkv + (size_t(token) * heads + head) * D;
    float own[COUNT][WIDTH] = {};
    auto weigh = [](float (&values)[WIDTH], const T* weight, float scale) {
        float factors[WIDTH];
        load(factors, weight);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) values[j] *= scale * (PLUS_ONE ? factors[j] + 1 : factors[j]);
    };
    // `weight`: the weights of the norm if a norm precedes the rotation, else null.
    auto rotate = [&](int i, int element, int half, const float* rotation, const T* weight,
                      float scale) {
        bool low = element < half;
        int other = low ? element + half : element - half, angle = low ? element : other;
        float partner[WIDTH], cosine[WIDTH], sine[WIDTH];
        load(partner, from + other);
        load(cosine, rotation + angle);
        load(sine, rotation + half + angle);
        if (weight) weigh(partner, weight + other, scale);
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            own[i][j] = own[i][j] * cosine[j] + (low ? -partner[j] : partner[j]) * sine[j];
    };
    auto find_rotation = [&] {
        return has_rotation && !is_value ? cos_sin + position * rotary : nullptr;
    };
    float square = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int element = (i * LANES + lane) * WIDTH;
        if (!inside || element >= D) continue;
        load(own[i], from + element);
        if constexpr (LATE) {
            const float* rotation = find_rotation();
            if (rotation && element < rotary) rotate(i, element, rotary / 2, rotation, nullptr, 1);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) square += own[i][j] * own[i][j];
    }
    const T* weight = is_value ? nullptr : is_query ? q_norm : k_norm;
    float scale = rsqrtf(warp_sum<LANES>(square) / D + eps);
    if (!inside || (!is_query && cell < 0)) return;
    void* to = queries + (size_t(token) * num_heads + head) * D;
    if (!is_query) {
        int kv_head = (head - num_heads) % num_kv_heads;
        size_t block = cell / tokens_per_block, offset = cell % tokens_per_block;
        to = (is_value ? values : keys) +
             ((block * num_kv_heads + kv_head) * tokens_per_block + offset) * D;
    }
    const float* rotation = find_rotation();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int element = (i * LANES + lane) * WIDTH, half = rotary / 2;
        if (element >= D) continue;
        if (weight) weigh(own[i], weight + element, scale);
        if (!LATE && rotation && element < rotary) rotate(i, element, half, rotation, weight, scale);
        if (IS_FP8<C> && !is_query) {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) own[i][j] /= scales[head - num_heads];
            store(static_cast<C*>(to) + element, own[i]);
        } else {
            store(static_cast<T*>(to) + element, own[i]);
        }
    }
}
