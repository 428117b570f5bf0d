// Kernels that use cuda::std, thrust and cuRAND.
#include <cuda/cmath>
#include <cuda/std/array>
#include <cuda/std/complex>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
#include <curand_kernel.h>
#include <thrust/functional.h>
#include <thrust/pair.h>
#include <thrust/tuple.h>

using Triple = thrust::tuple<char, float, short>;
static_assert(sizeof(Triple) == 12 && sizeof(thrust::pair<int, char>) == 8);

__global__ void standard(const Triple* in, float* out, Triple* changed) {
    cuda::std::array<float, 3> three{1, 2, 3};
    auto [letter, number, small] = in[1];
    out[0] = three[2] + letter, out[1] = number, out[2] = small;
    cuda::std::complex<float> z(1, 2);
    out[3] = (z * z).real();
    out[4] = cuda::std::numeric_limits<float>::max();
    out[5] = cuda::ceil_div(9, 4) + cuda::std::max(1, 5);
    float a = 0;
    int b = 0;
    cuda::std::tie(a, b) = cuda::std::make_tuple(1.5f, 4);
    out[6] = a + b;
    out[7] = thrust::plus<float>()(1, 2) + thrust::maximum<int>()(7, 3) + thrust::multiplies<>()(2, 0.5f);
    auto pair = thrust::make_pair(3, 0.25f);
    out[8] = pair.first + pair.second;
    auto first = thrust::make_tuple(1, 2.f), second = thrust::make_tuple(1, 3.f);
    out[9] = (first < second) + 10 * (first == second) + 100 * (second > first);
    thrust::get<1>(changed[0]) = 9;
    changed[1] = Triple('c', 2.f, 3);
    cuda::std::swap(out[8], out[9]);
    if constexpr (cuda::std::is_same_v<thrust::tuple_element<2, Triple>::type, short>) out[10] = 1;
}

template <class State>
__device__ void draw(State& state, const unsigned long long* from, unsigned* bits, float* uniform, double* doubles) {
    curand_init(from[0], from[1], from[2], &state);
    for (int i = 0; i < 6; ++i) bits[i] = curand(&state);
    for (int i = 0; i < 3; ++i) uniform[i] = curand_uniform(&state);
    for (int i = 0; i < 3; ++i) doubles[i] = curand_uniform_double(&state);
    for (int i = 0; i < 3; ++i) uniform[3 + i] = curand_normal(&state);
    for (int i = 0; i < 3; ++i) doubles[3 + i] = curand_normal_double(&state);
    for (int i = 0; i < 3; ++i) uniform[6 + i] = curand_log_normal(&state, 0.5f, 0.25f);
    skipahead(12345678901ull, &state);
    bits[6] = curand(&state);
    skipahead_sequence(77, &state);
    bits[7] = curand(&state);
}
// A state of each generator; for each of them [8] bits, [9] uniform and [6] doubles.
__global__ void generators(const unsigned long long* from, unsigned* bits, float* uniform, double* doubles) {
    curandState_t xorwow;
    draw(xorwow, from, bits, uniform, doubles);
    curandStatePhilox4_32_10_t philox;
    draw(philox, from, bits + 8, uniform + 9, doubles + 6);
    curandStateMRG32k3a_t mrg;
    draw(mrg, from, bits + 16, uniform + 18, doubles + 12);
    uint4 four = curand_Philox4x32_10(uint4{0, 0, 0, 0}, uint2{0, 0});
    bits[24] = four.x, bits[25] = four.y, bits[26] = four.z, bits[27] = four.w;
    bits[28] = sizeof(xorwow), bits[29] = sizeof(philox), bits[30] = sizeof(mrg);
}
// State i continues where state 0 is after i steps; curand4 takes what four calls of curand take.
__global__ void steps(unsigned* out) {  // [6, 8]
    curandState_t a, b;
    curandStatePhilox4_32_10_t c, d;
    curandStateMRG32k3a_t e, f;
    curand_init(5, 3, 0, &a), curand_init(5, 3, threadIdx.x, &b);
    curand_init(5, 3, 0, &c), curand_init(5, 3, threadIdx.x, &d);
    curand_init(5, 3, 0, &e), curand_init(5, 3, threadIdx.x, &f);
    for (int i = 0; i < threadIdx.x; ++i) curand(&a), curand(&c), curand(&e);
    unsigned* own = out + threadIdx.x;
    own[0] = curand(&a), own[8] = curand(&b), own[24] = curand(&d), own[32] = curand(&e), own[40] = curand(&f);
    uint4 four = curand4(&c);
    own[16] = four.x;
}
