__global__ void copy_rows(const float* in, float* out, int width) {
    const float4* row = (const float4*)(in + blockIdx.x * width);
    float4 v = row[threadIdx.x];
    float* to = out + blockIdx.x * width + 4 * threadIdx.x;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
