// The parameters of the mma.sync kernel, and the copies of its tiles to shared memory.
#pragma once

#include "attention/context_work.cuh"

constexpr int WARPS = 4, THREADS = WARPS * 32;

// The compile-time parameters of an instantiation. T: type of queries. D: head size. C: type in the cache.
template <class Element, int HEAD_DIM, bool IS_CAPPED, bool HAS_SINK, class CacheElement, bool IS_SMALL>
struct Kind {
    using T = Element;
    using C = CacheElement;
    static constexpr int D = HEAD_DIM;
    static constexpr bool SOFTCAP = IS_CAPPED, SINK = HAS_SINK, FP8 = IS_FP8<C>;
    // 16-row matrices per warp. With two, a warp uses each fragment of keys and values twice. Registers do
    // not suffice for two matrices if D > 128, or if D == 128 and there is a sink or an 8-bit cache.
    static constexpr int MATRICES = D > 128 || (D == 128 && (SINK || FP8)) ? 1 : 2;
    static constexpr int ROW_STAGES = 2, QUERIES = WARPS * 16 * MATRICES;
    // Tokens per tile. Shared memory holds two tiles of keys and values. Registers hold one tile's scores.
    static constexpr int TOKENS = D > 128 || (D == 128 && (SOFTCAP || IS_SMALL)) ? 32 : 64;
    // Whether the queries stay in registers from the first tile to the last.
    static constexpr bool HOLDS = MATRICES == 1 ? D == 128 : D <= 64;
    static constexpr int TILE = 2 * TOKENS * ROW<T, D>;  // elements of T in a tile: keys, then values
};

// Starts the copies of a tile's keys and values to shared memory, where the values follow the keys.
template <class K, class C = typename K::C>
__device__ inline void copy_tokens(C* to, const Work<K>& work, int stage) {
    constexpr int D = K::D, VECTORS = D / WIDE<C>, COUNT = K::TOKENS * VECTORS;
    constexpr int PASSES = (COUNT + THREADS - 1) / THREADS;
    // STEP row numbers are read before the copies of these rows start, because the compiler does not move
    // reads across copies.
    constexpr int STEP = PASSES % 4 == 0 ? 4 : PASSES % 2 == 0 ? 2 : PASSES;
    const C *key_memory = work.pages.memory, *value_memory = work.value_memory;
#pragma unroll 1
    for (int first = 0; first < PASSES; first += STEP) {
        int rows[STEP];
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            unsigned index = (first + i) * THREADS + threadIdx.x;
            rows[i] = COUNT % THREADS == 0 || index < COUNT ? work.rows[stage][index / VECTORS] : -1;
        }
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            unsigned index = (first + i) * THREADS + threadIdx.x;
            if (COUNT % THREADS && index >= COUNT) break;
            unsigned token = index / VECTORS, element = index % VECTORS * WIDE<C>;
            ptrdiff_t from = ptrdiff_t(max(rows[i], 0)) * D;
            C *key = to + token * ROW<C, D> + element, *value = key + K::TOKENS * ROW<C, D>;
            ptx::cp_async_16(key, key_memory + element + from, rows[i] >= 0);
            ptx::cp_async_16(value, value_memory + element + from, rows[i] >= 0);
        }
    }
}

// Converts a tile of 8-bit keys and values, in shared memory, to T.
template <class K, class T = typename K::T, class C = typename K::C>
__device__ inline void expand_tokens(T* to, const C* from) {
    constexpr int D = K::D, VECTORS = D / 8;
#pragma unroll 2
    for (int i = 0; i < 2 * K::TOKENS * VECTORS / THREADS; i++) {
        int index = i * THREADS + threadIdx.x;
        int row = index / VECTORS, element = index % VECTORS * 8;
        uint2 packed = *reinterpret_cast<const uint2*>(from + row * ROW<C, D> + element);
        uint4 result = {expand<T>(packed.x), expand<T>(packed.x >> 16), expand<T>(packed.y),
                        expand<T>(packed.y >> 16)};
        *reinterpret_cast<uint4*>(to + row * ROW<T, D> + element) = result;
    }
}

template <class K, class T = typename K::T>
__device__ inline void copy_queries(T* to, const T* from, const Work<K>& work) {
    constexpr int D = K::D, VECTORS = D / 8;
#pragma unroll 2
    for (int i = 0; i < K::QUERIES * VECTORS / THREADS; i++) {
        int index = i * THREADS + threadIdx.x;
        int query = index / VECTORS, element = index % VECTORS * 8;
        int packed = work.first_query + query;
        bool valid = packed < work.num_packed;
        size_t offset = valid ? work.offset(packed) : 0;
        ptx::cp_async_16(to + query * ROW<T, D> + element, from + offset + element, valid);
    }
}
