// cuRAND's device side: XORWOW, Philox4x32-10 and MRG32k3a, with cuRAND's states, seeds and conversions.
//
// Written from the publications: Marsaglia 2003 (xorwow); Salmon, Moraes, Dror, Shaw 2011 (Philox); L'Ecuyer 1999
// (MRG32k3a). The integers and the uniform numbers are cuRAND's, bit for bit. The normal numbers use the host's
// logarithm and sine, so their last bits may differ from a GPU's.
#pragma once

#include "simt.h"

// ---------------------------------------------------------------------------------------------- states

#define SIMT_STATE(name, ...)                                \
    struct name {                                            \
        __VA_ARGS__                                          \
        int boxmuller_flag, boxmuller_flag_double;           \
        float boxmuller_extra;                               \
        double boxmuller_extra_double;                       \
    };                                                       \
    using name##_t = name;
SIMT_STATE(curandStateXORWOW, unsigned d, v[5];)
SIMT_STATE(curandStateMRG32k3a, unsigned s1[3], s2[3];)
// STATE: how much of the output is used up
SIMT_STATE(curandStatePhilox4_32_10, uint4 ctr, output; uint2 key; unsigned STATE;)
#undef SIMT_STATE
using curandState_t = curandStateXORWOW;
using curandState = curandStateXORWOW;

namespace simt::random {
template <class State>
SIMT_METHOD void forget_extra(State* state) {
    state->boxmuller_flag = state->boxmuller_flag_double = 0;
    state->boxmuller_extra = 0;
    state->boxmuller_extra_double = 0;
}

// A step of xorwow is linear over bits: rows[i] is where bit i of v goes to.
struct Bits160 {
    unsigned rows[160][5];
    SIMT_UNSEEN void apply(unsigned* v) const {
        unsigned to[5] = {};
        for (int i = 0; i < 160; ++i)
            if (v[i / 32] >> i % 32 & 1)
                for (int k = 0; k < 5; ++k) to[k] ^= rows[i][k];
        for (int k = 0; k < 5; ++k) v[k] = to[k];
    }
};
SIMT_METHOD void xorwow_step(unsigned* v) {
    unsigned t = v[0] ^ v[0] >> 2;
    v[0] = v[1], v[1] = v[2], v[2] = v[3], v[3] = v[4];
    v[4] = v[4] ^ v[4] << 4 ^ (t ^ t << 1);
}
constexpr int xorwow_sequence = 67, xorwow_powers = xorwow_sequence + 64;  // a sequence is 2 to the 67 steps
// Fills in the step to the power of 2 to the i. Several threads may be at it: all of them store the same values.
SIMT_UNSEEN inline void fill_in(Bits160* power) {
    for (int p = 0; p < xorwow_powers; ++p)
        for (int i = 0; i < 160; ++i) {
            unsigned v[5];
            for (int k = 0; k < 5; ++k) v[k] = p ? power[p - 1].rows[i][k] : k == i / 32 ? 1u << i % 32 : 0;
            if (p) power[p - 1].apply(v);
            else xorwow_step(v);
            for (int k = 0; k < 5; ++k) power[p].rows[i][k] = v[k];
        }
}
SIMT_UNSEEN inline __attribute__((noinline)) void xorwow_jump(unsigned* v, unsigned long long n, int first) {
    static Bits160 power[xorwow_powers];
    static int filled;  // no constructor: another thread may have its turn while this one fills them in
    if (n && !__atomic_load_n(&filled, __ATOMIC_ACQUIRE)) {
        fill_in(power);
        __atomic_store_n(&filled, 1, __ATOMIC_RELEASE);
    }
    for (int i = first; n; ++i, n >>= 1)
        if (n & 1) power[i].apply(v);
}

template <unsigned m>
struct Matrix {  // of integers modulo m
    unsigned at[3][3];
    SIMT_UNSEEN void apply(unsigned* x, int stride = 1) const {
        unsigned long long to[3] = {};
        for (int i = 0; i < 3; ++i)
            for (int k = 0; k < 3; ++k) to[i] = (to[i] + (unsigned long long)at[i][k] * x[k * stride] % m) % m;
        for (int i = 0; i < 3; ++i) x[i * stride] = (unsigned)to[i];
    }
    SIMT_UNSEEN void square() {
        Matrix old = *this;
        for (int column = 0; column < 3; ++column) old.apply(&at[0][column], 3);
    }
    SIMT_UNSEEN void jump(unsigned* s, unsigned long long n, int squarings) const {
        Matrix power = *this;
        for (int i = 0; i < squarings; ++i) power.square();
        for (; n; n >>= 1, power.square())
            if (n & 1) power.apply(s);
    }
};
constexpr unsigned m1 = 4294967087u, m2 = 4294944443u;
constexpr Matrix<m1> step1 = {{{0, 1, 0}, {0, 0, 1}, {m1 - 810728u, 1403580u, 0}}};
constexpr Matrix<m2> step2 = {{{0, 1, 0}, {0, 0, 1}, {m2 - 1370589u, 0, 527612u}}};
SIMT_UNSEEN inline __attribute__((noinline)) void mrg_jump(
    curandStateMRG32k3a* state, unsigned long long n, int first) {
    step1.jump(state->s1, n, first);
    step2.jump(state->s2, n, first);
}
SIMT_METHOD double mrg(curandStateMRG32k3a* state) {  // 1 to m1
    unsigned *a = state->s1, *b = state->s2;
    unsigned long long x = (1403580ull * a[1] + 810728ull * (m1 - a[0])) % m1;
    a[0] = a[1], a[1] = a[2], a[2] = (unsigned)x;
    unsigned long long y = (527612ull * b[2] % m2 + 1370589ull * (m2 - b[0])) % m2;
    b[0] = b[1], b[1] = b[2], b[2] = (unsigned)y;
    return x <= y ? (double)(x + m1 - y) : (double)(x - y);
}

SIMT_METHOD uint4 philox(uint4 c, uint2 key) {
    for (int round = 0; round < 10; ++round) {
        unsigned long long a = 0xd2511f53ull * c.x, b = 0xcd9e8d57ull * c.z;
        c = uint4{(unsigned)(b >> 32) ^ c.y ^ key.x, (unsigned)b, (unsigned)(a >> 32) ^ c.w ^ key.y, (unsigned)a};
        key.x += 0x9e3779b9u, key.y += 0xbb67ae85u;
    }
    return c;
}
// Go on by (high, low) in the counter, a number of 128 bits.
SIMT_METHOD void philox_skip(curandStatePhilox4_32_10* state, unsigned long long low, unsigned long long high) {
    uint4& counter = state->ctr;
    unsigned long long sum = ((unsigned long long)counter.y << 32 | counter.x) + low;
    high += sum < low;
    counter.x = (unsigned)sum, counter.y = (unsigned)(sum >> 32);
    high += (unsigned long long)counter.w << 32 | counter.z;
    counter.z = (unsigned)high, counter.w = (unsigned)(high >> 32);
    state->output = philox(counter, state->key);
}

SIMT_METHOD float uniform(unsigned x) { return (float)x * 0x1p-32f + 0x1p-33f; }
SIMT_METHOD double uniform_double(unsigned x, unsigned y) {
    return (double)(x ^ (unsigned long long)y << 21) * 0x1p-53 + 0x1p-54;
}
// Two normal numbers of a uniform number and of an angle, by Box and Muller.
SIMT_METHOD float2 normal_at(float u, float angle) {
    float length = sqrtf(-2.0f * logf(u));
    return float2{sinf(angle) * length, cosf(angle) * length};
}
SIMT_METHOD float2 normal(unsigned x, unsigned y) {
    constexpr float unit = 2.3283064e-10f * 6.2831855f;
    return normal_at(uniform(x), (float)y * unit + unit / 2);
}
SIMT_METHOD double2 normal_double(double u, double v) {  // v: in turns by half
    double length = sqrt(-2.0 * log(u));
    return double2{sinpi(v) * length, cospi(v) * length};
}
SIMT_METHOD double2 normal_double(unsigned x0, unsigned x1, unsigned y0, unsigned y1) {
    return normal_double(uniform_double(x0, x1), (double)(y0 ^ (unsigned long long)y1 << 21) * 0x1p-52 + 0x1p-53);
}
}  // namespace simt::random

// ---------------------------------------------------------------------------------------------- XORWOW

SIMT_METHOD unsigned curand(curandStateXORWOW* state) {
    simt::random::xorwow_step(state->v);
    return state->v[4] + (state->d += 362437);
}
SIMT_METHOD void skipahead(unsigned long long n, curandStateXORWOW* state) {
    simt::random::xorwow_jump(state->v, n, 0);
    state->d += 362437 * (unsigned)n;
}
SIMT_METHOD void skipahead_sequence(unsigned long long n, curandStateXORWOW* state) {
    simt::random::xorwow_jump(state->v, n, simt::random::xorwow_sequence);
}
SIMT_METHOD void curand_init(
    unsigned long long seed, unsigned long long subsequence, unsigned long long offset, curandStateXORWOW* state) {
    unsigned a = 1099087573u * ((unsigned)seed ^ 0xaad26b49u), b = 2591861531u * ((unsigned)(seed >> 32) ^ 0xf7dcefddu);
    unsigned v[5] = {123456789u + a, 362436069u ^ a, 521288629u + b, 88675123u ^ b, 5783321u + a};
    for (int i = 0; i < 5; ++i) state->v[i] = v[i];
    state->d = 6615241u + a + b;
    skipahead_sequence(subsequence, state);
    skipahead(offset, state);
    simt::random::forget_extra(state);
}

// ---------------------------------------------------------------------------------------------- Philox4x32-10

SIMT_METHOD uint4 curand_Philox4x32_10(uint4 counter, uint2 key) { return simt::random::philox(counter, key); }
SIMT_METHOD uint4 curand4(curandStatePhilox4_32_10* state) {
    uint4 a = state->output;
    simt::random::philox_skip(state, 1, 0);
    uint4 b = state->output;
    switch (state->STATE) {
        case 1: return uint4{a.y, a.z, a.w, b.x};
        case 2: return uint4{a.z, a.w, b.x, b.y};
        case 3: return uint4{a.w, b.x, b.y, b.z};
        default: return a;
    }
}
SIMT_METHOD unsigned curand(curandStatePhilox4_32_10* state) {
    uint4 out = state->output;
    unsigned used = state->STATE;
    unsigned value = used == 0 ? out.x : used == 1 ? out.y : used == 2 ? out.z : out.w;
    state->STATE = (used + 1) % 4;
    if (used == 3) simt::random::philox_skip(state, 1, 0);
    return value;
}
SIMT_METHOD void skipahead(unsigned long long n, curandStatePhilox4_32_10* state) {
    unsigned used = state->STATE + (unsigned)(n % 4);
    state->STATE = used % 4;
    simt::random::philox_skip(state, n / 4 + used / 4, 0);
}
SIMT_METHOD void skipahead_sequence(unsigned long long n, curandStatePhilox4_32_10* state) {
    simt::random::philox_skip(state, 0, n);
}
SIMT_METHOD void curand_init(
    unsigned long long seed, unsigned long long subsequence, unsigned long long offset,
    curandStatePhilox4_32_10* state) {
    state->ctr = uint4{0, 0, 0, 0};
    state->key = uint2{(unsigned)seed, (unsigned)(seed >> 32)};
    state->STATE = 0;
    skipahead_sequence(subsequence, state);
    skipahead(offset, state);
    simt::random::forget_extra(state);
}

// ---------------------------------------------------------------------------------------------- MRG32k3a

SIMT_METHOD unsigned curand(curandStateMRG32k3a* state) {
    return (unsigned)(simt::random::mrg(state) * 1.000000048662);
}
SIMT_METHOD void skipahead(unsigned long long n, curandStateMRG32k3a* state) { simt::random::mrg_jump(state, n, 0); }
SIMT_METHOD void skipahead_subsequence(unsigned long long n, curandStateMRG32k3a* state) {
    simt::random::mrg_jump(state, n, 76);
}
SIMT_METHOD void skipahead_sequence(unsigned long long n, curandStateMRG32k3a* state) {
    simt::random::mrg_jump(state, n, 127);
}
SIMT_METHOD void curand_init(
    unsigned long long seed, unsigned long long subsequence, unsigned long long offset, curandStateMRG32k3a* state) {
    for (int i = 0; i < 3; ++i) state->s1[i] = state->s2[i] = 12345;
    if (seed != 0) {
        unsigned long long x[2] = {(unsigned)seed ^ 0x55555555u, (unsigned)(seed >> 32) ^ 0xaaaaaaaau};
        for (int i = 0; i < 3; ++i) {
            state->s1[i] = (unsigned)(x[i % 2] * 12345 % simt::random::m1);
            state->s2[i] = (unsigned)(x[1 - i % 2] * 12345 % simt::random::m2);
        }
    }
    skipahead_subsequence(subsequence, state);
    skipahead(offset, state);
    simt::random::forget_extra(state);
}

// ---------------------------------------------------------------------------------------------- distributions

SIMT_METHOD float curand_uniform(curandStateXORWOW* state) { return simt::random::uniform(curand(state)); }
SIMT_METHOD float curand_uniform(curandStatePhilox4_32_10* state) { return simt::random::uniform(curand(state)); }
SIMT_METHOD float curand_uniform(curandStateMRG32k3a* state) {
    return (float)(simt::random::mrg(state) * 2.3283065498378288e-10);
}
SIMT_METHOD double curand_uniform_double(curandStateXORWOW* state) {
    unsigned x = curand(state), y = curand(state);
    return simt::random::uniform_double(x, y);
}
SIMT_METHOD double curand_uniform_double(curandStatePhilox4_32_10* state) {  // of 32 bits
    return curand(state) * 0x1p-32 + 0x1p-32;
}
SIMT_METHOD double curand_uniform_double(curandStateMRG32k3a* state) {
    return simt::random::mrg(state) * 2.3283065498378288e-10;
}
SIMT_METHOD float4 curand_uniform4(curandStatePhilox4_32_10* state) {
    uint4 x = curand4(state);
    using simt::random::uniform;
    return float4{uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w)};
}
SIMT_METHOD double2 curand_uniform2_double(curandStatePhilox4_32_10* state) {
    uint4 x = curand4(state);
    return double2{simt::random::uniform_double(x.x, x.y), simt::random::uniform_double(x.z, x.w)};
}

template <class State>
SIMT_METHOD float2 curand_normal2(State* state) {
    unsigned x = curand(state), y = curand(state);
    return simt::random::normal(x, y);
}
SIMT_METHOD float2 curand_normal2(curandStateMRG32k3a* state) {
    float x = curand_uniform(state), angle = curand_uniform(state) * 6.2831855f;
    return simt::random::normal_at(x, angle);
}
SIMT_METHOD float4 curand_normal4(curandStatePhilox4_32_10* state) {
    uint4 x = curand4(state);
    float2 a = simt::random::normal(x.x, x.y), b = simt::random::normal(x.z, x.w);
    return float4{a.x, a.y, b.x, b.y};
}
SIMT_METHOD double2 curand_normal2_double(curandStateXORWOW* state) {
    unsigned x0 = curand(state), x1 = curand(state), y0 = curand(state), y1 = curand(state);
    return simt::random::normal_double(x0, x1, y0, y1);
}
SIMT_METHOD double2 curand_normal2_double(curandStatePhilox4_32_10* state) {
    uint4 x = curand4(state);
    return simt::random::normal_double(x.x, x.y, x.z, x.w);
}
SIMT_METHOD double2 curand_normal2_double(curandStateMRG32k3a* state) {
    double x = curand_uniform_double(state), y = curand_uniform_double(state) * 2.0;
    return simt::random::normal_double(x, y);
}

// Two numbers come at once; the second one is kept for the next call.
#define SIMT_ONE_OF_TWO(name, T, suffix, kept, kind, parameters, pair, converted)       \
    template <class State>                                                              \
    SIMT_METHOD T name parameters {                                                     \
        if (state->boxmuller_flag##suffix == kind) {                                    \
            state->boxmuller_flag##suffix = 0;                                          \
            return state->kept;                                                         \
        }                                                                               \
        auto two = pair(state);                                                         \
        T v = two.y;                                                                    \
        state->kept = converted;                                                        \
        state->boxmuller_flag##suffix = kind;                                           \
        v = two.x;                                                                      \
        return converted;                                                               \
    }
SIMT_ONE_OF_TWO(curand_normal, float, , boxmuller_extra, 1, (State* state), curand_normal2, v)
SIMT_ONE_OF_TWO(
    curand_normal_double, double, _double, boxmuller_extra_double, 1, (State* state), curand_normal2_double, v)
SIMT_ONE_OF_TWO(curand_log_normal, float, , boxmuller_extra, 2, (State* state, float mean, float stddev),
    curand_normal2, expf(mean + stddev * v))
SIMT_ONE_OF_TWO(curand_log_normal_double, double, _double, boxmuller_extra_double, 2,
    (State* state, double mean, double stddev), curand_normal2_double, exp(mean + stddev * v))
#undef SIMT_ONE_OF_TWO

template <class State>
SIMT_METHOD float2 curand_log_normal2(State* state, float mean, float stddev) {
    float2 v = curand_normal2(state);
    return float2{expf(mean + stddev * v.x), expf(mean + stddev * v.y)};
}
SIMT_METHOD float4 curand_log_normal4(curandStatePhilox4_32_10* state, float mean, float stddev) {
    float4 v = curand_normal4(state);
    return float4{
        expf(mean + stddev * v.x), expf(mean + stddev * v.y), expf(mean + stddev * v.z), expf(mean + stddev * v.w)};
}
template <class State>
SIMT_METHOD double2 curand_log_normal2_double(State* state, double mean, double stddev) {
    double2 v = curand_normal2_double(state);
    return double2{exp(mean + stddev * v.x), exp(mean + stddev * v.y)};
}
