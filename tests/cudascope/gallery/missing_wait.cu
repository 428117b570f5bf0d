#include <cuda_pipeline.h>
__global__ void stage(const float4* in, float4* out) {
    __shared__ float4 tile[32];
    __pipeline_memcpy_async(&tile[threadIdx.x], &in[threadIdx.x], 16);
    __pipeline_commit();
    __syncthreads();
    out[threadIdx.x] = tile[31 - threadIdx.x];
}
