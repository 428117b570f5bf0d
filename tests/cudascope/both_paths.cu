// Sources for test_both_paths.py. A line of four slashes begins a source, and says what becomes of it.
//
// names: both paths take the headers, and each expression of int has the value after the ==
// taken: both take it, and x[0] is 1 after the launch
// lenient: both take it, and nvcc 13 does not
// cpu: NVRTC does not take it; also cpu: likewise, for make test-full
// refused: neither takes it, and the CPU's message has the words after the |
// also refused: likewise, for make test-full

//// names: no header
sizeof(size_t) + sizeof(std::size_t) + sizeof(ptrdiff_t) + sizeof(std::ptrdiff_t) == 32
sizeof(std::byte) + (std::nullptr_t() == nullptr) == 2
CHAR_BIT + (INT_MAX > 0) + (UINT_MAX > 0) + (LLONG_MAX > ULONG_MAX / 4) == 11
int(INFINITY > 1) + (HUGE_VALF > 1) + int(M_PI) + int(10 * M_SQRT1_2) == 12
int(sqrtf(9.f) + std::sqrt(9.f) + std::abs(-3.f) + abs(-3) + std::exp(0.f)) == 13
std::isnan(0.f) + isinf(0.f) + int(std::fmax(0.f, 2.f)) + min(-3, 3) + std::min(4, 3) + std::max(4, 3) == 6
std::is_same_v<int, int> + std::is_same<int, int>::value + std::conditional_t<true, int, float>(3.5) == 5
std::integral_constant<int, 3>::value + std::true_type::value + std::is_integral_v<int> == 5
std::enable_if_t<true, int>(3) + std::decay_t<const int&>(3) + std::remove_const_t<const int>(3) == 9
std::is_floating_point_v<float> + std::is_trivially_copyable_v<float> + std::is_void_v<std::void_t<int>> == 3
sizeof(std::make_unsigned_t<int>) + sizeof(decltype(std::declval<int>())) == 8
std::numeric_limits<int>::max() - INT_MAX + (std::numeric_limits<float>::infinity() > 1) == 1
std::pair<int, int>(1, 2).second + std::make_index_sequence<3>::size() + std::move(1) + std::forward<int>(1) == 7
sizeof(uint) + sizeof(ushort) + sizeof(ulong) + (NULL == nullptr) + int(make_float4(1, 2, 3, 4).w) == 19
dim3(1, 2, 3).z + cudaSuccess + sizeof(cudaError_t) + (cudaStream_t(0) == 0) == 8

//// names: cstdint stdint.h climits limits.h cfloat float.h cstddef stddef.h cmath math.h
uint8_t(259) + uint32_t(3) + int64_t(3) + std::uint32_t(3) + std::int64_t(3) + std::uint8_t(259) == 18
INT32_MAX - INT_MAX + (UINT64_MAX >> 60) + INT64_C(5) + (SIZE_MAX >> 60) + UINT8_MAX - INT8_MIN == 418
sizeof(int_fast32_t) + sizeof(std::uint_least16_t) + sizeof(intmax_t) + sizeof(std::uintptr_t) == 26
std::is_same_v<int64_t, long> + std::is_same_v<uint64_t, unsigned long> == 2
CHAR_BIT + SHRT_MAX + SHRT_MIN + UCHAR_MAX + (CHAR_MIN == SCHAR_MIN) + (LONG_MAX == LLONG_MAX) == 264
(FLT_MAX > 1) + int(FLT_EPSILON * 8388608) + (DBL_EPSILON > 0) + (DBL_MIN > 0) + FLT_DIG + FLT_MANT_DIG == 34
offsetof(int2, y) + (sizeof(std::max_align_t) > 8) + sizeof(std::size_t) == 13
int(std::floor(2.5f) + std::pow(2.f, 3.f) + fabsf(-1.f) + std::fma(1.f, 2.f, 3.f)) == 16

//// names: type_traits limits utility algorithm array tuple functional numeric optional complex initializer_list cuda/std/type_traits cuda/std/limits cstdint
std::is_same_v<int, int> + std::numeric_limits<short>::max() + std::pair<int, int>(1, 2).first == 32769
std::clamp(x[15], 3, 5) + std::array<int, 3>{1, 2, 3}[2] + std::get<1>(std::tuple<int, int>(1, 2)) == 8
std::plus<int>()(1, 2) + *std::optional<int>(4) + int(std::complex<float>(1, 2).imag()) == 9
std::initializer_list<int>({1, 2}).size() == 2
cuda::std::is_same_v<int64_t, long> + cuda::std::numeric_limits<short>::max() + std::is_same_v<int, int> == 32769

//// names: cuda_fp16.h
int(float(half(3.f)) + __half2float(__float2half(3.f)) + __low2float(half2(half(3.f), half(4.f)))) == 9

//// names: cuda_bf16.h
int(float(nv_bfloat16(3.f)) + __bfloat162float(__float2bfloat16(3.f)) + float(half(3.f))) == 9

//// names: cuda_fp8.h
int(float(__nv_fp8_e4m3(3.f)) + float(half(3.f)) + float(__nv_bfloat16(3.f))) == 9

//// names: mma.h
int(float(half(3.f)) + float(__nv_bfloat16(3.f))) == 6

//// names: cooperative_groups.h
int(float(half(3.f))) + cooperative_groups::this_thread_block().size() == 4

//// names: thrust/complex.h thrust/extrema.h thrust/functional.h thrust/pair.h thrust/swap.h thrust/tuple.h
int(thrust::abs(thrust::complex<float>(3, 4)) + thrust::norm(thrust::complex<float>(1, 2))) == 10
thrust::max(3, 4) - thrust::min(3, 4) + thrust::plus<int>()(1, 2) + thrust::make_pair(1, 2).second == 6
(thrust::swap(x[14], x[15]), thrust::get<1>(thrust::make_tuple(1, 2))) == 2

//// names: cub/cub.cuh
int(float(half(3.f))) + sizeof(cub::BlockReduce<int, 32>::TempStorage) / 1024 == 3

//// taken: assert and printf
#include <cassert>
#include <cstdio>
__global__ void k(int* x) {
    assert(x[0] == 0); printf("%d", 7); std::printf("7"); x[0] = 1;
}

//// taken: C's headers
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
__global__ void k(int* x) {
    int n = 3; memcpy(x, &n, 4); int* p = (int*)malloc(4); free(p); x[0] -= 2;
}

//// taken: C++'s headers
#include <cstring>
#include <cstdlib>
#include <ctime>
#include <iterator>
#include <ratio>
#include <chrono>
__global__ void k(int* x) { int n = 1; std::memcpy(x, &n, 4); }

//// taken: host code and its headers
#include <iostream>
#include <vector>
#include <string>
#include <fstream>
#include <thread>
void host() { std::vector<int> v; std::cout << std::string("a"); throw 1; }
__global__ void k(int* x) { x[0] = 1; }

//// taken: host code that calls thrust and cub
#include <cub/device/device_reduce.cuh>
#include <thrust/device_vector.h>
#include <thrust/scan.h>
__global__ void k(int* x) { x[0] = 1; }
int main() {
    thrust::device_vector<int> v(4);
    thrust::inclusive_scan(v.begin(), v.end(), v.begin());
    k<<<1, 1>>>(thrust::raw_pointer_cast(v.data()));
    size_t bytes = 0;
    cub::DeviceReduce::Sum(nullptr, bytes, v.begin(), v.begin(), 4);
}

//// taken: things with the names of a thread's indices
struct P { int gridDim; float threadIdx; };
__device__ int f(dim3 blockDim, int warpSize) { return blockDim.x + warpSize; }
__global__ void k(int* x) {
    P p{3, 0.5f};
    int blockIdx = 2;
    x[0] = p.gridDim + f(dim3(4), 1) - blockIdx - int(p.threadIdx) - f(blockDim, 4);
}

//// taken: a launch by the host
__global__ void k(int* x) { x[0] = 1; }
int main() { int* x; cudaMalloc(&x, 4); k<<<1, 1>>>(x); cudaDeviceSynchronize(); }

//// taken: cuBLAS brings bfloat16
#include <cublas_v2.h>
#include <cublasLt.h>
typedef __nv_bfloat16 floatX;
__global__ void k(int* x) { x[0] = float(floatX(1.f)); }

//// taken: #pragma once and unroll
#pragma once
constexpr int N = 4;
__global__ void k(int* x) {
#pragma unroll
for (int i = 0; i < 2; i++) x[0] += i;
#pragma unroll N
for (int i = 0; i < 2; i++) x[0] += 0;
_Pragma("unroll") for (int i = 0; i < 2; i++) x[0] += 0; }

//// taken: namespaces
namespace { __device__ int f() { return 1; } }
namespace a::b { __device__ int f() { return 0; } }
inline namespace v { __device__ int g() { return 0; } }
namespace c = a::b;
__global__ void k(int* x) { x[0] = f() + c::f() + g(); }

//// taken: static, inline and extern C
static __device__ int f() { return 1; }
inline __device__ int g() { return 0; }
extern "C" {
__global__ void k(int* x) { x[0] = f() + g(); }
}

//// taken: constexpr functions
constexpr int f(int a) { return a + 1; }
template <class T> constexpr T g(T a) { return a; }
struct S { int a; constexpr S(int a) : a(a) {} constexpr int get() const { return a; } };
__global__ void k(int* x) { x[0] = g(f(x[0])) + S(0).get(); }

//// taken: lambdas
__global__ void k(int* x) {
    auto f = [&](int i) { x[0] = i; }; auto g = [=](auto i) { return i + 1; }; constexpr auto h = [](int i) {
    return i; };
static_assert(h(2) == 2); f(g(0));
}

//// taken: templates
template <class T = int, int N = 3> __device__ int f() { return N; }
template <class T> struct S { static constexpr int n = 1; };
template <class T> struct S<T*> { static constexpr int n = 2; };
template <class... T> __device__ int sum(T... t) { return (t + ... + 0); }
template <int N> __device__ int g() { if constexpr (N > 2) return 1; else return 2; }
template <class T> using V = T;
__global__ void k(int* x) {
    x[0] = f() - S<int*>::n * S<int>::n + sum(1, 2) - g<3>() - V<int>(2);
}

//// taken: SFINAE
template <class T, std::enable_if_t<std::is_integral<T>::value, int> = 0> __device__ int f(T) { return 1; }
template <class T, std::enable_if_t<!std::is_integral<T>::value, int> = 0> __device__ int f(T) { return 2; }
__global__ void k(int* x) { x[0] = f(1); }

//// taken: overloads of long and long long
#include <cstdint>
__device__ int f(long) { return 1; }
__device__ int f(long long) { return 2; }
__global__ void k(int* x) { x[0] = f(std::int64_t(1)); }

//// taken: unions, bit fields and bindings
struct S { unsigned a : 3, b : 5; union { float f; int i; }; };
struct P { int a, b; };
__global__ void k(int* x) {
    S s{1, 9}; s.i = 0; auto [a, b] = P{1, 2}; if (int n = s.b + s.i; n > 2) x[0] = b - a;
}

//// taken: classes
struct A { __device__ virtual int f() { return 1; } };
struct B : A { __device__ int f() override { return 2; } };
template <class T> struct C { T a; __device__ C(T a) : a(a) {} };
__global__ void k(int* x) {
    B b; A* a = &b; C c(1); x[0] = a->f() - c.a;
}

//// taken: qualifiers
[[nodiscard]] __device__ auto f() { return 1; }
__forceinline__ __device__ int g() { return 0; }
__noinline__ __device__ int h() { return 0; }
__constant__ int n[2] = {0, 1};
const int one = 0;
__global__ void k(int* __restrict__ x) { __shared__ alignas(16) int t[4]; t[0] = g() + h();
    x[0] = f() + t[0] + one + n[x[0]]; }

//// taken: memory, recursion and pointers
__device__ int f(int n) { return n ? f(n - 1) : 1; }
__global__ void k(int* x) {
    int* p = new int(3); delete p; int (*g)(int) = f; goto end; x[0] = 2; end: x[0] = g(2);
}

//// taken: 128 bits
__global__ void k(int* x) { __int128 n = 1; x[0] = n; }

//// taken: types of the source's own
struct half { int a; };
typedef unsigned short __nv_bfloat16;
__global__ void k(int* x) {
    int half2 = 0; x[0] = half{1}.a + __nv_bfloat16(0) + half2;
}

//// taken: functions of the source's own
__device__ float clamp(float a) { return a > 1 ? 1 : a; }
struct R { __device__ int puts() { return 0; } };
__device__ int rand(int a) { return a; }
__global__ void k(int* x) {
    x[0] = clamp(3.f) + R().puts() + rand(0);
}

//// taken: a host's constructors that no kernel calls
#include <string>
using std::string;
struct Config { int n; };
struct S {
    int a;
    S() = default;
    S(int n, int m) : a(n * m) {}
    S(const std::string& s) : a(3) {}
    S(const string& s, int n) : a(n) {}
    S(Config config) : a(config.n) {}
};
__global__ void k(int* x) { S s; s.a = 1; x[0] = s.a; }

//// lenient: numbers
__global__ void k(int* x) {
    uint8_t a = 1; x[0] = a + std::uint32_t(3) * (INT32_MAX < 0) * (FLT_MAX < 0);
}

//// lenient: printf and assert
__global__ void k(int* x) {
    assert(x[0] == 0); printf("%d", x[0]); x[0] = 1;
}

//// lenient: a constant array
const int n[2] = {1, 2};
__global__ void k(int* x) { x[0] = n[x[0]]; }

//// cpu: a statement expression
__global__ void k(int* x) { x[0] = ({ int a = 1; a; }); }

//// cpu: __builtin_popcount
__global__ void k(int* x) { x[0] = __builtin_popcount(1); }

//// cpu: __GNUC__
#ifndef __GNUC__
#error it is wanted
#endif
__global__ void k(int* x) { x[0] = 1; }

//// cpu: constants of a class template whose type is an argument
template <class T, int N> struct A {
    using S = T;
    static const T x = 1.5f, y = 1;
    S const static z{0.25};
    struct In { static const S w = 2; };
    static const int n = 3;
public:
    static const T v = 4;
};
template <class T> struct A<T, 2> { static const T x = 0.5f; };
__global__ void k(int* x) {
    float sum = A<float, 1>::x + A<float, 1>::y + A<double, 1>::z + A<float, 1>::In::w + A<float, 2>::x;
    x[0] = sum == 5.25f && A<int, 1>::x + A<float, 1>::n == 4 && A<float, 1>::v == 4;
}

//// refused: a constant of a class | ‘constexpr’ needed
struct A {
    static const float x = 1.5f;
};
__global__ void k(int* x) { x[0] = A::x > 1; }

//// refused: a constant of a class template whose type is no argument | ‘constexpr’ needed
template <class T> struct A {
    int x;
public:
    static const float y = 1.5f;
};
__global__ void k(int* x) { x[0] = A<int>::y > 1; }

//// refused: half without its header | half_needs_include_cuda_fp16_h
__global__ void k(int* x) { half h = 3.f; x[0] = float(h); }

//// refused: bfloat16 with the header of half | needs_include_cuda_bf16_h
#include <cuda_fp16.h>
__global__ void k(int* x) { __nv_bfloat16 h; }

//// refused: fp8 with the header of bfloat16 | needs_include_cuda_fp8_h
#include <cuda_bf16.h>
__global__ void k(int* x) { __nv_fp8_e4m3 h; }

//// also refused: half in a parameter | half_needs_include_cuda_fp16_h
#include <cuda_runtime.h>
__global__ void k(half* x) { }

//// refused: a host's function | f is for the host only: declare a function __device__
int f() { return 1; }
__global__ void k(int* x) { x[0] = f(); }

//// also refused: a host's template | f is for the host only
template <class T> T f(T a) { return a; }
__global__ void k(int* x) { x[0] = f(1); }

//// refused: a host's method | f is for the host only
struct S { int f() { return 1; } };
__global__ void k(int* x) { S s; x[0] = s.f(); }

//// also refused: a host's constructor | S is for the host only
struct S { int a; S() { a = 1; } };
__global__ void k(int* x) { S s; x[0] = s.a; }

//// refused: a host's constructor of one number | S is for the host only
struct S { int a; S(int n) : a(2 * n) {} };
__global__ void k(int* x) { S s{5}; x[0] = s.a; }

//// refused: a host's variable | n is for the host only
int n = 1;
__global__ void k(int* x) { x[0] = n; }

//// refused: std::sort | k.cu:2: error: std::sort is for host code only
#include <algorithm>
__global__ void k(int* x) { std::sort(x, x + 2); }

//// also refused: std::vector | std::vector is for host code only
#include <vector>
__global__ void k(int* x) { std::vector<int> v(3); x[0] = v.size(); }

//// also refused: std::cout | std::cout is for host code only
#include <iostream>
__global__ void k(int* x) { std::cout << 1; }

//// refused: rand | rand() is for host code only
#include <cstdlib>
__global__ void k(int* x) { x[0] = rand(); }

//// also refused: exit | exit() is for host code only
#include <cstdlib>
__global__ void k(int* x) { if (x[0]) exit(1); }

//// also refused: std::puts | std::puts is for host code only
#include <cstdio>
__global__ void k(int* x) { std::puts("a"); }

//// refused: throw | throw is not allowed in device code
__global__ void k(int* x) { if (x[0]) throw 1; }

//// also refused: try | try is not allowed in device code
__global__ void k(int* x) { try { x[0] = 1; } catch (...) {} }

//// also refused: typeid | typeid is not allowed in device code
#include <typeinfo>
__global__ void k(int* x) { x[0] = typeid(int) == typeid(x[0]); }

//// also refused: dynamic_cast | dynamic_cast is not
struct A { __device__ virtual void f() {} };
struct B : A {};
__global__ void k(int* x) {
    B b; A* a = &b; x[0] = dynamic_cast<B*>(a) != 0;
}

//// also refused: thread_local | thread_local is not allowed in device code
__global__ void k(int* x) { thread_local int n; x[0] = n; }

//// refused: an array of variable length | variable length array
__global__ void k(int* x) {
    int n = x[0] + 1; int a[n]; a[0] = 1; x[0] = a[0];
}

//// refused: an initialiser of shared memory | a __shared__ variable cannot have an initialiser
__global__ void k(int* x) { __shared__ int t[4] = {1}; x[0] = t[0]; }

//// also refused: a name that nobody declares | undeclared
__global__ void k(int* x) { x[0] = undeclared; }

//// also refused: a missing semicolon | expected
__global__ void k(int* x) { x[0] = 1 }

//// also refused: restrict | expected
__global__ void k(int* restrict x) { }

//// also refused: std::array without its header | array
__global__ void k(int* x) {
    std::array<int, 3> a{1, 2, 3}; x[0] = a[2];
}

//// also cpu: a specialisation of a std template
struct P {};
namespace std { template <> struct numeric_limits<P> { static constexpr int digits = 1; }; }
__global__ void k(int* x) { x[0] = std::numeric_limits<P>::digits; }
