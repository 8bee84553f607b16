// out[row, n] = sum over k of x[row, k] * weight[n, k] (+ bias[n]), for so few rows that reading the weight
// takes most of the time. With SILU the weight holds the rows of a gate, then the rows of an up projection:
// out = gate / (1 + e^-gate) * up. A weight in 8 bits has a scale for each row: weight[n, k] * scales[n].
//
// The terms of an element are always added in the same order. Chunk c, 64 bytes of a row, belongs to warp
// c % WARPS, which adds its chunks in order; then the sums of the warps are added in order. So the result
// depends neither on the number of rows nor on how blocks divide the work.
#include "gemm/float8_weights.cuh"
#include "gemm/matmul_sums.cuh"

constexpr int WARPS = 16;
constexpr int STEP = WARPS * LANES;  // vectors from one chunk of a warp to its next
// Chunks of each weight row that a warp has in flight: 2 to 6 KiB for all its rows, limited by registers.
template <int TILES, int PARTS>
constexpr int CHUNKS_AHEAD = TILES < 4 ? 4 : PARTS == 1 ? 3 : PARTS == 2 ? 2 : 1;

// Grid: any number of blocks, which take items round-robin. An item is 8 * TILES weight rows (with SILU,
// 4 * TILES rows of the gate and the same rows of up), and at most ROWS rows of x. Items with the same
// weight rows are adjacent, so that L2 still holds these rows. A warp's loads run ahead of its sums, also
// across the border between two items.
template <class T, int TILES, bool SILU, class W = T>
__global__ void __launch_bounds__(WARPS * 32, 1) gemv(
    T* out,               // [rows, width]
    const T* x,           // [rows, depth]
    const W* weight,      // [width, depth], with SILU [2 * width, depth]
    const float* scales,  // [width], with SILU [2 * width]; null unless W has 8 bits
    const T* bias,        // [width], with SILU [2 * width]; or null
    int num_rows, int width, int depth) {  // a row of x and a row of weight: multiples of 16 bytes
    constexpr int COLUMNS = 8 * TILES / (SILU ? 2 : 1);  // columns of `out` in an item
    constexpr int DEPTH = CHUNKS_AHEAD<TILES, PARTS<T, W>>;
    __shared__ float sums[WARPS][ROWS<T>][8 * TILES + 8];  // padded against bank conflicts
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int vectors = depth / WIDE<W>, first_vector = warp * LANES + t;  // 16-byte vectors of a weight row
    int row_tiles = (num_rows + ROWS<T> - 1) / ROWS<T>;
    int num_items = (width + COLUMNS - 1) / COLUMNS * row_tiles;
    int rounds = (vectors + DEPTH * STEP - 1) / (DEPTH * STEP);  // each: DEPTH chunks per warp

    // The item and the round that are being loaded, one round ahead of the round that is being added.
    int item_ahead = blockIdx.x, round_ahead = 0;
    constexpr int GATES = SILU ? TILES / 2 : TILES;  // tiles before those of up
    const W* rows_ahead[GATES];
    size_t up = size_t(width) * depth;  // elements from a row of the gate to the same row of up
    auto seek = [&] {  // rows after the last row are replaced by the last row
        int first = item_ahead / row_tiles * COLUMNS + g;
#pragma unroll
        for (int i = 0; i < GATES; i++)
            rows_ahead[i] = weight + size_t(min(first + 8 * i, width - 1)) * depth;
    };
    auto vector_of = [&](int i, int vector) {  // a vector of tile i
        return rows_ahead[i % GATES] + (i < GATES ? 0 : up) + vector * WIDE<W>;
    };
    auto fetch = [&](uint4 (&to)[TILES], int chunk) {
        int vector = first_vector + round_ahead * DEPTH * STEP;
        bool inside = item_ahead < num_items && vector + chunk * STEP < vectors;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const W* from = vector_of(i, vector);
            to[i] = ptx::load_once_16(from + chunk * STEP * WIDE<W>, inside);
        }
    };
    auto advance = [&] {
        if (++round_ahead < rounds) return;
        round_ahead = 0;
        item_ahead += gridDim.x;
        seek();
    };
    seek();
#pragma unroll
    for (int chunk = 0; chunk < DEPTH; chunk++) {
        int vector = first_vector + chunk * STEP;
        if (vector >= vectors) break;
#pragma unroll
        for (int i = 0; i < TILES; i++) ptx::prefetch_l2(vector_of(i, vector));
    }
    ptx::wait_for_previous();
    uint4 ring[DEPTH][TILES];
#pragma unroll
    for (int chunk = 0; chunk < DEPTH; chunk++) fetch(ring[chunk], chunk);

    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        int first_row = item % row_tiles * ROWS<T>, rows = min(num_rows - first_row, ROWS<T>);
        const T* own_x = x + size_t(first_row) * depth;
        Sums<T, TILES, W> own;
        for (int round = 0; round < rounds; round++) {
            advance();
            int vector = first_vector + round * DEPTH * STEP;
#pragma unroll
            for (int chunk = 0; chunk < DEPTH; chunk++) {
                const T* from = own_x + vector * WIDE<W> + chunk * STEP * WIDE<W>;
                own.add(ring[chunk], from, depth, rows, vector + chunk * STEP < vectors);
                fetch(ring[chunk], chunk);
            }
        }
        own.finish();
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) {
            int row = g + i % 4 / 2 * 8;
            if (row < rows) sums[warp][row][i / 4 * 8 + 2 * t + i % 2] = own.result[i / 4][i % 4];
        }
        __syncthreads();
        int first = item / row_tiles * COLUMNS;
        for (int i = threadIdx.x; i < rows * COLUMNS; i += WARPS * 32) {
            int row = i / COLUMNS, column = i % COLUMNS, n = first + column;
            if (n >= width) continue;
            auto sum_of = [&](int column, int n) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += sums[w][row][column];
                if constexpr (sizeof(W) < sizeof(T)) sum *= scales[n];
                return bias ? sum + to_float(bias[n]) : sum;
            };
            float value = sum_of(column, n);
            if constexpr (SILU)
                value = value / (1.0f + __expf(-value)) * sum_of(column + COLUMNS, width + n);
            out[size_t(first_row + row) * width + n] = from_float<T>(value);
        }
        __syncthreads();  // the next item overwrites `sums`
    }
}
