// CUDA C++ for a machine without a GPU: what a kernel may use, said in plain C++.
//
// cpu/build.py puts this header in front of an unmodified .cu file and compiles it with g++ or clang++. A thread of
// CUDA becomes a fiber; runtime.cpp runs the fibers of a thread block on one OS thread. Every access to memory
// calls a hook of the runtime when the file is compiled with -fsanitize=thread, with no change to the kernel.
#pragma once

#include "simt/atomics.h"
#include "simt/half.h"
#include "simt/language.h"
#include "simt/mathematics.h"
#include "simt/orders.h"
#include "simt/ptx.h"
#include "simt/shifts.h"
#include "simt/threads.h"
#include "simt/warp.h"
#include "simt/words.h"

namespace simt {
template <class... P, size_t... I>
SIMT_UNSEEN void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<P>*)arguments[I]...);
}
template <class... P>
SIMT_UNSEEN void call(void (*kernel)(P...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<P...>{});
}

// A parameter's type, as the compiler knows it. The size is that of the object that a pointer points to; 0: unknown.
struct Parameter { const char* type; uint64_t bytes, alignment; };
template <class T>
constexpr const char* type_name() { return __PRETTY_FUNCTION__; }
template <class T, class = void>
struct Known { static constexpr uint64_t bytes = 0, alignment = 1; };
template <class T>
struct Known<T, std::void_t<decltype(sizeof(T))>> { static constexpr uint64_t bytes = sizeof(T), alignment = alignof(T); };
template <class T, bool is_enum = std::is_enum_v<T>>
struct Number { using type = T; };
template <class T>
struct Number<T, true> { using type = std::underlying_type_t<T>; };
template <class P>
constexpr Parameter parameter() {
    using T = std::remove_pointer_t<P>;
    return {type_name<typename Number<P>::type>(), Known<T>::bytes, Known<T>::alignment};
}
template <class... P>
const Parameter* parameters(void (*)(P...)) {
    static constexpr Parameter list[] = {parameter<P>()..., {nullptr, 0, 0}};
    return list;
}
}  // namespace simt
#define SIMT_ENTRY(symbol, ...)                                                                          \
    extern "C" SIMT_UNSEEN void symbol(void** arguments) { simt::call(__VA_ARGS__, arguments); }         \
    extern "C" const simt::Parameter* symbol##_parameters() { return simt::parameters(__VA_ARGS__); }

#define __CUDA_ARCH__ 900  // from here on: NVIDIA's own headers are to take the host's way

#include "simt/hidden.h"  // made by build.py: half and its like need their header from here on, as with nvcc
