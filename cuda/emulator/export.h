// The descriptor of a kernel, and a function that calls the kernel: Python needs both to launch it.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace emulator {

// library.py has the same structure. kind: p pointer, i signed, u unsigned, f float, b bool, V other.
struct Parameter {
    size_t size;
    char kind, pointee_kind;
    size_t pointee_size;  // in bytes; 0 for void and for parameters that are not pointers
};

template <class T> constexpr char kind_of() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, bool>) return 'b';
    if (std::is_floating_point_v<T>) return 'f';
    if (std::is_integral_v<T> || std::is_enum_v<T>) return std::is_signed_v<T> ? 'i' : 'u';
    return 'V';
}

template <class T> constexpr Parameter describe() {
    using Pointee = std::remove_cv_t<std::remove_pointer_t<T>>;
    size_t size = 0;
    if constexpr (std::is_pointer_v<T> && !std::is_void_v<Pointee>) size = sizeof(Pointee);
    return {sizeof(T), kind_of<T>(), kind_of<Pointee>(), size};
}

template <auto kernel> struct Export;
template <class... P, void (*kernel)(P...)> struct Export<kernel> {
    static constexpr Parameter parameters[sizeof...(P) + 1] = {describe<P>()..., {0, 0, 0, 0}};
    // Not instrumented, because Python writes the array of arguments: it is not memory of the kernel.
    template <size_t... I>
    __attribute__((no_sanitize("thread"))) static void call(
        void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
    }
    static void body(void** arguments) { call(arguments, std::index_sequence_for<P...>()); }
};

struct Descriptor {
    const Parameter* parameters;
    size_t count;
    void (*body)(void**);
    void (*kernel)();
};

template <auto kernel> struct Describe;
template <class... P, void (*kernel)(P...)> struct Describe<kernel> {
    inline static const Descriptor descriptor = {
        Export<kernel>::parameters, sizeof...(P), Export<kernel>::body,
        reinterpret_cast<void (*)()>(kernel)};
};

}  // namespace emulator

#define EMULATOR_EXPORT(NUMBER, ...) \
    extern "C" __attribute__((visibility("default"))) const ::emulator::Descriptor* \
        emulator_kernel_##NUMBER() { \
        return &::emulator::Describe<&__VA_ARGS__>::descriptor; \
    }
