// out = in in another type, by way of float32. A conversion that rounds, rounds to nearest even; fp8 saturates.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

template <typename From, typename To>
__device__ void convert(const From* in, To* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = To(float(in[i]));
}

// Kernels without template parameters are compiled together. in and out are [n].
__global__ void float_to_half(const float* in, __half* out, int n) { convert(in, out, n); }
__global__ void float_to_bfloat16(const float* in, __nv_bfloat16* out, int n) { convert(in, out, n); }
__global__ void float_to_e4m3(const float* in, __nv_fp8_e4m3* out, int n) { convert(in, out, n); }
__global__ void float_to_e5m2(const float* in, __nv_fp8_e5m2* out, int n) { convert(in, out, n); }
__global__ void half_to_float(const __half* in, float* out, int n) { convert(in, out, n); }
__global__ void bfloat16_to_float(const __nv_bfloat16* in, float* out, int n) { convert(in, out, n); }
__global__ void e4m3_to_float(const __nv_fp8_e4m3* in, float* out, int n) { convert(in, out, n); }
__global__ void e5m2_to_float(const __nv_fp8_e5m2* in, float* out, int n) { convert(in, out, n); }

// Four fp8 numbers in one 4-byte load, widened and scaled. n must be a multiple of 4.
__global__ void dequantise(const __nv_fp8x4_e4m3* __restrict__ in,  // [n / 4]
                           float4* __restrict__ out,                // [n / 4]
                           float scale, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;  // counts groups of four
    if (i >= n / 4) return;
    const float4 x = float4(in[i]);
    out[i] = make_float4(scale * x.x, scale * x.y, scale * x.z, scale * x.w);
}

// out = a · x + y, two halves at a time: arithmetic in half precision. n must be even.
__global__ void axpy_half2(__half a,
                           const __half2* __restrict__ x,  // [n / 2]
                           const __half2* __restrict__ y,  // [n / 2]
                           __half2* __restrict__ out,      // [n / 2]
                           int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;  // counts pairs
    if (i < n / 2) out[i] = __hfma2(__half2half2(a), x[i], y[i]);
}
