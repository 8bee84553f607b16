// Functions that CUDA C++ adds to C++. Those that are approximate on a GPU are as accurate as the C library.
#pragma once

#include <limits.h>
#include <math.h>
#include <string.h>

#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf
#define __sincosf sincosf

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1.0f : 0.0f; }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }

#define EMULATOR_MIN_MAX(T) \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

namespace emulator {
template <class To, class From> To reinterpret(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace emulator
inline int __float_as_int(float x) { return ::emulator::reinterpret<int>(x); }
inline unsigned __float_as_uint(float x) { return ::emulator::reinterpret<unsigned>(x); }
inline float __int_as_float(int x) { return ::emulator::reinterpret<float>(x); }
inline float __uint_as_float(unsigned x) { return ::emulator::reinterpret<float>(x); }
inline long long __double_as_longlong(double x) { return ::emulator::reinterpret<long long>(x); }
inline double __longlong_as_double(long long x) { return ::emulator::reinterpret<double>(x); }

namespace emulator {
// Rounds toward zero. Beyond the range of the type, returns the end of the range; for NaN, returns 0.
inline int to_int(double x) {
    return x >= INT_MAX ? INT_MAX : x <= INT_MIN ? INT_MIN : x == x ? int(x) : 0;
}
inline unsigned to_unsigned(double x) {
    return x >= UINT_MAX ? UINT_MAX : x > 0 ? unsigned(x) : 0;
}
}  // namespace emulator
inline int __float2int_rn(float x) { return ::emulator::to_int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return ::emulator::to_int(x); }
inline int __float2int_rd(float x) { return ::emulator::to_int(floorf(x)); }
inline int __float2int_ru(float x) { return ::emulator::to_int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return ::emulator::to_unsigned(nearbyintf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline int __mulhi(int a, int b) { return (long long)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return ((unsigned long long)high << 32 | low) << (shift & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return ((unsigned long long)high << 32 | low) >> (shift & 31);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = selector >> (4 * i) & 0xF, byte = bytes >> (8 * (pick & 7)) & 0xFF;
        if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << (8 * i);
    }
    return result;
}

// Loads and stores with a cache hint, which is ignored.
template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
template <class T> T __ldca(const T* address) { return *address; }
template <class T> T __ldcs(const T* address) { return *address; }
template <class T> T __ldlu(const T* address) { return *address; }
template <class T> T __ldcv(const T* address) { return *address; }
template <class T> void __stcg(T* address, T value) { *address = value; }
template <class T> void __stcs(T* address, T value) { *address = value; }
template <class T> void __stwb(T* address, T value) { *address = value; }
template <class T> void __stwt(T* address, T value) { *address = value; }

inline void __nanosleep(unsigned) {}
#define __trap() ::emulator::fail({__FILE__, __LINE__, nullptr}, "__trap")
