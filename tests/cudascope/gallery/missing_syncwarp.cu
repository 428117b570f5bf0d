__global__ void rotate(const int* in, int* out) {
    __shared__ int lanes[32];
    lanes[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = lanes[(threadIdx.x + 1) % 32];
}
