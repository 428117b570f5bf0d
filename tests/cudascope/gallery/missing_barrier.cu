__global__ void reverse(const float* in, float* out) {
    __shared__ float row[128];
    row[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = row[127 - threadIdx.x];
}
