// The CPU versions of the functions in intrinsics.cuh. A function that may report an error is not inlined,
// because its return address identifies the caller.
#pragma once

#include "machine.h"

#define EMULATED __attribute__((noinline)) inline

namespace emulator {

struct Rows {  // the operands of ldmatrix
    const uint16_t* row;      // the row that the lane passes
    const uint16_t* from[8];  // the source of each element that the lane receives
};

template <bool TRANSPOSED> void distribute(void** operands, Site) {
    for (int lane = 0; lane < WARP; lane++) {
        int g = lane / 4, t = lane % 4;
        auto* own = static_cast<Rows*>(operands[lane]);
        for (int i = 0; i < 8; i++) {
            int row = TRANSPOSED ? 2 * t + i % 2 : g, column = TRANSPOSED ? g : 2 * t + i % 2;
            own->from[i] = static_cast<Rows*>(operands[i / 2 * 8 + row])->row + column;
        }
    }
}

template <bool TRANSPOSED>
void load_matrix(unsigned (&registers)[4], const void* row, Site site) {
    Rows rows{static_cast<const uint16_t*>(row), {}};
    if (uintptr_t(row) % 16) fail(site, "ldmatrix of a row that is not aligned to 16 bytes");
    if (!in_shared(static_cast<const char*>(row)))
        fail(site, "ldmatrix of an address outside shared memory");
    warp_operation(distribute<TRANSPOSED>, "ldmatrix", ~0u, &rows, site);
    // Each lane itself reads the elements that it receives, also from rows that other lanes have passed:
    // its own reads must be ordered after the writes of these elements.
    uint16_t elements[8];
    for (int i = 0; i < 8; i++) read_memory(&elements[i], rows.from[i], sizeof *elements, site);
    for (int i = 0; i < 4; i++) registers[i] = elements[2 * i] | unsigned(elements[2 * i + 1]) << 16;
}

struct Transposed {
    unsigned elements, result;
};

inline void transpose(void** operands, Site) {
    for (int lane = 0; lane < WARP; lane++) {
        int g = lane / 4, t = lane % 4;
        auto element = [&](int row, int column) {
            unsigned both = static_cast<Transposed*>(operands[4 * row + column / 2])->elements;
            return both >> 16 * (column % 2) & 0xFFFF;
        };
        static_cast<Transposed*>(operands[lane])->result =
            element(2 * t, g) | element(2 * t + 1, g) << 16;
    }
}

struct Fragments {
    float (*d)[4];
    const unsigned (*a)[4];
    unsigned b[2];
};

inline float widen(unsigned bits, __nv_bfloat16) { return reinterpret<float>(bits << 16); }
inline float widen(unsigned bits, __half) {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(bits);
    return __half2float(__half(raw));
}

template <class T> void multiply(void** operands, Site) {
    float a[16][16], b[8][16];
    for (int lane = 0; lane < WARP; lane++) {
        auto* mine = static_cast<Fragments*>(operands[lane]);
        int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++)
                a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] =
                    widen((*mine->a)[i] >> 16 * half & 0xFFFF, T());
            for (int i = 0; i < 2; i++)
                b[g][2 * t + 8 * i + half] = widen(mine->b[i] >> 16 * half & 0xFFFF, T());
        }
    }
    for (int lane = 0; lane < WARP; lane++) {
        auto* mine = static_cast<Fragments*>(operands[lane]);
        for (int i = 0; i < 4; i++) {
            const float* row = a[lane / 4 + i / 2 * 8];
            const float* column = b[lane % 4 * 2 + i % 2];
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += row[k] * column[k];
            (*mine->d)[i] += sum;
        }
    }
}

}  // namespace emulator

namespace ptx {

inline unsigned char* dynamic_shared() {
    return static_cast<unsigned char*>(::emulator::dynamic_shared());
}

inline int thread_index() { return threadIdx.x; }

inline void wait_for_previous() { ::emulator::wait_for_previous(); }
EMULATED void prefetch_l2(const void* address) { ::emulator::prefetch(address, EMULATOR_RETURN); }
EMULATED int load_early(const int* address) {
    int value;
    ::emulator::read_early(&value, address, sizeof value, EMULATOR_RETURN);
    return value;
}
EMULATED long long load_early(const long long* address) {
    long long value;
    ::emulator::read_early(&value, address, sizeof value, EMULATOR_RETURN);
    return value;
}

inline float exp2_approx(float x) { return exp2f(x); }

inline unsigned add_pair(unsigned a, unsigned b, __nv_bfloat16) {
    auto sum = [&](int shift) {
        auto element = [&](unsigned from) { return ::emulator::widen(from >> shift & 0xFFFF, __nv_bfloat16()); };
        return unsigned(__nv_bfloat16_raw(__float2bfloat16_rn(element(a) + element(b))).x) << shift;
    };
    return sum(0) | sum(16);
}
inline unsigned add_pair(unsigned a, unsigned b, __half) {
    auto sum = [&](int shift) {
        auto element = [&](unsigned from) { return ::emulator::widen(from >> shift & 0xFFFF, __half()); };
        return unsigned(__half_raw(__float2half_rn(element(a) + element(b))).x) << shift;
    };
    return sum(0) | sum(16);
}

EMULATED uint4 load_once_16(const void* address, bool valid) {
    uint4 to{0, 0, 0, 0};
    if (uintptr_t(address) % 16)
        ::emulator::fail(EMULATOR_RETURN, "load_once_16 of an address that is not aligned to 16 bytes");
    if (valid) ::emulator::read_memory(&to, address, sizeof to, EMULATOR_RETURN);
    return to;
}

EMULATED unsigned atomic_inc_acq_rel(unsigned* address, unsigned last) {
    ::emulator::fence();
    auto next = [last](unsigned old) __attribute__((no_sanitize("thread"))) {
        return old >= last ? 0 : old + 1;
    };
    return ::emulator::update(address, EMULATOR_RETURN, next);
}

#ifndef COPIES_AT_ONCE
EMULATED void cp_async_16(void* to, const void* from, bool valid) {
    ::emulator::copy_async(to, from, 16, valid ? 16 : 0, EMULATOR_RETURN);
}
inline void cp_async_commit() { ::emulator::copy_async_commit(); }
template <int PENDING> void cp_async_wait() { ::emulator::copy_async_wait(PENDING); }
#endif

EMULATED void load_matrix_x4(unsigned (&registers)[4], const void* row) {
    ::emulator::load_matrix<false>(registers, row, EMULATOR_RETURN);
}
EMULATED void load_matrix_x4_transposed(unsigned (&registers)[4], const void* row) {
    ::emulator::load_matrix<true>(registers, row, EMULATOR_RETURN);
}

EMULATED unsigned transpose_matrix(unsigned elements) {
    ::emulator::Transposed matrix{elements, 0};
    ::emulator::warp_operation(::emulator::transpose, "movmatrix", ~0u, &matrix, EMULATOR_RETURN);
    return matrix.result;
}

EMULATED void mma_m16n8k16(
    float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
    ::emulator::Fragments fragments{&d, &a, {b0, b1}};
    ::emulator::warp_operation(
        ::emulator::multiply<__nv_bfloat16>, "mma", ~0u, &fragments, EMULATOR_RETURN);
}
EMULATED void mma_m16n8k16(
    float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
    ::emulator::Fragments fragments{&d, &a, {b0, b1}};
    ::emulator::warp_operation(
        ::emulator::multiply<__half>, "mma", ~0u, &fragments, EMULATOR_RETURN);
}

EMULATED unsigned shared_address(const void* pointer) {
    return ::emulator::shared_address(pointer);
}

inline void fence_proxy_async() { ::emulator::fence_proxy_async(); }

template <int N> void settle(float (&)[N][4]) {}
template <int N> void settle(unsigned (&)[N][4]) {}
template <int N> __attribute__((noinline)) void warpgroup_fence(float (&d)[N][4]) {
    ::emulator::warpgroup_fence(&d[0][0], sizeof d, EMULATOR_RETURN);
}
EMULATED void warpgroup_commit() { ::emulator::warpgroup_commit(EMULATOR_RETURN); }
template <int PENDING, int N> __attribute__((noinline)) void warpgroup_wait(float (&d)[N][4]) {
    ::emulator::warpgroup_wait(PENDING, &d[0][0], EMULATOR_RETURN);
}

template <class T> float widened(unsigned bits) { return ::emulator::widen(bits, T()); }

#define EMULATOR_WARPGROUP_MMA(T) \
    EMULATED void warpgroup_mma( \
        float (&d)[16][4], unsigned long long a, unsigned long long b, bool add, T) { \
        ::emulator::warpgroup_matmul( \
            {128, add, false, a, b, widened<T>, &d[0][0], nullptr}, EMULATOR_RETURN); \
    } \
    EMULATED void warpgroup_mma( \
        float (&d)[16][4], const unsigned (&a)[4], unsigned long long b, T) { \
        ::emulator::warpgroup_matmul( \
            {128, true, true, 0, b, widened<T>, &d[0][0], a}, EMULATOR_RETURN); \
    } \
    EMULATED void warpgroup_mma( \
        float (&d)[8][4], const unsigned (&a)[4], unsigned long long b, T) { \
        ::emulator::warpgroup_matmul( \
            {64, true, true, 0, b, widened<T>, &d[0][0], a}, EMULATOR_RETURN); \
    }
EMULATOR_WARPGROUP_MMA(__nv_bfloat16)
EMULATOR_WARPGROUP_MMA(__half)

}  // namespace ptx
