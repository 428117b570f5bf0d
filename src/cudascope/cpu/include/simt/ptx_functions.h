// The functions that a PTX module calls: its own, and those of every CUDA program, printf and malloc among them.
#pragma once

#include "ptx_memory.h"

namespace simt::ptx {

using Function = void(char* const* passed);  // where the result is, and then each parameter

template <class T>
SIMT_INLINE T passed_at(char* const* passed, int i) { return parameter<T>(passed[i]); }

// vprintf(format, arguments): the arguments lie one after another, each aligned to its size.
inline SIMT_NOINLINE int print(const char* format, const char* arguments) {
    int count = 0;
    const char* at = arguments;
    auto next = [&](auto kind) {
        using T = decltype(kind);
        at = arguments + (at - arguments + sizeof(T) - 1) / sizeof(T) * sizeof(T) + sizeof(T);
        return ++count, parameter<T>(at - sizeof(T));
    };
    while (*format) {
        char piece[256];
        size_t n = 0;
        auto take = [&] { if (n + 1 < sizeof(piece)) piece[n++] = *format; ++format; };
        if (*format != '%') {
            while (*format && *format != '%') {
                take();
                if (n + 1 == sizeof(piece)) break;
            }
            piece[n] = 0, simt_printf("%s", piece);
            continue;
        }
        take();
        int stars[2] = {0, 0}, num_stars = 0;
        bool wide = false;
        for (; *format && __builtin_strchr("-+ #0123456789.*hlLqjzt", *format); take()) {
            if (*format == '*' && num_stars < 2) stars[num_stars++] = next(int{});
            wide |= __builtin_strchr("lLqjzt", *format) != nullptr;
        }
        char conversion = *format;
        if (!conversion) return count;
        take(), piece[n] = 0;
        auto print_one = [&](auto value) {
            if (num_stars == 2) simt_printf(piece, stars[0], stars[1], value);
            else if (num_stars) simt_printf(piece, stars[0], value);
            else simt_printf(piece, value);
        };
        if (conversion == '%') simt_printf("%%");
        else if (conversion == 's' || conversion == 'p') print_one(next((const char*)nullptr));
        else if (__builtin_strchr("aAeEfFgG", conversion)) print_one(next(double{}));
        else if (wide) print_one(next(0ll));
        else print_one(next(int{}));
    }
    return count;
}
SIMT_INLINE void device_vprintf(char* const* passed) {
    set_parameter(passed[0], print(passed_at<const char*>(passed, 1), passed_at<const char*>(passed, 2)));
}
SIMT_INLINE void device_assertfail(char* const* passed) {  // message, file, line, function, size of a character
    char message[512];
    __builtin_snprintf(message, sizeof(message), "assertion failed: %s", passed_at<const char*>(passed, 0));
    simt_fail(message);
}
SIMT_INLINE void device_malloc(char* const* passed) {
    set_parameter(passed[0], malloc(passed_at<size_t>(passed, 1)));
}
SIMT_INLINE void device_free(char* const* passed) { free(passed_at<void*>(passed, 0)); }
}  // namespace simt::ptx
