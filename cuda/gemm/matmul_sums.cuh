// `Sums`: the sums of a warp that multiplies a few rows of x with weight rows, which are in registers.
#pragma once

#include "gemm/widening.cuh"

constexpr int LANES = 4;                     // lanes per weight row: a chunk has 4 * 16 bytes of a row
template <class T> constexpr int ROWS = 16;  // rows of x that are multiplied at a time
template <> constexpr int ROWS<float> = 8;

// The results for rows of x and 8 * TILES weight rows, in fragments of mma.sync: with g = lane / 4 and
// t = lane % 4, a lane has the results for rows g and g + 8 of x and weight rows 2t and 2t + 1 of each tile.
// `weight` is the 16-byte vector t of the chunk, from weight row g of each tile.
//
// Tensor cores compute x [16 rows, 16 k] @ weight^T [16 k, 8 weight rows]. The order of k is free, as
// long as both operands agree: the first 4 of 8 consecutive elements of a lane are k = 2t, 2t + 1, 2t + 8
// and 2t + 9 of one matmul, and the other 4 are the same k of the next matmul.
template <class T, int TILES, class W = T> struct Sums {
    float result[TILES][4] = {};

    // Adds one chunk. `x`: where the lane's part of the chunk begins in the first row of x. If not `inside`,
    // this part is past the end of the row, and is not read.
    __device__ void add(const uint4 (&weight)[TILES], const T* x, int depth, int rows, bool inside) {
        int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int part = 0; part < PARTS<T, W>; part++) {
            auto load_row = [&](int row) {
                const T* from = x + size_t(row) * depth + part * WIDE<T>;
                return inside && row < rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            };
            uint4 first = load_row(g), second = load_row(g + 8), own[TILES];
            unsigned low[4] = {first.x, second.x, first.y, second.y};
            unsigned high[4] = {first.z, second.z, first.w, second.w};
#pragma unroll
            for (int i = 0; i < TILES; i++) own[i] = widened<T, W>(weight[i], part);
            ptx::gather_lanes();
#pragma unroll
            for (int i = 0; i < TILES; i++)
                ptx::mma_m16n8k16(result[i], low, own[i].x, own[i].y, T());
#pragma unroll
            for (int i = 0; i < TILES; i++)
                ptx::mma_m16n8k16(result[i], high, own[i].z, own[i].w, T());
        }
    }
    __device__ void finish() {}
};

// Tensor cores have no float32 matmul. So for all rows of x, each lane sums over its own k, and `finish` adds
// the sums of the four lanes of a weight row. With 8 rows of x, there is no row g + 8.
template <int TILES, class W> struct Sums<float, TILES, W> {
    float result[TILES][4] = {};
    float own[TILES][ROWS<float>] = {};

    __device__ void add(
        const uint4 (&weight)[TILES], const float* x, int depth, int rows, bool inside) {
#pragma unroll
        for (int part = 0; part < PARTS<float, W>; part++) {
            uint4 part_of[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) part_of[i] = widened<float, W>(weight[i], part);
#pragma unroll
            for (int row = 0; row < ROWS<float>; row++) {
                if (!inside || row >= rows) break;
                float values[4];
                load(values, x + size_t(row) * depth + part * WIDE<float>);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    own[i][row] = fmaf(__uint_as_float(part_of[i].x), values[0], own[i][row]);
                    own[i][row] = fmaf(__uint_as_float(part_of[i].y), values[1], own[i][row]);
                    own[i][row] = fmaf(__uint_as_float(part_of[i].z), values[2], own[i][row]);
                    own[i][row] = fmaf(__uint_as_float(part_of[i].w), values[3], own[i][row]);
                }
            }
        }
    }
    __device__ void finish() {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int row = 0; row < ROWS<float>; row++) {
                float sum = warp_sum<LANES>(own[i][row]);  // the sum of weight row g
                float even = __shfl_sync(0xFFFFFFFFu, sum, 8 * t);
                float odd = __shfl_sync(0xFFFFFFFFu, sum, 8 * t + 4);
                if (row == g) result[i][0] = even, result[i][1] = odd;
            }
        }
    }
};
