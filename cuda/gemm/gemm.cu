// out[row, n] = sum over k of x[row, k] * weight[n, k] (+ bias[n]), for more rows than gemv.cu
// is used for. With SILU the weight holds the rows of a gate, then those of an up projection:
// out = gate / (1 + e^-gate) * up. A weight in 8 bits has a scale for each row: weight[n, k] * scales[n].
//
// A tile covers all rows of x and 32 * N rows of the weight, so that each weight is read once. It is
// computed in rounds of DEPTH values of k. The rounds of all tiles are concatenated and divided into
// equal shares, one per block (stream-K). The rounds of an element are added in order. If blocks share
// a tile, the last of them to finish adds the blocks' sums in the order of the blocks. So the result of
// a row depends on M, N and the length of a share, but not on the other rows or on which block is last.
#include "gemm/float8_weights.cuh"
#include "gemm/gemm_tiles.cuh"

// Copies the rounds of a block's share to shared memory, one round at a time. The copies run ahead of
// the sums, also across the border between two tiles.
template <class K, class T = typename K::T, class W = typename K::W> struct Copies {
    static constexpr int WEIGHT_VECTORS = K::WEIGHT_VECTORS, WEIGHTS_COPIED = THREADS / WEIGHT_VECTORS;
    const T* x;
    const W* weight;
    int num_rows, width, depth, rounds;
    int last, ahead, tile, round, stage;  // `ahead`: the next round to copy; `last`: end of the share

    __device__ Copies(const T* x, const W* weight, int num_rows, int width, int depth, int share)
        : x(x), weight(weight), num_rows(num_rows), width(width), depth(depth),
          rounds((depth + DEPTH - 1) / DEPTH) {
        int total = (width + K::COLUMNS - 1) / K::COLUMNS * rounds;
        ahead = blockIdx.x * share, last = min(ahead + share, total);
        tile = ahead / rounds, round = ahead % rounds, stage = 0;
    }
    __device__ int element() const { return round * DEPTH + threadIdx.x % VECTORS * 8; }
    __device__ int weight_element() const {
        return round * DEPTH + threadIdx.x % WEIGHT_VECTORS * WIDE<W>;
    }
    __device__ int weight_row(int row) const { return K::weight_row(row, tile, width); }
    __device__ void advance() {
        ahead++;
        if (++round == rounds) round = 0, tile++;
        if (++stage == K::STAGES) stage = 0;
    }
    // Prefetches the weight to L2; nothing else may be read before `wait_for_previous`.
    __device__ void prefetch() const {
        if (ahead >= last || weight_element() >= depth) return;
#pragma unroll
        for (int i = 0; i < K::WEIGHTS / WEIGHTS_COPIED; i++) {
            int row = weight_row(threadIdx.x / WEIGHT_VECTORS + i * WEIGHTS_COPIED);
            if (row >= 0) ptx::prefetch_l2(weight + size_t(row) * depth + weight_element());
        }
    }
    __device__ void copy(T* stages) {
        if (ahead < last) {
            unsigned own = threadIdx.x / VECTORS;  // COPIED is a multiple of 8
            T* to = stages + stage * K::STAGE + own * DEPTH + swizzled(own, threadIdx.x % VECTORS);
            T* region = stages + stage * K::STAGE + K::ROWS * DEPTH;
            copy_weights<K>(region, weight, round, tile, width, depth);
            bool inside = element() < depth;
            int start = inside ? element() : 0;  // the address must be valid even if nothing is copied
#pragma unroll
            for (int i = 0; i < K::M; i++) {
                int row = own + i * COPIED;
                const T* from = x + size_t(min(row, num_rows - 1)) * depth + start;
                ptx::cp_async_16(to + i * COPIED * DEPTH, from, inside && row < num_rows);
            }
        }
        ptx::cp_async_commit();
        advance();
    }
};

// Grid: one block per `share` rounds. Dynamic shared memory: STAGES stages.
template <class T, int M, int N, int STAGES, int RESIDENT, bool SILU, class W = T>
__global__ void __launch_bounds__(THREADS, RESIDENT) gemm(
    T* out,               // [rows, width]
    float* partial,       // [2 * blocks, M * N, THREADS, 4]: sums of blocks that share a tile
    unsigned* arrived,    // [blocks]; zeros before and after the launch
    const T* x,           // [rows, depth], at most ROWS rows
    const W* weight,      // [width, depth], with SILU [2 * width, depth]
    const float* scales,  // [width], with SILU [2 * width]; null unless W has 8 bits
    const T* bias,        // [width], with SILU [2 * width]; or null
    int num_rows, int width, int depth, int share) {  // depth: a multiple of 8, of 16 for 8 bits
    using K = Kind<T, M, N, STAGES, RESIDENT, SILU, Activation::SILU, W>;
    T* stages = reinterpret_cast<T*>(ptx::dynamic_shared());
    Copies<K> copies(x, weight, num_rows, width, depth, share);
    Copies<K> fetched = copies;
    for (int i = 0; i < STAGES - 1; i++) {
        fetched.prefetch();
        fetched.advance();
    }
    ptx::wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) copies.copy(stages);

    int block = blockIdx.x, rounds = copies.rounds;
    for (int at = block * share; at < copies.last;) {
        int tile = at / rounds, begin = tile * rounds, end = begin + rounds;
        TileSums<K> sums(num_rows);
        for (int stop = min(end, copies.last); at < stop; at++) {
            ptx::cp_async_wait<STAGES - 2>();
            __syncthreads();
            copies.copy(stages);  // overwrites the round that all warps have finished
            sums.add_round(stages + copies.stage * K::STAGE);  // the oldest stage, overwritten next
        }
        int first_block = begin / share, last_block = (end - 1) / share;
        if (first_block < last_block) {
            // A block shares at most two tiles: one that an earlier block began, and one it began itself.
            auto slot = [&](int of) { return 2 * of + (of == first_block); };
            sums.save(partial, slot(block));
            if (!is_last_block(arrived + first_block, last_block - first_block + 1)) continue;
            sums.clear();
#pragma unroll 1
            for (int other = first_block; other <= last_block; other++)
                sums.add(partial, slot(other));
        }
        sums.store(out, scales, bias, tile * K::COLUMNS, num_rows, width, [](int row) { return row; });
    }
}
