// out = in, n floats, for any n and any number of thread blocks and threads.
// Each request of a warp shall move neighbours: 32 floats, 4 sectors of 32 bytes.
__global__ void coalesced_copy(const float* in,  // [n]
                               float* out,       // [n]
                               int n) {
    const int threads = gridDim.x * blockDim.x;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = thread; i < n; i += threads) out[i] = in[i];
}
