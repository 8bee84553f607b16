// Atomic operations. Each returns the previous value. One OS thread runs all GPU threads, so the atomic
// operations are plain updates. They are reported to check mode.
#pragma once

#include "machine.h"

namespace emulator {

template <class T, class F>
__attribute__((no_sanitize("thread"), noinline)) T update(T* address, Site site, F value) {
    check_atomic(address, sizeof(T), site);
    T before = *address;
    *address = value(before);
    return before;
}

}  // namespace emulator

#define EMULATOR_ATOMIC(NAME, EXPRESSION) \
    template <class T, class V> T NAME(T* address, V operand, EMULATOR_CALLER) { \
        T value = T(operand); \
        auto next = [value](T old) __attribute__((no_sanitize("thread"))) { return T(EXPRESSION); }; \
        return ::emulator::update(address, EMULATOR_SITE, next); \
    } \
    template <class T, class V> T NAME##_block(T* address, V operand, EMULATOR_CALLER) { \
        return NAME(address, operand, file, line); \
    } \
    template <class T, class V> T NAME##_system(T* address, V operand, EMULATOR_CALLER) { \
        return NAME(address, operand, file, line); \
    }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
EMULATOR_ATOMIC(atomicMax, value > old ? value : old)
EMULATOR_ATOMIC(atomicAnd, old & value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)

template <class T, class V> T atomicCAS(T* address, V compare, V operand, EMULATOR_CALLER) {
    T expected = T(compare), value = T(operand);
    auto next = [=](T old) __attribute__((no_sanitize("thread"))) {
        return old == expected ? value : old;
    };
    return ::emulator::update(address, EMULATOR_SITE, next);
}
