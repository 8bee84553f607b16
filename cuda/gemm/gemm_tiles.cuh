// Tiles of the matmul of activations x and a weight, in rounds of DEPTH values of k: the layout of a round
// in shared memory, and the sums of a warp. Shared by gemm.cu and moe.cu.
#pragma once

#include "activation_kinds.cuh"
#include "gemm/widening.cuh"

constexpr int THREADS = 256, WARP_ROWS = 2, WARP_COLUMNS = 4;
constexpr int DEPTH = 64, VECTORS = DEPTH / 8;  // per row and round: values, and vectors of 8
constexpr int COPIED = THREADS / VECTORS;       // rows that a block copies at a time

// A warp multiplies M matrices of 16 rows of x by N matrices of 8 rows of the weight. RESIDENT: blocks per
// multiprocessor, 1 or 2; with 2, one block multiplies while the other block waits for its copies.
// GATED: the weight holds the rows of a gate, then the rows of an up projection, and the result is
// activation(gate) * up.
template <
    class Element, int M_, int N_, int STAGES_, int RESIDENT, bool IS_GATED, Activation KIND = SILU,
    class Weight = Element>
struct Kind {
    using T = Element;
    using W = Weight;
    static constexpr int M = M_, N = N_, STAGES = STAGES_;
    static constexpr bool GATED = IS_GATED;
    static constexpr Activation ACTIVATION = KIND;
    static constexpr int ROWS = WARP_ROWS * 16 * M, WEIGHTS = WARP_COLUMNS * 8 * N;
    static constexpr int COLUMNS = WEIGHTS / (GATED ? 2 : 1);  // result columns of a tile
    static constexpr int SPAN = 8 * N / (GATED ? 2 : 1);       // result columns of a warp
    static constexpr int STAGE = (ROWS + WEIGHTS / PARTS<T, W>) * DEPTH;  // elements of T
    static constexpr int WEIGHT_VECTORS = VECTORS / PARTS<T, W>;          // per weight row and round
    // Number of matrices of x that are loaded at once. More would need too many registers.
    static constexpr int AT_ONCE = RESIDENT == 2 ? 1 : M == 2 ? 2 : 4;

    // Returns the row of the weight that is row `row` of tile `tile`, or -1 outside the weight. With GATED,
    // the first half of a warp's rows belongs to the gate.
    __device__ static int weight_row(int row, int tile, int width) {
        int own = row % (8 * N), column = tile * COLUMNS + row / (8 * N) * SPAN;
        column += own % SPAN;
        return column >= width ? -1 : own < SPAN ? column : column + width;
    }
};

// Returns the offset, within row `row` of a stage, of the 8 elements that start at 8 * `vector`. The offsets
// are swizzled, so that loads of one vector from 8 rows have no bank conflicts.
__device__ inline int swizzled(unsigned row, int vector) { return (vector ^ row % 8) * 8; }

// Copies round `round` of the weight rows of tile `tile` to shared memory. Rows of 8-bit weights are half as
// long, and are not swizzled: two such rows cover all banks.
template <class K, class T = typename K::T, class W = typename K::W>
__device__ inline void copy_weights(
    T* region, const W* weight, int round, int tile, int width, int depth) {
    constexpr int ROWS_COPIED = THREADS / K::WEIGHT_VECTORS;  // at a time, a multiple of 8
    unsigned own = threadIdx.x / K::WEIGHT_VECTORS;
    int vector = threadIdx.x % K::WEIGHT_VECTORS, element = round * DEPTH + vector * WIDE<W>;
    W* to = reinterpret_cast<W*>(region) + own * DEPTH;
    to += sizeof(W) < sizeof(T) ? vector * WIDE<W> : swizzled(own, vector);
    bool inside = element < depth;
    int start = inside ? element : 0;  // the address must be valid even if nothing is copied
#pragma unroll
    for (int i = 0; i < K::WEIGHTS / ROWS_COPIED; i++) {
        int row = K::weight_row(own + i * ROWS_COPIED, tile, width);
        const W* from = weight + size_t(max(row, 0)) * depth + start;
        ptx::cp_async_16(to + i * ROWS_COPIED * DEPTH, from, inside && row >= 0);
    }
}

// A warp's sums of a tile, in fragments of mma.sync. Matrices of 16 rows alternate between two warps.
template <class K> struct TileSums {
    float values[K::M][K::N][4] = {};
    int warp_row = threadIdx.x / 32 % WARP_ROWS, warp_column = threadIdx.x / 32 / WARP_ROWS;
    int matrices;  // the number of this warp's matrices that have rows

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
    // Matrices without rows are multiplied, too: branches around them would cost more instructions, since
    // the compiler cannot know that all lanes of a warp take the same branch.
    template <class T> __device__ void add_round(const T* stage) {
        ptx::gather_lanes();
        if constexpr (sizeof(typename K::W) < sizeof(T)) add_byte_round(stage);
        else add_own_round(stage);
    }
    template <class T> __device__ void add_own_round(const T* stage) {
        int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;  // addressed by this lane
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
                    ptx::load_matrix_x4(a[m], from);
                }
#pragma unroll
                for (int m = 0; m < K::AT_ONCE; m++) {
#pragma unroll
                    for (int n = 0; n < K::N; n++) {
                        const unsigned* pair = b[n / 2] + n % 2 * 2;
                        ptx::mma_m16n8k16(values[first + m][n], a[m], pair[0], pair[1], T());
                    }
                }
            }
        }
    }
    // In four matmuls, a lane's 16 values of k are those in vector t of a weight row; see matmul_sums.cuh.
    template <class T> __device__ void add_byte_round(const T* stage) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const T* rows = stage + (warp_row * 16 + g) * DEPTH;
        const uint4* weights = reinterpret_cast<const uint4*>(stage + K::ROWS * DEPTH) +
            (warp_column * 8 * K::N + g) * K::WEIGHT_VECTORS + t;
#pragma unroll 1  // to need fewer registers
        for (int part = 0; part < PARTS<T, typename K::W>; part++) {
            int own = swizzled(g, 2 * t + part);
            uint4 b[K::N];
#pragma unroll
            for (int n = 0; n < K::N; n++)
                b[n] = widened<T, typename K::W>(weights[n * 8 * K::WEIGHT_VECTORS], part);
#pragma unroll
            for (int m = 0; m < K::M; m++) {
                const T* from = rows + m * WARP_ROWS * 16 * DEPTH + own;
                uint4 first = *reinterpret_cast<const uint4*>(from);
                uint4 second = *reinterpret_cast<const uint4*>(from + 8 * DEPTH);
                unsigned low[4] = {first.x, second.x, first.y, second.y};
                unsigned high[4] = {first.z, second.z, first.w, second.w};
#pragma unroll
                for (int n = 0; n < K::N; n++)
                    ptx::mma_m16n8k16(values[m][n], low, b[n].x, b[n].y, T());
#pragma unroll
                for (int n = 0; n < K::N; n++)
                    ptx::mma_m16n8k16(values[m][n], high, b[n].z, b[n].w, T());
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
    // Stores the results in `out`, from column `first` on. Row r of the tile is row `place(r)` of `out`.
    // `scales` (read only for 8-bit weights) and `bias` (may be null) have one element for each weight row.
    template <class T, class Place>
    __device__ void store(
        T* out, const float* scales, const T* bias, int first, int num_rows, int width, Place place) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        constexpr int MATRICES = K::SPAN / 8;  // a warp's matrices of 8 result columns
#pragma unroll
        for (int n = 0; n < MATRICES; n++) {
            int column = first + warp_column * K::SPAN + n * 8 + 2 * t;
            float added[2][2] = {};  // bias of the result or the gate, and of the up projection
            float scale[2][2] = {{1, 1}, {1, 1}};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (column + i >= width) continue;
                if constexpr (sizeof(typename K::W) < sizeof(T)) {
                    scale[0][i] = scales[column + i];
                    if constexpr (K::GATED) scale[1][i] = scales[width + column + i];
                }
                if (!bias) continue;
                added[0][i] = to_float(bias[column + i]);
                if constexpr (K::GATED) added[1][i] = to_float(bias[width + column + i]);
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
                        result[i] = values[m][n][2 * half + i] * scale[0][i] + added[0][i];
                        if constexpr (K::GATED) {
                            float sum = values[m][n + MATRICES][2 * half + i];
                            float up = sum * scale[1][i] + added[1][i];
                            result[i] = gated<K::ACTIVATION>(result[i], up);
                        }
                    }
                    if (row >= num_rows || column >= width) continue;
                    T* to = out + size_t(place(row)) * width + column;
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
