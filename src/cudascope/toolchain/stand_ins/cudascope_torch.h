// The device side of torch's headers: types, macros and the structs that a kernel takes by value.
//
// Each header <ATen/…>, <c10/…>, <torch/…> and <THC/…> of a kernel's source becomes
// this one, because torch's own headers bring in its host code. The names and layouts are torch's: c10/util/Half.h,
// c10/macros/Macros.h, ATen/AccumulateType.h, ATen/core/TensorAccessor.h, ATen/cuda/detail/TensorInfo.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#ifndef __CUDACC_RTC__
#include <limits>
#include <tuple>
#include <type_traits>
#endif

#define C10_HOST_DEVICE __host__ __device__
#define C10_DEVICE __device__
#define C10_HOST __host__
#define C10_MAX_THREADS_PER_BLOCK(n) ((n) <= 1024 ? (n) : 256)
#define C10_MIN_BLOCKS_PER_SM(threads, blocks) (blocks)
#define C10_LAUNCH_BOUNDS_0 __launch_bounds__(256, 4)
#define C10_LAUNCH_BOUNDS_1(threads) __launch_bounds__(threads)
#define C10_LAUNCH_BOUNDS_2(threads, blocks) __launch_bounds__(threads, blocks)
#define C10_WARP_SIZE 32
#define C10_ALWAYS_INLINE __forceinline__
#define C10_NOINLINE __noinline__
#define C10_RESTRICT __restrict__
#define C10_UNUSED [[maybe_unused]]
#define C10_NODISCARD [[nodiscard]]
#define C10_LIKELY(condition) (__builtin_expect(static_cast<bool>(condition), 1))
#define C10_UNLIKELY(condition) (__builtin_expect(static_cast<bool>(condition), 0))
#define C10_API
#define C10_EXPORT
#define C10_CUDA_API
#define TORCH_API
#define TORCH_CUDA_CU_API
#define TORCH_CUDA_CPP_API

#ifdef CUDASCOPE  // these assertions stay where NDEBUG switches others off
#define CUDA_KERNEL_ASSERT(condition) ((condition) ? (void)0 : simt_fail("assertion failed: " #condition))
#else
#define CUDA_KERNEL_ASSERT(condition) ((condition) ? (void)0 : __trap())
#endif
#define CUDA_KERNEL_ASSERT_MSG(condition, message) CUDA_KERNEL_ASSERT(condition)
#define CUDA_KERNEL_ASSERT_PRINTF(condition, message, ...) CUDA_KERNEL_ASSERT(condition)

#define CUDA_KERNEL_LOOP_TYPE(i, n, index_type)                                             \
    int64_t _i_n_d_e_x = ((int64_t)blockIdx.x) * blockDim.x + threadIdx.x;                  \
    for (index_type i = _i_n_d_e_x; _i_n_d_e_x < (n); _i_n_d_e_x += blockDim.x * gridDim.x, i = _i_n_d_e_x)
#define CUDA_KERNEL_LOOP(i, n) CUDA_KERNEL_LOOP_TYPE(i, n, int)

namespace c10 {
#define CUDASCOPE_COMPUTED(T, sign)                                                                            \
    __host__ __device__ __forceinline__ T operator sign(const T& a, const T& b) { return (float)a sign(float) b; } \
    __host__ __device__ __forceinline__ float operator sign(T a, float b) { return (float)a sign b; }         \
    __host__ __device__ __forceinline__ float operator sign(float a, T b) { return a sign(float) b; }         \
    __host__ __device__ __forceinline__ double operator sign(T a, double b) { return (double)a sign b; }      \
    __host__ __device__ __forceinline__ double operator sign(double a, T b) { return a sign(double) b; }      \
    __host__ __device__ __forceinline__ T operator sign(T a, int b) { return a sign T((float)b); }            \
    __host__ __device__ __forceinline__ T operator sign(int a, T b) { return T((float)a) sign b; }            \
    __host__ __device__ __forceinline__ T operator sign(T a, int64_t b) { return a sign T((float)b); }        \
    __host__ __device__ __forceinline__ T operator sign(int64_t a, T b) { return T((float)a) sign b; }        \
    __host__ __device__ __forceinline__ T& operator sign##=(T& a, const T& b) { return a = a sign b; }        \
    __host__ __device__ __forceinline__ float& operator sign##=(float& a, const T& b) { return a sign##= (float)b; }
template <class U>
struct Arithmetic {};
#define CUDASCOPE_ARITHMETIC(U) \
    template <>                 \
    struct Arithmetic<U> { using comparison = bool; };
CUDASCOPE_ARITHMETIC(bool) CUDASCOPE_ARITHMETIC(char) CUDASCOPE_ARITHMETIC(signed char)
CUDASCOPE_ARITHMETIC(unsigned char) CUDASCOPE_ARITHMETIC(short) CUDASCOPE_ARITHMETIC(unsigned short)
CUDASCOPE_ARITHMETIC(int) CUDASCOPE_ARITHMETIC(unsigned) CUDASCOPE_ARITHMETIC(long) CUDASCOPE_ARITHMETIC(unsigned long)
CUDASCOPE_ARITHMETIC(long long) CUDASCOPE_ARITHMETIC(unsigned long long) CUDASCOPE_ARITHMETIC(float)
CUDASCOPE_ARITHMETIC(double)
#undef CUDASCOPE_ARITHMETIC
// Exact matches: __half has comparisons too, and a conversion would fit both.
#define CUDASCOPE_COMPARED(T, sign)                                                                                   \
    __host__ __device__ __forceinline__ bool operator sign(const T& a, const T& b) { return (float)a sign(float) b; } \
    template <class U>                                                                                                \
    __host__ __device__ __forceinline__ typename Arithmetic<U>::comparison operator sign(const T& a, U b) {           \
        return (float)a sign b;                                                                                       \
    }                                                                                                                 \
    template <class U>                                                                                                \
    __host__ __device__ __forceinline__ typename Arithmetic<U>::comparison operator sign(U a, const T& b) {           \
        return a sign(float) b;                                                                                       \
    }
// A number that is computed with in float and rounded after each operation.
#define CUDASCOPE_NUMBER(T, Bits, from_float, as_float, ...)                                                     \
    struct __align__(sizeof(Bits)) T {                                                                           \
        Bits x;                                                                                                  \
        struct from_bits_t {};                                                                                   \
        __host__ __device__ static constexpr from_bits_t from_bits() { return {}; }                              \
        T() = default;                                                                                           \
        __host__ __device__ constexpr T(Bits bits, from_bits_t) : x(bits) {}                                     \
        __host__ __device__ __forceinline__ T(float value) : x(from_float) {}                                    \
        __host__ __device__ __forceinline__ operator float() const { return as_float; }                          \
        __VA_ARGS__                                                                                              \
    };                                                                                                           \
    CUDASCOPE_COMPUTED(T, +) CUDASCOPE_COMPUTED(T, -) CUDASCOPE_COMPUTED(T, *) CUDASCOPE_COMPUTED(T, /)          \
    CUDASCOPE_COMPARED(T, ==) CUDASCOPE_COMPARED(T, !=) CUDASCOPE_COMPARED(T, <) CUDASCOPE_COMPARED(T, >)        \
    CUDASCOPE_COMPARED(T, <=) CUDASCOPE_COMPARED(T, >=)                                                          \
    __host__ __device__ __forceinline__ T operator-(const T& a) { return -(float)a; }

#define CUDASCOPE_16_BITS(T, Raw, raw_of, bits_of, to_raw, to_float)                                             \
    CUDASCOPE_NUMBER(T, unsigned short, bits_of(to_raw(value)), to_float(raw_of(x)),                             \
        __host__ __device__ __forceinline__ T(const Raw& value) : x(bits_of(value)) {}                           \
        __host__ __device__ __forceinline__ operator Raw() const { return raw_of(x); })
CUDASCOPE_16_BITS(Half, __half, __ushort_as_half, __half_as_ushort, __float2half_rn, __half2float)
CUDASCOPE_16_BITS(
    BFloat16, __nv_bfloat16, __ushort_as_bfloat16, __bfloat16_as_ushort, __float2bfloat16_rn, __bfloat162float)

// A larger number becomes the largest (e4m3fn) or infinite (e5m2), as in torch 2.13.
#define CUDASCOPE_8_BITS(T, kind, above)                                                                         \
    CUDASCOPE_NUMBER(T, unsigned char, __nv_cvt_float_to_fp8(value, above, kind),                                \
        __half2float(__half(__nv_cvt_fp8_to_halfraw(x, kind))))
CUDASCOPE_8_BITS(Float8_e4m3fn, __NV_E4M3, __NV_SATFINITE)
CUDASCOPE_8_BITS(Float8_e5m2, __NV_E5M2, __NV_NOSAT)
#undef CUDASCOPE_8_BITS
#undef CUDASCOPE_16_BITS
#undef CUDASCOPE_NUMBER
#undef CUDASCOPE_COMPARED
#undef CUDASCOPE_COMPUTED

template <class T>
struct __align__(2 * sizeof(T)) complex {
    using value_type = T;
    T real_ = T(0), imag_ = T(0);
    complex() = default;
    __host__ __device__ constexpr complex(const T& real, const T& imag = T()) : real_(real), imag_(imag) {}
    template <class U>
    __host__ __device__ explicit constexpr complex(const complex<U>& other)
        : real_((T)other.real_), imag_((T)other.imag_) {}
    __host__ __device__ constexpr T real() const { return real_; }
    __host__ __device__ constexpr T imag() const { return imag_; }
    __host__ __device__ constexpr void real(T value) { real_ = value; }
    __host__ __device__ constexpr void imag(T value) { imag_ = value; }
    __host__ __device__ complex& operator+=(const complex& b) { return real_ += b.real_, imag_ += b.imag_, *this; }
    __host__ __device__ complex& operator-=(const complex& b) { return real_ -= b.real_, imag_ -= b.imag_, *this; }
    __host__ __device__ complex& operator*=(const complex& b) {
        return *this = {real_ * b.real_ - imag_ * b.imag_, real_ * b.imag_ + imag_ * b.real_};
    }
    __host__ __device__ complex& operator/=(const complex& b) {  // scaled, so that no square overflows
        T larger = fabs(b.real_) > fabs(b.imag_) ? fabs(b.real_) : fabs(b.imag_);
        T re = b.real_ / larger, im = b.imag_ / larger, norm = (re * re + im * im) * larger;
        return *this = {(real_ * re + imag_ * im) / norm, (imag_ * re - real_ * im) / norm};
    }
    __host__ __device__ complex operator-() const { return {-real_, -imag_}; }
    __host__ __device__ friend complex operator+(complex a, const complex& b) { return a += b; }
    __host__ __device__ friend complex operator-(complex a, const complex& b) { return a -= b; }
    __host__ __device__ friend complex operator*(complex a, const complex& b) { return a *= b; }
    __host__ __device__ friend complex operator/(complex a, const complex& b) { return a /= b; }
    __host__ __device__ friend bool operator==(const complex& a, const complex& b) {
        return a.real_ == b.real_ && a.imag_ == b.imag_;
    }
    __host__ __device__ friend bool operator!=(const complex& a, const complex& b) { return !(a == b); }
};

#ifdef CUDASCOPE  // CUDA's own take any number that becomes a float
#define CUDASCOPE_LESSER(T)                                                                             \
    __forceinline__ float max(const T& a, const T& b) { return ::max((float)a, (float)b); }             \
    __forceinline__ float min(const T& a, const T& b) { return ::min((float)a, (float)b); }             \
    __forceinline__ float max(const T& a, float b) { return ::max((float)a, b); }                       \
    __forceinline__ float min(const T& a, float b) { return ::min((float)a, b); }                       \
    __forceinline__ float max(float a, const T& b) { return ::max(a, (float)b); }                       \
    __forceinline__ float min(float a, const T& b) { return ::min(a, (float)b); }
CUDASCOPE_LESSER(Half) CUDASCOPE_LESSER(BFloat16)
#undef CUDASCOPE_LESSER
#endif

#ifndef CUDASCOPE  // where it is, __ldg takes any type
__device__ __forceinline__ Half __ldg(const Half* address) {
    return {::__ldg((const unsigned short*)address), Half::from_bits()};
}
__device__ __forceinline__ BFloat16 __ldg(const BFloat16* address) {
    return {::__ldg((const unsigned short*)address), BFloat16::from_bits()};
}
#endif

enum class DeviceType : signed char { CPU = 0, CUDA = 1 };
enum class ScalarType : signed char {
    Byte, Char, Short, Int, Long, Half, Float, Double, ComplexHalf, ComplexFloat, ComplexDouble, Bool, QInt8, QUInt8,
    QInt32, BFloat16, QUInt4x2, QUInt2x4, Bits1x8, Bits2x4, Bits4x2, Bits8, Bits16, Float8_e5m2, Float8_e4m3fn,
};

namespace cuda::compat {  // c10/cuda/CUDAMathCompat.h
#define CUDASCOPE_MATH1(name)                                                                     \
    __host__ __device__ __forceinline__ float name(float x) { return ::name##f(x); }              \
    __host__ __device__ __forceinline__ double name(double x) { return ::name(x); }
#define CUDASCOPE_MATH2(name, function)                                                           \
    __host__ __device__ __forceinline__ float name(float x, float y) { return ::function##f(x, y); } \
    __host__ __device__ __forceinline__ double name(double x, double y) { return ::function(x, y); }
CUDASCOPE_MATH1(exp) CUDASCOPE_MATH1(ceil) CUDASCOPE_MATH1(floor) CUDASCOPE_MATH1(log) CUDASCOPE_MATH1(log1p)
CUDASCOPE_MATH1(sqrt) CUDASCOPE_MATH1(rsqrt) CUDASCOPE_MATH1(tan) CUDASCOPE_MATH1(tanh) CUDASCOPE_MATH1(normcdf)
CUDASCOPE_MATH2(copysign, copysign) CUDASCOPE_MATH2(max, fmax) CUDASCOPE_MATH2(min, fmin) CUDASCOPE_MATH2(pow, pow)
#undef CUDASCOPE_MATH2
#undef CUDASCOPE_MATH1
__host__ __device__ __forceinline__ float abs(float x) { return ::fabsf(x); }
__host__ __device__ __forceinline__ double abs(double x) { return ::fabs(x); }
}  // namespace cuda::compat
}  // namespace c10

#ifndef __CUDACC_RTC__
namespace std {
#define CUDASCOPE_LIMITS(T, HAS_INF, MANTISSA, SMALLEST, LARGEST, LOWEST, EPSILON, INF, NAN_BITS)            \
    template <>                                                                                              \
    class numeric_limits<c10::T> : public numeric_limits<float> {                                            \
        using number = c10::T;                                                                               \
                                                                                                             \
    public:                                                                                                  \
        static constexpr bool has_infinity = HAS_INF;                                                        \
        static constexpr int digits = MANTISSA;                                                              \
        static constexpr number min() { return {SMALLEST, number::from_bits()}; }                            \
        static constexpr number max() { return {LARGEST, number::from_bits()}; }                             \
        static constexpr number lowest() { return {LOWEST, number::from_bits()}; }                           \
        static constexpr number epsilon() { return {EPSILON, number::from_bits()}; }                         \
        static constexpr number infinity() { return {INF, number::from_bits()}; }                            \
        static constexpr number quiet_NaN() { return {NAN_BITS, number::from_bits()}; }                      \
    };
CUDASCOPE_LIMITS(Half, true, 11, 0x0400, 0x7bff, 0xfbff, 0x1400, 0x7c00, 0x7e00)
CUDASCOPE_LIMITS(BFloat16, true, 8, 0x0080, 0x7f7f, 0xff7f, 0x3c00, 0x7f80, 0x7fc0)
CUDASCOPE_LIMITS(Float8_e5m2, true, 3, 0x04, 0x7b, 0xfb, 0x34, 0x7c, 0x7f)
CUDASCOPE_LIMITS(Float8_e4m3fn, false, 4, 0x08, 0x7e, 0xfe, 0x20, 0x00, 0x7f)
#undef CUDASCOPE_LIMITS
}  // namespace std
#endif

namespace at {
using namespace c10;

template <class T, bool is_cuda>
struct AccumulateType { using type = int64_t; };
template <class T>
struct OpMathType { using type = T; };
#define CUDASCOPE_ACCUMULATES(T, GPU, CPU)                  \
    template <>                                             \
    struct AccumulateType<T, true> { using type = GPU; };   \
    template <>                                             \
    struct AccumulateType<T, false> { using type = CPU; };
#define CUDASCOPE_SMALL(T)                                  \
    CUDASCOPE_ACCUMULATES(T, float, float)                  \
    template <>                                             \
    struct OpMathType<T> { using type = float; };
CUDASCOPE_ACCUMULATES(float, float, double) CUDASCOPE_ACCUMULATES(double, double, double)
CUDASCOPE_ACCUMULATES(bool, bool, bool) CUDASCOPE_ACCUMULATES(__half, float, float)
CUDASCOPE_ACCUMULATES(c10::complex<float>, c10::complex<float>, c10::complex<double>)
CUDASCOPE_ACCUMULATES(c10::complex<double>, c10::complex<double>, c10::complex<double>)
CUDASCOPE_SMALL(Half) CUDASCOPE_SMALL(BFloat16) CUDASCOPE_SMALL(Float8_e4m3fn) CUDASCOPE_SMALL(Float8_e5m2)
#undef CUDASCOPE_SMALL
#undef CUDASCOPE_ACCUMULATES
template <class T, bool is_cuda>
using acc_type = typename AccumulateType<T, is_cuda>::type;
template <class T>
using opmath_type = typename OpMathType<T>::type;

template <class T>
__host__ __device__ __forceinline__ T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T>
__host__ __device__ __forceinline__ T round_up(T a, T b) { return ceil_div(a, b) * b; }
template <class T>
__host__ __device__ __forceinline__ bool _isnan(T x) { return x != x; }
template <class T>
__host__ __device__ __forceinline__ bool _isinf(T x) { return isinf((float)x); }

#ifdef __CUDACC_RTC__
template <class T>
struct numeric_limits {};
template <>
struct numeric_limits<float> {
    __device__ static float max() { return __int_as_float(0x7f7fffff); }
    __device__ static float lowest() { return -max(); }
    __device__ static float upper_bound() { return __int_as_float(0x7f800000); }
    __device__ static float lower_bound() { return -upper_bound(); }
};
#else
template <class T>
struct numeric_limits {
    using of = std::numeric_limits<T>;
    __host__ __device__ static T lowest() { return of::lowest(); }
    __host__ __device__ static T max() { return of::max(); }
    __host__ __device__ static T lower_bound() { return of::has_infinity ? T(-of::infinity()) : of::lowest(); }
    __host__ __device__ static T upper_bound() { return of::has_infinity ? of::infinity() : of::max(); }
};
#endif

template <class T>
struct DefaultPtrTraits { typedef T* PtrType; };
template <class T>
struct RestrictPtrTraits { typedef T* __restrict__ PtrType; };

template <class T, size_t N, template <class> class PtrTraits = DefaultPtrTraits, class index_t = int64_t>
class TensorAccessor {
public:
    using PtrType = typename PtrTraits<T>::PtrType;
    __host__ __device__ TensorAccessor(PtrType data, const index_t* sizes, const index_t* strides)
        : data_(data), sizes_(sizes), strides_(strides) {}
    __host__ __device__ index_t stride(index_t i) const { return strides_[i]; }
    __host__ __device__ index_t size(index_t i) const { return sizes_[i]; }
    __host__ __device__ PtrType data() const { return data_; }
    __host__ __device__ decltype(auto) operator[](index_t i) const {
        if constexpr (N == 1)
            return (data_[strides_[0] * i]);
        else
            return TensorAccessor<T, N - 1, PtrTraits, index_t>(data_ + strides_[0] * i, sizes_ + 1, strides_ + 1);
    }

private:
    PtrType data_;
    const index_t *sizes_, *strides_;
};

template <class T, size_t N, template <class> class PtrTraits = DefaultPtrTraits, class index_t = int64_t>
class GenericPackedTensorAccessor {
public:
    using PtrType = typename PtrTraits<T>::PtrType;
    __host__ __device__ index_t stride(index_t i) const { return strides_[i]; }
    __host__ __device__ index_t size(index_t i) const { return sizes_[i]; }
    __host__ __device__ PtrType data() const { return data_; }
    __host__ __device__ decltype(auto) operator[](index_t i) const {
        return TensorAccessor<T, N, PtrTraits, index_t>(data_, sizes_, strides_)[i];
    }

private:
    PtrType data_;
    index_t sizes_[N], strides_[N];
};
template <class T, size_t N, template <class> class PtrTraits = DefaultPtrTraits, class index_t = int64_t>
using PackedTensorAccessor = GenericPackedTensorAccessor<T, N, PtrTraits, index_t>;
template <class T, size_t N, template <class> class PtrTraits = DefaultPtrTraits>
using PackedTensorAccessor32 = GenericPackedTensorAccessor<T, N, PtrTraits, int32_t>;
template <class T, size_t N, template <class> class PtrTraits = DefaultPtrTraits>
using PackedTensorAccessor64 = GenericPackedTensorAccessor<T, N, PtrTraits, int64_t>;

struct PhiloxCudaState {
    union Payload {
        uint64_t val;
        int64_t* ptr;
    };
    Payload seed_{}, offset_{};
    uint64_t offset_intragraph_ = 0;
    bool captured_ = false;
};

namespace native::memory {
template <class T, int N>
struct __align__(sizeof(T) * N) aligned_vector { T val[N]; };
}  // namespace native::memory

namespace cuda {
template <class T>
__host__ __device__ __forceinline__ T ATenCeilDiv(T a, T b) { return (a + b - 1) / b; }
#ifndef __CUDACC_RTC__
namespace philox {
__host__ __device__ __forceinline__ std::tuple<uint64_t, uint64_t> unpack(PhiloxCudaState state) {
    if (state.captured_) return {*state.seed_.ptr, *state.offset_.ptr + state.offset_intragraph_};
    return {state.seed_.val, state.offset_.val};
}
}  // namespace philox
#endif
namespace detail {
constexpr int CUDA_NUM_THREADS = 1024;
#define MAX_TENSORINFO_DIMS 25
template <class T, class IndexType>
struct TensorInfo {
    T* data;
    IndexType sizes[MAX_TENSORINFO_DIMS];
    IndexType strides[MAX_TENSORINFO_DIMS];
    int dims;
    __host__ __device__ bool isContiguous() const { return dims == 1 && strides[0] == 1; }
};
template <class T, class IndexType, int Dims>
struct IndexToOffset {
    __host__ __device__ static IndexType get(IndexType index, const TensorInfo<T, IndexType>& info) {
        IndexType offset = 0;
        for (int i = (Dims < 0 ? info.dims : Dims) - 1; i > 0; --i) {
            offset += index % info.sizes[i] * info.strides[i];
            index /= info.sizes[i];
        }
        return offset + index * info.strides[0];
    }
};
}  // namespace detail
}  // namespace cuda
}  // namespace at

namespace torch {
using namespace at;
}
