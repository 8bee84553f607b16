// Converts int8 and 4-bit weights to the dtype T of the activations x, which represents them exactly.
#pragma once

#include "numerics.cuh"

using int8 = signed char;

// The number of 16-byte vectors of T to which one 16-byte vector of W is converted.
template <class T, class W> constexpr int PARTS = sizeof(T) / sizeof(W);

template <class T> constexpr bool is_half = false;
template <> constexpr bool is_half<__half> = true;

// Returns two int8 as elements of T in one register: bytes 0 and 1 of `bytes` if `half` is 0, else 2 and 3.
template <class T> __device__ inline unsigned widened_pair(unsigned bytes, int half);

// The float16 with the upper byte 0x64 and the lower byte b is 1024 + b. An integer with its highest bit
// inverted is, as an unsigned byte, the integer plus 128. So 1152 must be subtracted.
template <> __device__ inline unsigned widened_pair<__half>(unsigned bytes, int half) {
    unsigned both = __byte_perm(bytes, 0x64, half ? 0x4342 : 0x4140) ^ 0x00800080u;
    return ptx::add_pair(both, 0xE480E480u, __half());  // -1152
}

// bfloat16 has 7 mantissa bits. The upper byte 0x43 with the lower 7 bits of an int8 is 128 + these bits;
// with the sign bit alone it is 128, or 256 for a negative integer. The difference is the integer.
template <> __device__ inline unsigned widened_pair<__nv_bfloat16>(unsigned bytes, int half) {
    unsigned both = __byte_perm(bytes, 0x43, half ? 0x4342 : 0x4140);
    return ptx::add_pair(both & 0xFF7FFF7Fu, (both & 0xFF80FF80u) | 0x80008000u, __nv_bfloat16());
}

// Like `widened_pair`, for bytes that each hold a 4-bit value from 0 to 15. If CENTERED, 8 is subtracted.
template <class T, bool CENTERED> __device__ inline unsigned nibble_pair(unsigned bytes, int half) {
    constexpr unsigned UPPER = is_half<T> ? 0x64 : 0x43;  // the same as in `widened_pair`
    constexpr unsigned CONSTANT = 0x8000 | UPPER << 8 | (CENTERED ? 8 : 0);
    unsigned both = __byte_perm(bytes, UPPER, half ? 0x4342 : 0x4140);
    return ptx::add_pair(both, CONSTANT << 16 | CONSTANT, T());
}

// Unpacks eight float16 numbers.
__device__ inline void unpack_halves(float (&to)[8], const uint4& from) {
    unsigned words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        unsigned short bits = words[i / 2] >> 16 * (i % 2);
        to[i] = __half2float(__ushort_as_half(bits));
    }
}

// Converts bytes that hold elements of W, here int8; float8_weights.cuh specializes this for 8-bit floats.
// `pair`: as `widened_pair`. `one`: returns the element in the lowest byte as a float.
template <class T, class W> struct Stored {
    __device__ static unsigned pair(unsigned bytes, int half) { return widened_pair<T>(bytes, half); }
    __device__ static float one(unsigned bytes) { return float(int8(bytes)); }
};

// Returns part `part` (from 0 to PARTS - 1) of the elements of W in `from`, as elements of T.
template <class T, class W> __device__ inline uint4 widened(const uint4& from, int part) {
    if constexpr (sizeof(T) == sizeof(W)) {
        return from;
    } else if constexpr (sizeof(T) == 4) {
        unsigned bytes = part == 0 ? from.x : part == 1 ? from.y : part == 2 ? from.z : from.w;
        auto bits = [&](int i) { return __float_as_uint(Stored<T, W>::one(bytes >> 8 * i)); };
        return {bits(0), bits(1), bits(2), bits(3)};
    } else {
        unsigned low = part ? from.z : from.x, high = part ? from.w : from.y;
        return {
            Stored<T, W>::pair(low, 0), Stored<T, W>::pair(low, 1),
            Stored<T, W>::pair(high, 0), Stored<T, W>::pair(high, 1)};
    }
}
