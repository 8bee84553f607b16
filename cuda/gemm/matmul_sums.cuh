// A warp's sums for matmuls of a few rows of x with rows of a weight in its registers.
#pragma once

#include "numerics.cuh"

constexpr int LANES = 4;                     // of 16 bytes, of one weight row in a chunk
template <class T> constexpr int ROWS = 16;  // of x, that are multiplied at a time
template <> constexpr int ROWS<float> = 8;

// Sums of a warp: rows of x with 8 * TILES weight rows, as mma.sync leaves them: rows g and g + 8,
// weight rows 2t and 2t + 1 of a tile. A lane has weight row g of each tile, and its vector t.
//
// Tensor cores take x [16 rows, 16 k] @ weight^T [16 k, 8 weight rows]. The order of k is free,
// as long as both sides agree: a lane's 8 consecutive elements are 2t, 2t + 1, 2t + 8, 2t + 9 of one
// matmul, then of another.
template <class T, int TILES> struct Sums {
    float result[TILES][4] = {};

    // Of x at the lane's vector, which is past the end where not `inside`.
    __device__ void add(const uint4 (&weight)[TILES], const T* x, int depth, int rows, bool inside) {
        int g = threadIdx.x % 32 / 4;
        auto load_row = [&](int row) {
            const T* from = x + size_t(row) * depth;
            return inside && row < rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
        };
        uint4 first = load_row(g), second = load_row(g + 8);
        unsigned low[4] = {first.x, second.x, first.y, second.y};
        unsigned high[4] = {first.z, second.z, first.w, second.w};
#pragma unroll
        for (int i = 0; i < TILES; i++)
            ptx::mma_m16n8k16(result[i], low, weight[i].x, weight[i].y, T());
#pragma unroll
        for (int i = 0; i < TILES; i++)
            ptx::mma_m16n8k16(result[i], high, weight[i].z, weight[i].w, T());
    }
    __device__ void finish() {}
};

// Tensor cores have no float32 matmul: a lane adds its own k, for all rows, and at the end its four
// lanes are added.
template <int TILES> struct Sums<float, TILES> {
    float result[TILES][4] = {};
    float own[TILES][ROWS<float>] = {};

    __device__ void add(
        const uint4 (&weight)[TILES], const float* x, int depth, int rows, bool inside) {
#pragma unroll
        for (int row = 0; row < ROWS<float>; row++) {
            if (!inside || row >= rows) break;
            float values[4];
            load(values, x + size_t(row) * depth);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                own[i][row] = fmaf(__uint_as_float(weight[i].x), values[0], own[i][row]);
                own[i][row] = fmaf(__uint_as_float(weight[i].y), values[1], own[i][row]);
                own[i][row] = fmaf(__uint_as_float(weight[i].z), values[2], own[i][row]);
                own[i][row] = fmaf(__uint_as_float(weight[i].w), values[3], own[i][row]);
            }
        }
    }
    __device__ void finish() {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int row = 0; row < ROWS<float>; row++) {
                float sum = warp_sum<LANES>(own[i][row]);  // of weight row lane / 4
                float even = __shfl_sync(0xFFFFFFFFu, sum, 8 * t);
                float odd = __shfl_sync(0xFFFFFFFFu, sum, 8 * t + 4);
                if (row == g) result[i][0] = even, result[i][1] = odd;
            }
        }
    }
};
