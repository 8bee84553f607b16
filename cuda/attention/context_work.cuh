// What a block of context attention works on: the same for all of its kernels.
#pragma once

#include "attention/pages.cuh"

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

// Tiles of the sink come first, and then those of the item from behind it on, up to `last`.
template <class K> struct Tiles {
    int first, last;  // the item's keys
    int sink;         // the number of first keys that are always seen
    int low, high;    // positions of the item's first and last query
    __device__ Tile begin() const { return {K::SINK ? 0 : behind_sink(), K::SINK}; }
    __device__ Tile after(Tile tile) const {
        int start = tile.start + K::TOKENS;
        if (!K::SINK || !tile.sinking || start < sink) return {start, tile.sinking};
        return {max(behind_sink(), sink / K::TOKENS * K::TOKENS), false};
    }
    __device__ int behind_sink() const { return first / K::TOKENS * K::TOKENS; }
    // Those that all of the block's queries see need no mask.
    __device__ bool need_mask(Tile tile, Window window) const {
        return K::SINK || !window.sees(low, tile.start + K::TOKENS - 1) ||
               !window.sees(high, tile.start);
    }
};

// The work of a block. It is in shared memory: the registers are for its results.
template <class K> struct Work {
    using C = typename K::C;
    static constexpr int D = K::D;
    Tiles<K> tiles;
    int first_query, num_packed, group, num_heads;
    int first_position;  // of the row's first query
    size_t first_head;   // of its packed queries, in `queries` and `out`
    Pages<C, D> pages;
    const C* value_memory;
    int rows[K::ROW_STAGES][K::TOKENS];  // of a tile's tokens in the pages, -1 where nothing is read

    __device__ int position(int packed) const {
        return first_position + min(packed, num_packed - 1) / group;
    }
    // Elements from the beginning of `queries` or `out`.
    __device__ size_t offset(int packed) const {
        return (first_head + size_t(packed / group) * num_heads + packed % group) * D;
    }
};

// Of a row's tokens, as the kernels are given them.
struct Rows {
    const int *row_starts, *kv_lengths, *slots, *block_tables;
    int table_width;
};

// By one thread.
template <class K, class C = typename K::C>
__device__ inline void begin(Work<K>& work, Item item, Rows rows, const C* keys, const C* values,
                             int tokens_per_block, int num_heads, int sink) {
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int row_start = rows.row_starts[item.row];
    int num_new = rows.row_starts[item.row + 1] - row_start;
    const int* table = rows.block_tables + size_t(rows.slots[item.row]) * rows.table_width;
    work.first_query = item.first_query;
    work.num_packed = num_new * group;
    work.group = group;
    work.num_heads = num_heads;
    work.first_position = rows.kv_lengths[item.row] - num_new;
    int low = work.position(item.first_query);
    int high = work.position(item.first_query + K::QUERIES - 1);
    work.tiles = {item.first, item.last, sink, low, high};
    work.first_head = size_t(row_start) * num_heads + kv_head * group;
    work.pages = find_pages<C, K::D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
    work.value_memory = values + (work.pages.memory - keys);
}

// The row in the pages of the thread's token of a tile; -1 if nothing is read: pages outside of the
// item may be freed, and rows after its end were never written.
template <class K> __device__ inline int find_row(const Work<K>& work, Tile tile) {
    int position = tile.start + threadIdx.x;
    bool seen = position >= work.tiles.first || (K::SINK && position < work.tiles.sink);
    bool valid = threadIdx.x < K::TOKENS && seen && position < work.tiles.last;
    return valid ? work.pages.row(position) : -1;
}

// The pages' table is read a tile ahead of its use.
template <class K> __device__ inline void keep_row(Work<K>& work, int stage, int row) {
    if (threadIdx.x < K::TOKENS) work.rows[stage][threadIdx.x] = row;
}
