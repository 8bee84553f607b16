// out[row, n] = sum over k of x[row, k] * weight[n, k] (+ bias[n]), for few rows of x and a 4-bit weight,
// stored as on a CPU (int4_matrix.py). A panel has 16 weight rows. A group has 8 steps of 4 positions.
// A byte has position p of a step j < 4 in its lower half, and position p of step j + 4 in its upper half.
//
// The terms of an element are always added in the same order: group c belongs to warp c % WARPS, which adds
// its groups in order; then the sums of the warps are added in order.
#include "gemm/widening.cuh"

constexpr int WARPS = 16, GROUP = 32, PANEL = 16;
constexpr int ROWS = 16, TILES = 4, COLUMNS = 2 * PANEL;  // sizes of an item: see the kernel's comment

// One lane's part of a group: 4 bytes of each of 4 weight rows, and the scales and minima of 8 weight rows.
struct Group {
    uint4 values, scales, minima;
};

struct Place {  // the addresses of a `Group`
    const unsigned char* values;
    const __half *scales, *minima;
};

// Grid: any number of blocks, which take items round-robin. An item is two panels and up to 16 rows of x.
// Tensor cores compute tiles: x [16 rows, 16 k] @ weight^T [16 k, 8 weight rows]. The order of k and that of
// weight rows are free. With g = lane / 4 and t = lane % 4, column g of tile i is row 4 (g % 4) + i of
// panel g / 4. So columns 2t and 2t + 1 of all tiles are 8 adjacent rows. Sums of a group are scaled in
// float32.
template <class T, bool HAS_MINIMA>
__global__ void __launch_bounds__(WARPS * 32, 1) gemv_int4(
    T* out,                       // [rows, width]
    const T* x,                   // [rows, depth]
    const unsigned char* values,  // [panels, groups, 4, 16, 4]
    const __half* scales,         // [panels, groups, 16]
    const __half* minima,         // like `scales`, added after scaling; if null, a stored v means v - 8
    const T* bias,                // [width]; or null
    int num_rows, int width, int depth) {  // depth: a multiple of 4
    constexpr int GROUPS_AHEAD = HAS_MINIMA ? 3 : 4;  // prefetched by a warp; limited by registers
    __shared__ float sums[WARPS][ROWS][COLUMNS + 8];  // padded against bank conflicts
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int groups = (depth + GROUP - 1) / GROUP, panels = (width + PANEL - 1) / PANEL;
    int row_tiles = (num_rows + ROWS - 1) / ROWS;
    int num_items = (panels + 1) / 2 * row_tiles;

    // The addresses of a lane's part of a group; a panel after the last one is replaced by the last one.
    auto locate = [&](int item, int group) {
        auto panel_of = [&](int which) { return min(item / row_tiles * 2 + which, panels - 1); };
        size_t block = size_t(panel_of(g / 4)) * groups + group;
        size_t own = (size_t(panel_of(t / 2)) * groups + group) * PANEL + t % 2 * 8;
        const unsigned char* from = values + block * (GROUP / 2 * PANEL);
        return Place{from + t * (PANEL * 4) + g % 4 * 16, scales + own, minima + own};
    };
    auto fetch = [&](Group& to, int item, int group) {
        bool inside = item < num_items && group < groups;
        Place from = locate(item, group);
        to.values = ptx::load_once_16(from.values, inside);
        to.scales = ptx::load_once_16(from.scales, inside);
        if constexpr (HAS_MINIMA) to.minima = ptx::load_once_16(from.minima, inside);
    };
#pragma unroll 1
    for (int group = warp; group < min(groups, GROUPS_AHEAD * WARPS); group += WARPS) {
        Place from = locate(blockIdx.x, group);
        ptx::prefetch_l2(from.values);
        ptx::prefetch_l2(from.scales);
        if constexpr (HAS_MINIMA) ptx::prefetch_l2(from.minima);
    }
    ptx::wait_for_previous();
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        int first_row = item % row_tiles * ROWS, rows = min(num_rows - first_row, ROWS);
        const T* own_x = x + size_t(first_row) * depth;
        Group ring[GROUPS_AHEAD];
#pragma unroll
        for (int i = 0; i < GROUPS_AHEAD; i++) fetch(ring[i], item, warp + i * WARPS);
        float result[TILES][4] = {};
        for (int first = warp; first < groups; first += GROUPS_AHEAD * WARPS) {
#pragma unroll
            for (int i = 0; i < GROUPS_AHEAD; i++) {
                int group = first + i * WARPS;
                if (group >= groups) break;
                Group own = ring[i];
                fetch(ring[i], item, group + GROUPS_AHEAD * WARPS);
                unsigned a[2][4];  // fragments of both halves of the group
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int k = group * GROUP + half * 16 + 4 * t;
                    auto load_row = [&](int row) {
                        const T* from = own_x + size_t(row) * depth + k;
                        bool inside = k < depth && row < rows;
                        return inside ? *reinterpret_cast<const uint2*>(from) : uint2{0, 0};
                    };
                    uint2 one = load_row(g), other = load_row(g + 8);
                    a[half][0] = one.x, a[half][1] = other.x, a[half][2] = one.y, a[half][3] = other.y;
                }
                ptx::gather_lanes();
                float x_sums[4] = {};
                if constexpr (HAS_MINIMA) {
                    unsigned ones = pack<T>(1, 1);
                    ptx::mma_m16n8k16(x_sums, a[0], ones, ones, T());
                    ptx::mma_m16n8k16(x_sums, a[1], ones, ones, T());
                }
                unsigned words[TILES] = {own.values.x, own.values.y, own.values.z, own.values.w};
                float factors[8], added[8];
                unpack_halves(factors, own.scales);
                if constexpr (HAS_MINIMA) unpack_halves(added, own.minima);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    float sum[4] = {};
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        unsigned bytes = words[tile] >> 4 * half & 0x0F0F0F0Fu;
                        unsigned low = nibble_pair<T, !HAS_MINIMA>(bytes, 0);
                        unsigned high = nibble_pair<T, !HAS_MINIMA>(bytes, 1);
                        ptx::mma_m16n8k16(sum, a[half], low, high, T());
                    }
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        int column = tile + j % 2 * 4;
                        result[tile][j] = fmaf(sum[j], factors[column], result[tile][j]);
                        if constexpr (HAS_MINIMA)
                            result[tile][j] = fmaf(x_sums[j], added[column], result[tile][j]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) {
            int row = g + i % 4 / 2 * 8;
            if (row < rows) sums[warp][row][8 * t + i % 2 * 4 + i / 4] = result[i / 4][i % 4];
        }
        __syncthreads();
        int first = item / row_tiles * COLUMNS;
        for (int i = threadIdx.x; i < rows * COLUMNS; i += WARPS * 32) {
            int row = i / COLUMNS, column = i % COLUMNS, n = first + column;
            if (n >= width) continue;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += sums[w][row][column];
            out[size_t(first_row + row) * width + n] = from_float<T>(bias ? sum + to_float(bias[n]) : sum);
        }
        __syncthreads();  // the next item overwrites `sums`
    }
}
