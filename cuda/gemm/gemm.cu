// out[row, n] = sum over k of x[row, k] * weight[n, k] (+ bias[n]), for more rows than gemv.cu
// supports. With SILU the weight holds the rows of a gate, then those of an up projection:
// out = gate / (1 + e^-gate) * up.
//
// A tile covers all rows of x and 32 * N rows of the weight, so that each weight is read once. It is
// computed in rounds of DEPTH values of k. The rounds of all tiles are concatenated and divided into
// equal shares, one per block (stream-K). The sum of an element adds its rounds in order; if blocks
// share a tile, the last one to finish adds their sums, in the order of the blocks. So the result
// depends on M, N and the length of a share, but neither on other rows nor on which block is last.
#include "numerics.cuh"

constexpr int THREADS = 256, WARP_ROWS = 2, WARP_COLUMNS = 4;
constexpr int DEPTH = 64, VECTORS = DEPTH / 8;  // of a round: 128 bytes of each row
constexpr int COPIED = THREADS / VECTORS;       // rows that a block copies at a time

// A warp has M matrices of 16 rows of x, and N of 8 rows of the weight. If registers and shared memory
// suffice for two blocks per multiprocessor (RESIDENT), one multiplies while the other waits.
template <class Element, int M_, int N_, int STAGES_, int RESIDENT, bool HAS_SILU> struct Kind {
    using T = Element;
    static constexpr int M = M_, N = N_, STAGES = STAGES_;
    static constexpr bool SILU = HAS_SILU;
    static constexpr int ROWS = WARP_ROWS * 16 * M, WEIGHTS = WARP_COLUMNS * 8 * N;
    static constexpr int COLUMNS = WEIGHTS / (SILU ? 2 : 1);  // columns of the result, of a tile
    static constexpr int SPAN = 8 * N / (SILU ? 2 : 1);       // columns of the result, of a warp
    static constexpr int STAGE = (ROWS + WEIGHTS) * DEPTH;    // elements
    // Matrices of x that are loaded before their matmuls, limited by registers.
    static constexpr int AT_ONCE = RESIDENT == 2 ? 1 : M == 2 ? 2 : 4;
};

// Returns the offset in a stage's row of the 8 elements that start at 8 * `vector`, swizzled so that
// rows do not share banks.
__device__ inline int swizzled(unsigned row, int vector) { return (vector ^ row % 8) * 8; }

// The copies of a block, one round at a time; they run ahead of the sums, into the next tile.
template <class K, class T = typename K::T> struct Copies {
    const T *x, *weight;
    int num_rows, width, depth, rounds;
    int last, ahead, tile, round, stage;  // `ahead`: the next round; `last`: the end of the share

    __device__ Copies(const T* x, const T* weight, int num_rows, int width, int depth, int share)
        : x(x), weight(weight), num_rows(num_rows), width(width), depth(depth),
          rounds((depth + DEPTH - 1) / DEPTH) {
        int total = (width + K::COLUMNS - 1) / K::COLUMNS * rounds;
        ahead = blockIdx.x * share, last = min(ahead + share, total);
        tile = ahead / rounds, round = ahead % rounds, stage = 0;
    }
    __device__ int element() const { return round * DEPTH + threadIdx.x % VECTORS * 8; }

    // The row of the weight that is row `row` of the tile; -1: none. With SILU the first half of a warp's
    // rows is of the gate.
    __device__ int weight_row(int row) const {
        int own = row % (8 * K::N), column = tile * K::COLUMNS + row / (8 * K::N) * K::SPAN;
        column += own % K::SPAN;
        return column >= width ? -1 : own < K::SPAN ? column : column + width;
    }
    __device__ void advance() {
        ahead++;
        if (++round == rounds) round = 0, tile++;
        if (++stage == K::STAGES) stage = 0;
    }
    // Prefetches the weight to L2; nothing else may be read before `wait_for_previous`.
    __device__ void prefetch() const {
        if (ahead >= last || element() >= depth) return;
#pragma unroll
        for (int i = 0; i < K::N; i++) {
            int row = weight_row(threadIdx.x / VECTORS + i * COPIED);
            if (row >= 0) ptx::prefetch_l2(weight + size_t(row) * depth + element());
        }
    }
    __device__ void copy(T* stages) {
        if (ahead < last) {
            unsigned own = threadIdx.x / VECTORS;  // COPIED is a multiple of 8
            T* to = stages + stage * K::STAGE + own * DEPTH + swizzled(own, threadIdx.x % VECTORS);
            bool inside = element() < depth;
            int start = inside ? element() : 0;  // the address must be valid even if nothing is copied
#pragma unroll
            for (int i = 0; i < K::N; i++) {
                int row = weight_row(own + i * COPIED);
                const T* from = weight + size_t(max(row, 0)) * depth + start;
                ptx::cp_async_16(to + (K::ROWS + i * COPIED) * DEPTH, from, inside && row >= 0);
            }
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

// A warp's sums of a tile, in fragments of mma.sync. Matrices of rows alternate between two warps.
template <class K> struct TileSums {
    float values[K::M][K::N][4] = {};
    int warp_row = threadIdx.x / 32 % WARP_ROWS, warp_column = threadIdx.x / 32 / WARP_ROWS;
    int matrices;  // the number of them that have rows

    __device__ explicit TileSums(int num_rows)
        : matrices((num_rows - warp_row * 16 + WARP_ROWS * 16 - 1) / (WARP_ROWS * 16)) {}

    template <class Visit> __device__ void each(Visit visit) {
#pragma unroll
        for (int m = 0; m < K::M; m++) {
            if (m >= matrices) break;
#pragma unroll
            for (int n = 0; n < K::N; n++) visit(values[m][n], m, n);
        }
    }
    template <class T> __device__ void add_round(const T* stage) {
        int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;  // the lane's for ldmatrix
        const T* rows = stage + (warp_row * 16 + matrix % 2 * 8 + row) * DEPTH;
        const T* weights =
            stage + (K::ROWS + warp_column * 8 * K::N + matrix / 2 * 8 + row) * DEPTH;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            unsigned b[K::N / 2][4];
            int own = swizzled(row, 2 * k + matrix / 2), other = swizzled(row, 2 * k + matrix % 2);
#pragma unroll
            for (int n = 0; n < K::N / 2; n++)
                ptx::load_matrix_x4(b[n], weights + n * 16 * DEPTH + other);
#pragma unroll
            for (int first = 0; first < K::M; first += K::AT_ONCE) {
                unsigned a[K::AT_ONCE][4];
#pragma unroll
                for (int m = 0; m < K::AT_ONCE; m++) {
                    const T* from = rows + (first + m) * WARP_ROWS * 16 * DEPTH + own;
                    if (first + m < matrices) ptx::load_matrix_x4(a[m], from);
                }
#pragma unroll
                for (int m = 0; m < K::AT_ONCE; m++) {
                    if (first + m >= matrices) break;
#pragma unroll
                    for (int n = 0; n < K::N; n++) {
                        const unsigned* pair = b[n / 2] + n % 2 * 2;
                        ptx::mma_m16n8k16(values[first + m][n], a[m], pair[0], pair[1], T());
                    }
                }
            }
        }
    }
    __device__ float4* place_of(float* partial, int slot) const {
        return reinterpret_cast<float4*>(partial) + size_t(slot) * K::M * K::N * THREADS + threadIdx.x;
    }
    __device__ void save(float* partial, int slot) {
        float4* to = place_of(partial, slot);
        each([&](float(&own)[4], int m, int n) {
            to[(m * K::N + n) * THREADS] = {own[0], own[1], own[2], own[3]};
        });
    }
    // Adds the sums that `save` wrote. Loads bypass L1, which may hold stale bytes.
    __device__ void add(float* partial, int slot) {
        const float4* from = place_of(partial, slot);
        each([&](float(&own)[4], int m, int n) {
            float4 saved = __ldcg(from + (m * K::N + n) * THREADS);
            own[0] += saved.x, own[1] += saved.y, own[2] += saved.z, own[3] += saved.w;
        });
    }
    __device__ void clear() {
        each([](float(&own)[4], int, int) { own[0] = own[1] = own[2] = own[3] = 0; });
    }
    // Stores the results in the columns of the tile, the first of which is `first`.
    template <class T>
    __device__ void store(T* out, const T* bias, int first, int num_rows, int width) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        constexpr int MATRICES = K::SPAN / 8;  // of a warp's columns
#pragma unroll
        for (int n = 0; n < MATRICES; n++) {
            int column = first + warp_column * K::SPAN + n * 8 + 2 * t;
            float added[2][2] = {};  // bias of the result or the gate, and of the up projection
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (!bias || column + i >= width) continue;
                added[0][i] = to_float(bias[column + i]);
                if constexpr (K::SILU) added[1][i] = to_float(bias[width + column + i]);
            }
#pragma unroll
            for (int m = 0; m < K::M; m++) {
                if (m >= matrices) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = (m * WARP_ROWS + warp_row) * 16 + half * 8 + g;
                    float result[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        result[i] = values[m][n][2 * half + i] + added[0][i];
                        if constexpr (K::SILU) {
                            float up = values[m][n + MATRICES][2 * half + i] + added[1][i];
                            result[i] = result[i] / (1.0f + __expf(-result[i])) * up;
                        }
                    }
                    if (row >= num_rows || column >= width) continue;
                    T* to = out + size_t(row) * width + column;
                    if (width % 2 == 0) {
                        *reinterpret_cast<unsigned*>(to) = pack<T>(result[0], result[1]);
                    } else {
                        to[0] = from_float<T>(result[0]);
                        if (column + 1 < width) to[1] = from_float<T>(result[1]);
                    }
                }
            }
        }
    }
};

// Grid: one block per `share` rounds. Dynamic shared memory: STAGES stages.
template <class T, int M, int N, int STAGES, int RESIDENT, bool SILU>
__global__ void __launch_bounds__(THREADS, RESIDENT) gemm(
    T* out,             // [rows, width]
    float* partial,     // [2 * blocks, M * N, THREADS, 4]: sums of blocks that share a tile
    unsigned* arrived,  // [blocks]; zeros before and after the launch
    const T* x,         // [rows, depth], at most ROWS rows
    const T* weight,    // [width, depth], with SILU [2 * width, depth]
    const T* bias,      // [width], with SILU [2 * width]; or null
    int num_rows, int width, int depth, int share) {  // depth: a multiple of 8
    using K = Kind<T, M, N, STAGES, RESIDENT, SILU>;
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
            // A block shares at most two tiles: one that an earlier block begins, and one that it begins.
            auto slot = [&](int of) { return 2 * of + (of == first_block); };
            sums.save(partial, slot(block));
            if (!is_last_block(arrived + first_block, last_block - first_block + 1)) continue;
            sums.clear();
#pragma unroll 1
            for (int other = first_block; other <= last_block; other++)
                sums.add(partial, slot(other));
        }
        sums.store(out, bias, tile * K::COLUMNS, num_rows, width);
    }
}
