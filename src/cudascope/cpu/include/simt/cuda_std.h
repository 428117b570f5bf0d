// cuda::std and what thrust has for a kernel: the host's standard library by these names. A tuple has NVIDIA's layout:
// its elements are in memory in their order.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cassert>
#include <chrono>
#include <complex>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <optional>
#include <ratio>
#include <string_view>
#include <tuple>
#include <variant>

#include "../cuda/functional"

namespace cuda {
template <class A, class B>
SIMT_METHOD constexpr auto ceil_div(A a, B b) { return a / b + (a % b != 0); }
}  // namespace cuda

namespace cuda::std {
using namespace ::std;
using ::std::get;

template <size_t I, class T>
struct tuple_leaf { T value; };
template <class Places, class... T>
struct tuple_leaves;
template <size_t... I, class... T>
struct tuple_leaves<::std::index_sequence<I...>, T...> : tuple_leaf<I, T>... {
    tuple_leaves() = default;
    template <class... U>
    SIMT_METHOD constexpr explicit tuple_leaves(int, U&&... values)
        : tuple_leaf<I, T>{T(::std::forward<U>(values))}... {}
    template <class Other>
    SIMT_METHOD constexpr void assign(Other&& other) { ((tuple_leaf<I, T>::value = get<I>(other)), ...); }
    SIMT_METHOD constexpr ::std::tuple<const T&...> values() const { return {tuple_leaf<I, T>::value...}; }
};

template <class... T>
struct tuple : tuple_leaves<::std::index_sequence_for<T...>, T...> {
    using leaves = tuple_leaves<::std::index_sequence_for<T...>, T...>;
    tuple() = default;
    tuple(const tuple&) = default;
    template <class... U, class = ::std::enable_if_t<
        sizeof...(U) == sizeof...(T) && (::std::is_constructible_v<T, U&&> && ...)>>
    SIMT_METHOD constexpr tuple(U&&... values) : leaves(0, ::std::forward<U>(values)...) {}
    template <class... U, class = ::std::enable_if_t<sizeof...(U) == sizeof...(T)>>
    SIMT_METHOD constexpr tuple(const tuple<U...>& other) : tuple(other, ::std::index_sequence_for<T...>{}) {}
    SIMT_METHOD constexpr tuple& operator=(const tuple& other) { return leaves::assign(other), *this; }
    template <class Other>
    SIMT_METHOD constexpr tuple& operator=(const Other& other) { return leaves::assign(other), *this; }
    template <class... U>
    SIMT_METHOD constexpr bool operator==(const tuple<U...>& b) const { return leaves::values() == b.values(); }
    template <class... U>
    SIMT_METHOD constexpr bool operator!=(const tuple<U...>& b) const { return leaves::values() != b.values(); }
    template <class... U>
    SIMT_METHOD constexpr bool operator<(const tuple<U...>& b) const { return leaves::values() < b.values(); }
    template <class... U>
    SIMT_METHOD constexpr bool operator>(const tuple<U...>& b) const { return leaves::values() > b.values(); }

private:
    template <class Other, size_t... I>
    SIMT_METHOD constexpr tuple(const Other& other, ::std::index_sequence<I...>) : leaves(0, get<I>(other)...) {}
};
template <class... T>
tuple(T...) -> tuple<T...>;

template <size_t I, class... T>
using tuple_nth = ::std::tuple_element_t<I, ::std::tuple<T...>>;
template <size_t I, class... T>
SIMT_METHOD constexpr tuple_nth<I, T...>& get(tuple<T...>& all) {
    return static_cast<tuple_leaf<I, tuple_nth<I, T...>>&>(all).value;
}
template <size_t I, class... T>
SIMT_METHOD constexpr const tuple_nth<I, T...>& get(const tuple<T...>& all) {
    return static_cast<const tuple_leaf<I, tuple_nth<I, T...>>&>(all).value;
}
template <size_t I, class... T>
SIMT_METHOD constexpr tuple_nth<I, T...>&& get(tuple<T...>&& all) {
    return static_cast<tuple_nth<I, T...>&&>(get<I>(all));
}
template <class... T>
SIMT_METHOD constexpr tuple<::std::decay_t<T>...> make_tuple(T&&... values) { return {::std::forward<T>(values)...}; }
template <class... T>
SIMT_METHOD constexpr tuple<T&...> tie(T&... values) { return {values...}; }
}  // namespace cuda::std

template <class... T>
struct std::tuple_size<cuda::std::tuple<T...>> : std::integral_constant<size_t, sizeof...(T)> {};
template <size_t I, class... T>
struct std::tuple_element<I, cuda::std::tuple<T...>> { using type = cuda::std::tuple_nth<I, T...>; };

namespace thrust {
using cuda::maximum, cuda::minimum;
using cuda::std::get, cuda::std::make_tuple, cuda::std::tie, cuda::std::tuple;
using std::bit_and, std::bit_or, std::bit_xor, std::divides, std::equal_to, std::greater, std::greater_equal, std::less;
using std::less_equal, std::logical_and, std::logical_not, std::logical_or, std::minus, std::modulus, std::multiplies;
using std::negate, std::not_equal_to, std::plus;
using std::make_pair, std::max, std::min, std::pair, std::swap, std::tuple_element, std::tuple_size;
template <class T = void>
struct identity {
    template <class A>
    SIMT_METHOD constexpr const A& operator()(const A& a) const { return a; }
};
template <class T = void>
struct square {
    template <class A>
    SIMT_METHOD constexpr A operator()(const A& a) const { return a * a; }
};
using std::abs, std::arg, std::complex, std::conj, std::cos, std::cosh, std::exp, std::log, std::log10, std::norm;
using std::polar, std::pow, std::proj, std::sin, std::sinh, std::sqrt, std::tan, std::tanh;
}  // namespace thrust
