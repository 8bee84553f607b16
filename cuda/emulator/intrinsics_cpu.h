// The CPU versions of intrinsics.cuh. They are not inlined: who calls is told by return address.
#pragma once

#include "machine.h"

#define EMULATED __attribute__((noinline)) inline

namespace emulator {

struct Rows {  // of ldmatrix: what a lane names, and what it gets
    uint16_t row[8];
    unsigned registers[4];
};

template <bool TRANSPOSED> void distribute(void** operands, Site) {
    for (int lane = 0; lane < WARP; lane++) {
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            auto element = [&](int row, int column) {
                return static_cast<Rows*>(operands[8 * i + row])->row[column];
            };
            unsigned low = TRANSPOSED ? element(2 * t, g) : element(g, 2 * t);
            unsigned high = TRANSPOSED ? element(2 * t + 1, g) : element(g, 2 * t + 1);
            static_cast<Rows*>(operands[lane])->registers[i] = low | high << 16;
        }
    }
}

template <bool TRANSPOSED>
void load_matrix(unsigned (&registers)[4], const void* row, Site site) {
    Rows rows;
    if (uintptr_t(row) % 16) fail(site, "ldmatrix of a row that is not aligned to 16 bytes");
    if (!in_shared(static_cast<const char*>(row))) fail(site, "ldmatrix of what is not shared memory");
    read_memory(rows.row, row, sizeof rows.row, site);
    warp_operation(distribute<TRANSPOSED>, "ldmatrix", ~0u, &rows, site);
    for (int i = 0; i < 4; i++) registers[i] = rows.registers[i];
}

struct Turned {
    unsigned elements, result;
};

inline void turn(void** operands, Site) {
    for (int lane = 0; lane < WARP; lane++) {
        int g = lane / 4, t = lane % 4;
        auto element = [&](int row, int column) {
            unsigned both = static_cast<Turned*>(operands[4 * row + column / 2])->elements;
            return both >> 16 * (column % 2) & 0xFFFF;
        };
        static_cast<Turned*>(operands[lane])->result =
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

inline void wait_for_previous() { ::emulator::wait_for_previous(); }
EMULATED void prefetch_l2(const void* address) { ::emulator::prefetch(address, EMULATOR_RETURN); }

inline float exp2_approx(float x) { return exp2f(x); }

EMULATED uint4 load_once_16(const void* address, bool valid) {
    uint4 to{0, 0, 0, 0};
    if (uintptr_t(address) % 16)
        ::emulator::fail(EMULATOR_RETURN, "load of 16 bytes that are not aligned to them");
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

EMULATED void cp_async_16(void* to, const void* from, bool valid) {
    ::emulator::copy_async(to, from, 16, valid ? 16 : 0, EMULATOR_RETURN);
}
inline void cp_async_commit() { ::emulator::copy_async_commit(); }
template <int PENDING> void cp_async_wait() { ::emulator::copy_async_wait(PENDING); }

EMULATED void load_matrix_x4(unsigned (&registers)[4], const void* row) {
    ::emulator::load_matrix<false>(registers, row, EMULATOR_RETURN);
}
EMULATED void load_matrix_x4_transposed(unsigned (&registers)[4], const void* row) {
    ::emulator::load_matrix<true>(registers, row, EMULATOR_RETURN);
}

EMULATED unsigned transpose_matrix(unsigned elements) {
    ::emulator::Turned turned{elements, 0};
    ::emulator::warp_operation(::emulator::turn, "movmatrix", ~0u, &turned, EMULATOR_RETURN);
    return turned.result;
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

}  // namespace ptx
