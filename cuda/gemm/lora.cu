// result[t, columns] += B (A x[t]) for each module of the adapter of token t: `shrink` computes h = A x,
// `expand` adds B h. The tokens are divided into tiles; a run consists of adjacent tokens of one tile that
// use the same adapter. A block reads the adapter once per run. The order in which a token's terms are added
// does not depend on the runs.
#include "gemm/matmul_sums.cuh"

using Packed = unsigned long long;

// One of the modules that are fused in this matrix: its number in the table of adapters, and its columns of
// the matrix's output. 0 columns stand for no module.
struct Module {
    int number, first, columns;

    __device__ Module(Packed it)
        : number(int(it >> 48)), first(int(it >> 24 & 0xFFFFFF)), columns(int(it & 0xFFFFFF)) {}
};

// The weights that an adapter has for a module: A [rank, width], then B [columns, rank], from element `start`
// of the pool on. Rank 0: the adapter has no weights for the module.
struct Entry {
    long long start;
    int rank;

    __device__ Entry(const long long* own) : start(own[0]), rank(int(own[1])) {}
};

// Calls `work(slot, first token, number of tokens)` for each run that begins in this block's `group` of
// tokens, which is part of a tile of TILE tokens. All threads call `for_each_run` and find the same runs.
template <int TILE, class Work>
__device__ inline void for_each_run(const int* slots, int num_tokens, int group, Work work) {
    int first = blockIdx.x * group, tile = first / TILE * TILE, lane = threadIdx.x % 32;
    int slot = lane < TILE && tile + lane < num_tokens ? slots[tile + lane] : -1;
    int before = __shfl_up_sync(0xFFFFFFFFu, slot, 1);
    unsigned borders = __ballot_sync(0xFFFFFFFFu, lane == 0 || lane == TILE || slot != before);
    unsigned has_adapter = __ballot_sync(0xFFFFFFFFu, slot >= 0);
    unsigned own = ((1u << group) - 1) << (first - tile);
    for (unsigned begins = borders & has_adapter & own; begins; begins &= begins - 1) {
        int begin = __ffs(begins) - 1;
        int end = __ffs(borders & ~((2u << begin) - 1)) - 1;  // at most TILE
        work(__shfl_sync(0xFFFFFFFFu, slot, begin), tile + begin, end - begin);
    }
}

// Loads 16 bytes, or returns zeros if not `valid`. If not `aligned`, loads the elements one by one.
template <class T> __device__ inline uint4 load_vector(const T* from, bool aligned, bool valid) {
    if (aligned) return ptx::load_once_16(from, valid);
    Vector<T, WIDE<T>> vector = {};
    if (valid) {
#pragma unroll
        for (int i = 0; i < WIDE<T>; i++) vector.values[i] = from[i];
    }
    return *reinterpret_cast<uint4*>(&vector);
}

template <class T> __device__ inline bool is_aligned(const T* pointer) {
    return reinterpret_cast<size_t>(pointer) % 16 == 0;
}

constexpr int WARPS = 8;
constexpr int TILES = 2;  // tiles of 8 ranks that a block of `shrink` computes
constexpr int RANKS = 8 * TILES;
constexpr int DEPTH = 4;             // chunks of LANES vectors that a warp reads at a time
constexpr int STEP = WARPS * LANES;  // vectors from one chunk of a warp to the warp's next chunk

// Grid: (groups of tokens, modules * parts of RANKS ranks). Chunk c of x belongs to warp c % WARPS, which
// adds its chunks in order; then the sums of the warps are added in order.
template <class T>
__global__ void __launch_bounds__(WARPS * 32, 2) shrink(
    float* h,                // [tokens, modules, max_rank], written for tokens with an adapter
    const T* x,              // [tokens, width]; aligned, and width is a multiple of 16 bytes
    const T* pool,
    const int* slots,        // [tokens]; -1: no adapter
    const long long* table,  // [slots, layers, modules, 2]
    Packed module0, Packed module1, Packed module2, Packed module3,
    int num_tokens, int width, int slot_stride, int layer_start, int num_modules, int max_rank,
    int group) {
    __shared__ float sums[WARPS][ROWS<T>][RANKS + 8];  // padded against bank conflicts
    ptx::wait_for_previous();
    int number = blockIdx.y % num_modules, first_rank = blockIdx.y / num_modules * RANKS;
    Module module(number == 0 ? module0 : number == 1 ? module1 : number == 2 ? module2 : module3);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int vectors = width / WIDE<T>;
    for_each_run<ROWS<T>>(slots, num_tokens, group, [&](int slot, int token, int rows) {
        Entry entry(table + size_t(slot) * slot_stride + layer_start + 2 * module.number);
        if (first_rank >= entry.rank) return;
        const T* a = pool + entry.start + size_t(first_rank + g) * width;
        bool aligned = is_aligned(pool + entry.start);
        const T* own_x = x + size_t(token) * width;
        Sums<T, TILES> own;
        for (int start = warp * LANES + t; start - t < vectors; start += DEPTH * STEP) {
            uint4 weight[DEPTH][TILES];
#pragma unroll
            for (int chunk = 0; chunk < DEPTH; chunk++) {
                int vector = start + chunk * STEP;
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    bool valid = vector < vectors && first_rank + g + 8 * i < entry.rank;
                    const T* from = a + size_t(8 * i) * width + vector * WIDE<T>;
                    weight[chunk][i] = load_vector(from, aligned, valid);
                }
            }
#pragma unroll
            for (int chunk = 0; chunk < DEPTH; chunk++) {
                int vector = start + chunk * STEP;
                own.add(weight[chunk], own_x + vector * WIDE<T>, width, rows, vector < vectors);
            }
        }
        own.finish();
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) {
            int row = g + i % 4 / 2 * 8;
            if (row < rows) sums[warp][row][i / 4 * 8 + 2 * t + i % 2] = own.result[i / 4][i % 4];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < rows * RANKS; i += WARPS * 32) {
            int row = i / RANKS, d = i % RANKS;
            if (first_rank + d >= entry.rank) continue;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += sums[w][row][d];
            h[(size_t(token + row) * num_modules + number) * max_rank + first_rank + d] = sum;
        }
        __syncthreads();  // the next run overwrites `sums`
    });
}

constexpr int COLUMNS = 128;  // columns that a block of `expand` computes, one per thread
constexpr int TILE = 16;      // tokens
constexpr int PART = 64;      // ranks of h in shared memory
constexpr int QUAD = 4;       // tokens that are computed together

// Grid: (groups of tokens, parts of COLUMNS columns). An element's terms are summed in the order of modules,
// and for a module in the order of its ranks. Then the sum is added to the result, which is rounded once.
template <class T>
__global__ void __launch_bounds__(COLUMNS, 5) expand(
    T* result,               // [tokens, width]
    const float* h,          // [tokens, modules, max_rank]
    const T* pool,
    const int* slots,        // [tokens]; -1: no adapter
    const long long* table,  // [slots, layers, modules, 2]
    Packed module0, Packed module1, Packed module2, Packed module3,
    int num_tokens, int width, int depth, int slot_stride, int layer_start, int num_modules,
    int max_rank, int group) {  // depth: the width of A
    __shared__ __align__(16) float inner[TILE][PART];
    ptx::wait_for_previous();
    int low = blockIdx.y * COLUMNS, column = low + threadIdx.x;
    const Module modules[] = {module0, module1, module2, module3};
    for_each_run<TILE>(slots, num_tokens, group, [&](int slot, int token, int rows) {
        float sums[TILE] = {};
        bool any = false;
#pragma unroll
        for (int number = 0; number < 4; number++) {
            const Module& module = modules[number];
            int end = module.first + module.columns;
            if (number >= num_modules || module.first >= low + COLUMNS || end <= low) continue;
            Entry entry(table + size_t(slot) * slot_stride + layer_start + 2 * module.number);
            int rank = entry.rank;
            any |= rank > 0;
            bool inside = column >= module.first && column < end;
            const T* b = pool + entry.start + size_t(rank) * depth;
            bool aligned = rank % WIDE<T> == 0 && is_aligned(b);
            b += size_t(column - module.first) * rank;
            for (int first = 0; first < rank; first += PART) {
                int count = min(rank - first, PART);
                __syncthreads();  // all threads have read the previous part
                for (int i = threadIdx.x; i < (rows + QUAD - 1) / QUAD * QUAD * PART; i += COLUMNS) {
                    int row = i / PART, d = i % PART;
                    size_t at = (size_t(token + row) * num_modules + number) * max_rank + first + d;
                    inner[row][d] = row < rows && d < count ? h[at] : 0.0f;
                }
                __syncthreads();
                if (!inside) continue;
                for (int d = 0; d < count; d += WIDE<T>) {
                    float values[WIDE<T>] = {};
                    if (aligned) {
                        load(values, b + first + d);
                    } else {
#pragma unroll
                        for (int j = 0; j < WIDE<T>; j++)
                            if (d + j < count) values[j] = to_float(b[first + d + j]);
                    }
#pragma unroll
                    for (int quad = 0; quad < TILE; quad += QUAD) {
                        if (quad >= rows) break;
#pragma unroll
                        for (int row = quad; row < quad + QUAD; row++) {
                            float own[WIDE<T>];
                            load(own, &inner[row][d]);
#pragma unroll
                            for (int j = 0; j < WIDE<T>; j++)
                                sums[row] = fmaf(own[j], values[j], sums[row]);
                        }
                    }
                }
            }
        }
        if (!any || column >= width) return;
#pragma unroll
        for (int row = 0; row < TILE; row++) {
            if (row >= rows) break;
            T* to = result + size_t(token + row) * width + column;
            *to = from_float<T>(to_float(*to) + sums[row]);
        }
    });
}
