// For each copy (from, to, n): destination[:, to, :, :n] = source[:, from, :, :n], the first n tokens of
// a block. One token of a KV head has `vectors` vectors of 16 bytes.
#include "numerics.cuh"

// Grid: (copies, layers * kv heads). Either pool may be in pinned CPU memory.
__global__ void copy_blocks(
    uint4* destination,   // [layers, destination_blocks, kv_heads, tokens_per_block, vectors]
    const uint4* source,  // [layers, source_blocks, kv_heads, tokens_per_block, vectors]
    const int* copies,    // [copies, 3]: source block, destination block, number of tokens
    int destination_blocks, int source_blocks, int num_kv_heads, int tokens_per_block,
    int vectors) {
    const int* copy = copies + 3 * blockIdx.x;
    size_t layer = blockIdx.y / num_kv_heads, head = blockIdx.y % num_kv_heads;
    size_t page = size_t(tokens_per_block) * vectors;
    const uint4* from = source + ((layer * source_blocks + copy[0]) * num_kv_heads + head) * page;
    uint4* to = destination + ((layer * destination_blocks + copy[1]) * num_kv_heads + head) * page;
    int size = copy[2] * vectors;
    for (int i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
}
