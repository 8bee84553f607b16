// The work of a thread block in context attention. All kernels of context attention use this file.
#pragma once

#include "attention/pages.cuh"

struct Item {  // packed queries of a row, starting at `first_query`, which see keys in [first, last)
    int row, first_query, first, last;
};

__device__ inline Item load_early(const Item* item) {
    return {ptx::load_early(&item->row), ptx::load_early(&item->first_query),
            ptx::load_early(&item->first), ptx::load_early(&item->last)};
}

struct Tile {  // TOKENS positions
    int start;
    bool sinking;  // only the positions of the sink count
};

// The tiles of an item. With SINK, the tiles of the sink come before the tiles of the keys [first, last).
template <class K> struct Tiles {
    int first, last;  // the item's keys
    int sink;         // the number of keys at the start of the row that every query sees
    int low, high;    // positions of the item's first and last query
    __device__ Tile begin() const { return {K::SINK ? 0 : first_start(), K::SINK}; }
    __device__ Tile after(Tile tile) const {
        int start = tile.start + K::TOKENS;
        if (!K::SINK || !tile.sinking || start < sink) return {start, tile.sinking};
        return {max(first_start(), sink / K::TOKENS * K::TOKENS), false};
    }
    // The start of the tile that contains `first`.
    __device__ int first_start() const { return first / K::TOKENS * K::TOKENS; }
    // Whether a key of the tile is hidden from a query of the item; with SINK always true.
    __device__ bool need_mask(Tile tile, Window window) const {
        return K::SINK || !window.sees(low, tile.start + K::TOKENS - 1) ||
               !window.sees(high, tile.start);
    }
};

// The work of a thread block, in shared memory: registers are needed for the results.
template <class K> struct Work {
    using C = typename K::C;
    static constexpr int D = K::D;
    Tiles<K> tiles;
    int first_query, num_packed, group, num_heads;
    int first_position;  // position of the row's first query
    size_t first_head;   // index of the row's first packed query in `queries` and `out`, in heads
    Pages<C, D> pages;
    const C* value_memory;
    int rows[K::ROW_STAGES][K::TOKENS];  // `Pages::row` of each token of a tile; -1: not read

    __device__ int position(int packed) const {
        return first_position + min(packed, num_packed - 1) / group;
    }
    // Offset of a packed query in `queries` and `out`, in elements.
    __device__ size_t offset(int packed) const {
        return (first_head + size_t(packed / group) * num_heads + packed % group) * D;
    }
};

// The kernels' arguments that describe the rows, that is, the sequences of the batch.
struct Rows {
    const int *row_starts, *kv_lengths, *slots, *block_tables;
    int table_width;
};

// Fills `work`, also before `ptx::wait_for_previous`; one thread of the block calls it.
template <class K, class C = typename K::C>
__device__ inline void start_work(Work<K>& work, Item item, Rows rows, const C* keys,
                                  const C* values, int tokens_per_block, int num_heads, int sink) {
    int num_kv_heads = gridDim.y, kv_head = blockIdx.y, group = num_heads / num_kv_heads;
    int row_start = ptx::load_early(rows.row_starts + item.row);
    int num_new = ptx::load_early(rows.row_starts + item.row + 1) - row_start;
    int slot = ptx::load_early(rows.slots + item.row);
    const int* table = rows.block_tables + size_t(slot) * rows.table_width;
    work.first_query = item.first_query;
    work.num_packed = num_new * group;
    work.group = group;
    work.num_heads = num_heads;
    work.first_position = ptx::load_early(rows.kv_lengths + item.row) - num_new;
    int low = work.position(item.first_query);
    int high = work.position(item.first_query + K::QUERIES - 1);
    work.tiles = {item.first, item.last, sink, low, high};
    work.first_head = size_t(row_start) * num_heads + kv_head * group;
    work.pages = find_pages<C, K::D>(keys, table, kv_head, num_kv_heads, tokens_per_block);
    work.value_memory = values + (work.pages.memory - keys);
}

// Returns `Pages::row` of token `threadIdx.x` of a tile; -1 if the token must not be read. Pages before
// the item's keys may be freed, and pages after the end of the row were never written.
template <class K>
__device__ inline int find_row(const Work<K>& work, Tile tile, bool early = false) {
    int position = tile.start + threadIdx.x;
    bool seen = position >= work.tiles.first || (K::SINK && position < work.tiles.sink);
    bool valid = threadIdx.x < K::TOKENS && seen && position < work.tiles.last;
    return valid ? work.pages.row(position, early) : -1;
}

// Stores the result of `find_row`, which was read ahead of time, for the copies of a later tile.
template <class K> __device__ inline void store_row(Work<K>& work, int stage, int row) {
    if (threadIdx.x < K::TOKENS) work.rows[stage][threadIdx.x] = row;
}
