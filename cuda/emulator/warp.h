// Barriers, fences, and the exchange of values between the lanes of a warp.
#pragma once

#include "machine.h"

namespace emulator {

template <class T> struct Exchange {
    T value, result;
    int source;  // the lane that provides the result; after `match`, the mask of lanes with equal values
};

template <class T> void exchange(void** operands, Site site) {
    for (int lane = 0; lane < WARP; lane++) {
        if (!operands[lane]) continue;
        auto* mine = static_cast<Exchange<T>*>(operands[lane]);
        auto* source = static_cast<Exchange<T>*>(operands[mine->source]);
        if (!source)
            fail(site, "lane %d reads lane %d, which does not participate", lane, mine->source);
        mine->result = source->value;
    }
}

template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, Site site) {
    Exchange<T> operands{value, value, source};
    warp_operation(exchange<T>, name, mask, &operands, site);
    return operands.result;
}

// A warp consists of parts of `width` lanes. The first lane of this lane's part, and the end of the part.
inline int part_begin(int width) { return int(lane()) & ~(width - 1); }
inline int part_end(int width) { return part_begin(width) + width; }

struct Votes {
    unsigned predicate, result;
};

inline void ballot(void** operands, Site) {
    unsigned votes = 0;
    for (int lane = 0; lane < WARP; lane++) {
        if (operands[lane] && static_cast<Votes*>(operands[lane])->predicate) votes |= 1u << lane;
    }
    for (int lane = 0; lane < WARP; lane++) {
        if (operands[lane]) static_cast<Votes*>(operands[lane])->result = votes;
    }
}

inline unsigned vote(const char* name, unsigned mask, bool predicate, Site site) {
    Votes votes{predicate, 0};
    warp_operation(ballot, name, mask, &votes, site);
    return votes.result;
}

template <class T> void match(void** operands, Site) {
    for (int lane = 0; lane < WARP; lane++) {
        auto* mine = static_cast<Exchange<T>*>(operands[lane]);
        if (mine) mine->source = 0;
        for (int other = 0; mine && other < WARP; other++) {
            auto* source = static_cast<Exchange<T>*>(operands[other]);
            if (source && source->value == mine->value) mine->source |= 1u << other;
        }
    }
}

template <class T, class F> struct Reduction {
    static void evaluate(void** operands, Site) {
        T* first = nullptr;
        for (int lane = 0; lane < WARP; lane++) {
            auto* mine = static_cast<T*>(operands[lane]);
            if (mine && first) *first = F()(*first, *mine);
            if (mine && !first) first = mine;
        }
        for (int lane = 0; lane < WARP; lane++) {
            if (operands[lane]) *static_cast<T*>(operands[lane]) = *first;
        }
    }
};

template <class F, class T> T reduce(const char* name, unsigned mask, T value, Site site) {
    warp_operation(Reduction<T, F>::evaluate, name, mask, &value, site);
    return value;
}

}  // namespace emulator

inline void __syncthreads(EMULATOR_CALLER) {
    ::emulator::sync_block(::emulator::COUNT, 0, "__syncthreads", EMULATOR_SITE);
}
inline int __syncthreads_count(int predicate, EMULATOR_CALLER) {
    return ::emulator::sync_block(
        ::emulator::COUNT, predicate, "__syncthreads_count", EMULATOR_SITE);
}
inline int __syncthreads_and(int predicate, EMULATOR_CALLER) {
    return ::emulator::sync_block(::emulator::ALL, predicate, "__syncthreads_and", EMULATOR_SITE);
}
inline int __syncthreads_or(int predicate, EMULATOR_CALLER) {
    return ::emulator::sync_block(::emulator::ANY, predicate, "__syncthreads_or", EMULATOR_SITE);
}
inline void __syncwarp(unsigned mask = ~0u, EMULATOR_CALLER) {
    ::emulator::sync_warp(mask, EMULATOR_SITE);
}
// CUDA does not guarantee that the lanes of a warp run together; in the emulator they never do.
inline unsigned __activemask() { return 1u << ::emulator::lane(); }
inline void __threadfence() { ::emulator::fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { ::emulator::fence(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_CALLER) {
    int lane = ::emulator::part_begin(width) + (source & (width - 1));
    return ::emulator::shuffle("__shfl_sync", mask, value, lane, EMULATOR_SITE);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER) {
    int lane = ::emulator::lane(), source = lane - int(delta);
    if (source < ::emulator::part_begin(width)) source = lane;
    return ::emulator::shuffle("__shfl_up_sync", mask, value, source, EMULATOR_SITE);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER) {
    int lane = ::emulator::lane(), source = lane + int(delta);
    if (source >= ::emulator::part_end(width)) source = lane;
    return ::emulator::shuffle("__shfl_down_sync", mask, value, source, EMULATOR_SITE);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32, EMULATOR_CALLER) {
    int lane = ::emulator::lane(), source = lane ^ other;
    if (source >= ::emulator::part_end(width)) source = lane;
    return ::emulator::shuffle("__shfl_xor_sync", mask, value, source, EMULATOR_SITE);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
    return ::emulator::vote("__ballot_sync", mask, predicate, EMULATOR_SITE);
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
    return ::emulator::vote("__any_sync", mask, predicate, EMULATOR_SITE) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
    return ::emulator::vote("__all_sync", mask, predicate, EMULATOR_SITE) == mask;
}
template <class T> unsigned __match_any_sync(unsigned mask, T value, EMULATOR_CALLER) {
    ::emulator::Exchange<T> operands{value, value, 0};
    ::emulator::warp_operation(
        ::emulator::match<T>, "__match_any_sync", mask, &operands, EMULATOR_SITE);
    return operands.source;
}

#define EMULATOR_REDUCE(NAME, T, EXPRESSION) \
    inline T __reduce_##NAME##_sync(unsigned mask, T value, EMULATOR_CALLER) { \
        struct F { \
            T operator()(T a, T b) { return EXPRESSION; } \
        }; \
        return ::emulator::reduce<F>("__reduce_" #NAME "_sync", mask, value, EMULATOR_SITE); \
    }
EMULATOR_REDUCE(add, unsigned, a + b)
EMULATOR_REDUCE(add, int, a + b)
EMULATOR_REDUCE(min, unsigned, a < b ? a : b)
EMULATOR_REDUCE(min, int, a < b ? a : b)
EMULATOR_REDUCE(max, unsigned, a > b ? a : b)
EMULATOR_REDUCE(max, int, a > b ? a : b)
EMULATOR_REDUCE(and, unsigned, a & b)
EMULATOR_REDUCE(or, unsigned, a | b)
EMULATOR_REDUCE(xor, unsigned, a ^ b)
