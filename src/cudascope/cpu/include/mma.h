// Tensor cores as CUDA C++ reaches them: nvcuda::wmma, matrices of which each lane of a warp holds a part.
//
//   who holds what   Which lane holds which element, and where in x[], is drawn from the schedule's seed, anew for each
//                    kind of fragment: what does the same to all x[i] works, what counts on an arrangement breaks.
//                    Accumulators of one size are of one kind whatever their type, as in NVIDIA's machine code for
//                    sm_80 and later: `half_sums.x[i] = __float2half(float_sums.x[i])` converts a matrix.
//   arithmetic       Products are exact; they are added in order of k, starting from c, in float32 (of doubles and
//                    integers, in their own type). A half accumulator is rounded once per product. tf32 drops 13 bits.
//   memory           A matrix moves in pieces of 16 bytes, 8 rows of a column of pieces after another, as ldmatrix
//                    does; up to 32 pieces are a request. Nothing here orders memory: write, __syncwarp, load.
#pragma once

#include "simt.h"
#include "cuda_bf16.h"  // as NVIDIA's header does

namespace nvcuda {
namespace wmma {

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
namespace precision {
struct tf32;
}
enum layout_t { mem_row_major, mem_col_major };

SIMT_INLINE float __float_to_tf32(float x) {  // 10 bits of fraction; ties go away from zero
    unsigned bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? x : __uint_as_float((bits + 0x1000u) & ~0x1fffu);
}

namespace impl {
template <class T, class Other>
constexpr bool is = std::is_same<T, Other>::value;

template <class T>
using stored = std::conditional_t<is<T, precision::tf32>, float, T>;

template <class Use, int rows, int columns, class Layout, size_t element_bytes>
struct Arrangement {  // who holds what: two fragments with the same one hold the same elements
    static constexpr uint64_t hash() {
        uint64_t hash = 14695981039346656037u;
        for (const char* c = __PRETTY_FUNCTION__; *c; ++c) hash = (hash ^ (uint64_t)*c) * 1099511628211u;
        return hash;
    }
};

template <class T>
constexpr bool multiplies(int m, int n, int k) {
    bool wide = (m == 16 && n == 16) || (m == 32 && n == 8) || (m == 8 && n == 32);
    if (is<T, precision::tf32>) return m == 16 && n == 16 && k == 8;
    if (is<T, double>) return m == 8 && n == 8 && k == 4;
    bool narrow = is<T, __half> || is<T, __nv_bfloat16> || is<T, signed char> || is<T, unsigned char>;
    return wide && k == 16 && narrow;
}
template <class T>
constexpr bool accumulates(int m, int n, int k) {
    if (is<T, double>) return multiplies<double>(m, n, k);
    if (is<T, float>) return multiplies<__half>(m, n, k) || multiplies<precision::tf32>(m, n, k);
    return (is<T, __half> || is<T, int>) && multiplies<__half>(m, n, k);
}
}  // namespace impl

template <class Use, int m, int n, int k, class T, class Layout = void>
class fragment {
public:
    static constexpr bool sums = impl::is<Use, accumulator>;
    static_assert(sums ? impl::accumulates<T>(m, n, k) : impl::multiplies<T>(m, n, k),
                  "wmma: a fragment of this shape and type does not exist, or only on a GPU (sub-byte types)");
    static_assert(sums == std::is_void<Layout>::value,
                  "wmma: matrix_a and matrix_b have a layout, an accumulator has none");
    static constexpr int rows = impl::is<Use, matrix_b> ? k : m, columns = impl::is<Use, matrix_a> ? k : n;
    // of a half, a lane holds 16, some of them twice; that is so since the first tensor cores
    static constexpr int num_elements = impl::is<T, __half> && !sums ? 16 : rows * columns / 32;
    static constexpr int num_storage_elements = num_elements;
    using arrangement = impl::Arrangement<Use, rows, columns, Layout, sums ? 0 : sizeof(impl::stored<T>)>;
    using element_type = impl::stored<T>;
    using storage_element_type = element_type;
    element_type x[num_elements];
};

namespace impl {
// Slot i of a lane holds element place(32 * i + lane) of the matrix, row by row.
template <class Fragment>
class Places {
    static constexpr unsigned slots = 32 * Fragment::num_elements, half = slots >= 256 ? 4 : 3;
    unsigned multiply, add, again;

public:
    SIMT_UNSEEN Places() {
        uint64_t key = (simt_seed() ^ Fragment::arrangement::hash()) * 0x9e3779b97f4a7c15u;
        key = (key ^ key >> 29) * 0xbf58476d1ce4e5b9u;
        multiply = (unsigned)(key >> 8) | 1, add = (unsigned)(key >> 24), again = (unsigned)(key >> 40) | 1;
    }
    SIMT_UNSEEN unsigned operator()(unsigned slot) const {  // each step can be undone: no element is lost
        unsigned at = (slot * multiply + add) % slots;
        at = (at ^ at >> half) * again % slots;
        return (at ^ at >> half) % (Fragment::rows * Fragment::columns);
    }
};

// Call f(element of the matrix, lane, place in x[]) for all that the lanes hold.
template <class Fragment, class F>
SIMT_UNSEEN void each_element(F f) {
    Places<Fragment> place;
    for (unsigned slot = 0; slot < 32 * Fragment::num_elements; ++slot) f(place(slot), slot % 32, slot / 32);
}

template <class Fragment>
struct Move {  // a matrix between memory and fragments, as a lane asks for it
    Fragment* fragment;
    typename Fragment::element_type* memory;
    unsigned stride;
    layout_t layout;

    static constexpr unsigned size = sizeof(typename Fragment::element_type), part = size * Fragment::num_elements;
    // the PTX ISA asks for the alignment of a lane's part: the programming guide's 32 bytes, for half and float
    static constexpr unsigned alignment = part < 32 ? part : 32;

    __forceinline__ void announce([[maybe_unused]] simt::Access access) const {
#ifdef SIMT_INSTRUMENTED
        unsigned lines = layout == mem_row_major ? Fragment::rows : Fragment::columns;
        unsigned bytes = Fragment::rows * Fragment::columns / lines * size, piece = bytes < 16 ? bytes : 16;
        for (unsigned i = simt_lane(); i < lines * bytes / piece; i += 32)
            simt_access((char*)(memory + i % lines * stride) + i / lines * piece, piece, access);
#endif
    }
    SIMT_UNSEEN static void carry_out(void** lanes, bool store) {
        const Move& first = *(Move*)lanes[0];
        for (int lane = 1; lane < 32; ++lane) {
            const Move& other = *(Move*)lanes[lane];
            if (other.memory != first.memory)
                simt_refuse(lane, "passes another matrix than lane 0: all 32 lanes must pass the same");
            if (other.stride != first.stride || other.layout != first.layout)
                simt_refuse(lane, "passes another leading dimension or layout than lane 0: all must pass the same");
        }
        if ((uint64_t)first.memory % alignment) {
            char message[80];
            snprintf(message, sizeof(message), "passes a matrix whose address is no multiple of %u bytes", alignment);
            simt_refuse(0, message);
        }
        if (first.stride * size % 16) simt_refuse(0, "passes a leading dimension that is no multiple of 16 bytes");
        unsigned down = first.layout == mem_row_major ? first.stride : 1, right = first.stride + 1 - down;
        each_element<Fragment>([&](unsigned at, unsigned lane, unsigned i) SIMT_UNSEEN {
            auto& held = ((Move*)lanes[lane])->fragment->x[i];
            auto& kept = first.memory[at / Fragment::columns * down + at % Fragment::columns * right];
            if (store) kept = held;
            else held = kept;
        });
    }
    SIMT_UNSEEN static void load(void** lanes) { carry_out(lanes, false); }
    SIMT_UNSEEN static void store(void** lanes) { carry_out(lanes, true); }
};
template <class Fragment>
SIMT_INLINE void move(const Fragment& fragment, const typename Fragment::element_type* memory, unsigned stride,
                      layout_t layout, simt::Access access, int line) {
    auto memory_of_both = const_cast<typename Fragment::element_type*>(memory);
    Move<Fragment> wanted{const_cast<Fragment*>(&fragment), memory_of_both, stride, layout};
    wanted.announce(access);
    simt_meet(simt::MATRIX, ~0u, &wanted, access == simt::READ ? wanted.load : wanted.store, line);
}

template <class T>
SIMT_UNSEEN auto number(stored<T> x) {
    if constexpr (is<T, precision::tf32>) return simt::from_bits<float>(simt::bits(x) & ~0x1fffu);
    else if constexpr (sizeof(T) == 1) return (int)x;
    else if constexpr (sizeof(T) == 2) return (float)x;
    else return x;
}

template <class D, class A, class B, class C>
struct Product { D* d; const A* a; const B* b; const C* c; bool saturate; };

template <int m, int n, int k, class T, class To, class From, class D, class A, class B, class C>
SIMT_UNSEEN void multiply(void** lanes) {
    using Operand = decltype(number<T>({}));
    using Sum = std::conditional_t<is<Operand, int>, int64_t, Operand>;
    static_assert(is<Operand, float> ? is<To, float> || is<To, __half> : is<Operand, To>, "wmma: no such product");
    Operand a[m][k], b[k][n];
    Sum sum[m][n];
    auto of = [=](unsigned lane) SIMT_UNSEEN -> Product<D, A, B, C>& { return *(Product<D, A, B, C>*)lanes[lane]; };
    each_element<A>([&](unsigned at, unsigned lane, unsigned i) SIMT_UNSEEN {
        a[at / k][at % k] = number<T>(of(lane).a->x[i]);
    });
    each_element<B>([&](unsigned at, unsigned lane, unsigned i) SIMT_UNSEEN {
        b[at / n][at % n] = number<T>(of(lane).b->x[i]);
    });
    each_element<C>([&](unsigned at, unsigned lane, unsigned i) SIMT_UNSEEN {
        sum[at / n][at % n] = (Sum)number<From>(of(lane).c->x[i]);
    });
    for (int i = 0; i < m; ++i)
        for (int l = 0; l < k; ++l)
            for (int j = 0; j < n; ++j) sum[i][j] += a[i][l] * b[l][j];
    each_element<D>([&](unsigned at, unsigned lane, unsigned i) SIMT_UNSEEN {
        Sum value = sum[at / n][at % n];
        if (of(0).saturate) value = value < (Sum)INT_MIN ? (Sum)INT_MIN : value > (Sum)INT_MAX ? (Sum)INT_MAX : value;
        of(lane).d->x[i] = (To)value;
    });
}
}  // namespace impl

template <class Use, int m, int n, int k, class T, class Layout, class Value>
SIMT_INLINE void fill_fragment(fragment<Use, m, n, k, T, Layout>& f, const Value& value) {
    for (auto& x : f.x) x = (impl::stored<T>)value;
}

template <class Use, int m, int n, int k, class T, class Layout>
SIMT_INLINE void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& f, const impl::stored<T>* p, unsigned ldm,
                                  int line = __builtin_LINE()) {
    impl::move(f, p, ldm, impl::is<Layout, row_major> ? mem_row_major : mem_col_major, simt::READ, line);
}
template <int m, int n, int k, class T>
SIMT_INLINE void load_matrix_sync(fragment<accumulator, m, n, k, T>& f, const T* p, unsigned ldm, layout_t layout,
                                  int line = __builtin_LINE()) {
    impl::move(f, p, ldm, layout, simt::READ, line);
}
template <int m, int n, int k, class T>
SIMT_INLINE void store_matrix_sync(T* p, const fragment<accumulator, m, n, k, T>& f, unsigned ldm, layout_t layout,
                                   int line = __builtin_LINE()) {
    impl::move(f, p, ldm, layout, simt::WRITE, line);
}

// d = a @ b + c. `satf`: sums of integers stop at the ends of their range instead of wrapping round.
template <int m, int n, int k, class T, class LayoutA, class LayoutB, class To, class From>
SIMT_INLINE void mma_sync(fragment<accumulator, m, n, k, To>& d, const fragment<matrix_a, m, n, k, T, LayoutA>& a,
                          const fragment<matrix_b, m, n, k, T, LayoutB>& b,
                          const fragment<accumulator, m, n, k, From>& c, bool satf = false,
                          int line = __builtin_LINE()) {
    using A = fragment<matrix_a, m, n, k, T, LayoutA>;
    using B = fragment<matrix_b, m, n, k, T, LayoutB>;
    using C = fragment<accumulator, m, n, k, From>;
    using D = fragment<accumulator, m, n, k, To>;
    impl::Product<D, A, B, C> product{&d, &a, &b, &c, satf};
    simt_meet(simt::PRODUCT, ~0u, &product, impl::multiply<m, n, k, T, To, From, D, A, B, C>, line);
}

}  // namespace wmma
}  // namespace nvcuda
