// out = a + b, with one element per thread and with four.

__global__ void vector_add(const float* __restrict__ a,  // [n]
                           const float* __restrict__ b,  // [n]
                           float* __restrict__ out,      // [n]
                           int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;  // counts elements over the whole grid
    if (i < n) out[i] = a[i] + b[i];
}

// Each load and each store moves 16 bytes. n must be a multiple of 4.
__global__ void vector_add4(const float4* __restrict__ a,  // [n / 4]
                            const float4* __restrict__ b,  // [n / 4]
                            float4* __restrict__ out,      // [n / 4]
                            int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;  // counts float4s over the whole grid
    if (i >= n / 4) return;
    const float4 x = a[i], y = b[i];
    out[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}
