// Programs with and without a fault, for test_shares.py: accesses to memory that is not there, or at a wrong address.
__constant__ float taps[5];
__device__ int bins[8];
__device__ const int primes[4] = {2, 3, 5, 7};

// a convolution mask with one tap too many <<<1, 64>>>
__global__ void convolution(const float* in, float* out, int* flags, bool right) {
    float sum = 0;
    for (int k = 0; k < (right ? 5 : 6); ++k) sum += taps[k] * in[threadIdx.x + k];  // FAULT out of bounds
    out[threadIdx.x] = sum;
}
// an entry before the first of a __device__ table <<<1, 32>>>
__global__ void previous_bin(const float* in, float* out, int* flags, bool right) {
    int bin = threadIdx.x % 8;
    out[threadIdx.x] = bins[right && bin == 0 ? 0 : bin - 1];  // FAULT out of bounds
}
// a store past the end of a __device__ table <<<1, 1>>>
__global__ void one_bin_more(const float* in, float* out, int* flags, bool right) {
    for (int i = 0; i < (right ? 8 : 9); ++i) bins[i] = i;  // FAULT out of bounds
}
// an entry past the end of a table of constants <<<1, 8>>>
__global__ void fifth_prime(const float* in, float* out, int* flags, bool right) {
    out[threadIdx.x] = primes[right ? threadIdx.x % 4 : threadIdx.x];  // FAULT out of bounds
}
// an entry past the end of a static table of the kernel <<<1, 8>>>
__global__ void static_table(const float* in, float* out, int* flags, bool right) {
    static const float weights[6] = {1, 2, 3, 4, 5, 6};
    out[threadIdx.x] = weights[right ? threadIdx.x % 6 : threadIdx.x];  // FAULT out of bounds
}
// no guard in the last thread block <<<5, 64>>>
__global__ void no_guard(const float* in, float* out, int* flags, bool right) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (right && i >= 256) return;
    out[i] = in[i];  // FAULT out of bounds
}
// a guard with <= <<<5, 64>>>
__global__ void less_or_equal(const float* in, float* out, int* flags, bool right) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (right ? i < 256 : i <= 256) out[i] = 1;  // FAULT out of bounds
}
// the left neighbour of the first element <<<4, 64>>>
__global__ void left_neighbour(const float* in, float* out, int* flags, bool right) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i] - (right && i == 0 ? 0 : in[i - 1]);  // FAULT out of bounds
}
// rows and columns exchanged in an index of a 32 × 8 matrix <<<1, 256>>>
__global__ void exchanged_strides(const float* in, float* out, int* flags, bool right) {
    int row = threadIdx.x / 8, column = threadIdx.x % 8;
    out[right ? row * 8 + column : row * 32 + column] = 1;  // FAULT out of bounds
}
// a countdown with an unsigned counter <<<1, 1>>>
__global__ void unsigned_countdown(const float* in, float* out, int* flags, bool right) {
    for (unsigned i = 4; right ? i > 0 : i <= 4 || i > 4294967290u; --i) out[0] += in[right ? i - 1 : i];  // FAULT out of bounds
}
// an index of 32 bits that overflows <<<1, 1>>>
__global__ void overflowing_index(const float* in, float* out, int* flags, bool right) {
    int rows = 70000 + flags[0];
    int i = right ? 0 : (int)((unsigned)rows * (unsigned)rows);
    out[0] = in[i];  // FAULT out of bounds
}
// one element too many of a shared array <<<1, 64>>>
__global__ void shared_end(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[64];
    row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = row[right ? (threadIdx.x + 1) % 64 : threadIdx.x + 1];  // FAULT out of shared bounds
}
// a signed char as an index <<<1, 64>>>
__global__ void signed_index(const float* in, float* out, int* flags, bool right) {
    __shared__ int counts[256];
    for (int i = threadIdx.x; i < 256; i += 64) counts[i] = 0;
    __syncthreads();
    char letter = (char)(threadIdx.x * 4);
    atomicAdd(&counts[right ? (unsigned char)letter : letter], 1);  // FAULT out of shared bounds
}
// more dynamic shared memory than the launch gives <<<1, 64, 256>>>
__global__ void dynamic_end(const float* in, float* out, int* flags, bool right) {
    extern __shared__ float both[];
    float* second = both + (right ? 0 : 64);
    second[threadIdx.x] = in[threadIdx.x];  // FAULT out of shared bounds
    out[threadIdx.x] = second[threadIdx.x];  // FAULT out of shared bounds
}
// a vector that is not aligned in global memory <<<1, 16>>>
__global__ void shifted_vector(const float* in, float* out, int* flags, bool right) {
    const float4 four = *(const float4*)(in + 4 * threadIdx.x + (right ? 0 : 1));  // FAULT misaligned
    out[threadIdx.x] = four.x + four.w;
}
// a pair at odd elements of a shared array <<<1, 16>>>
__global__ void odd_pair(const float* in, float* out, int* flags, bool right) {
    __shared__ float row[64];
    for (int i = threadIdx.x; i < 64; i += 16) row[i] = in[i];
    __syncthreads();
    float2 pair = *(float2*)&row[2 * threadIdx.x + (right ? 0 : 1)];  // FAULT misaligned
    out[threadIdx.x] = pair.x + pair.y;
}
// four elements of a local array at once, from the second on <<<1, 16>>>
__global__ void local_vector(const float* in, float* out, int* flags, bool right) {
    float own[8];
    for (int i = 0; i < 8; ++i) own[i] = in[i + flags[0]];
    float4 four = *(float4*)&own[right ? 0 : 1 + flags[0]];  // FAULT misaligned
    out[threadIdx.x] = four.x + four.w;
}
// past the end of a local array <<<1, 4>>>
__global__ void local_end(const float* in, float* out, int* flags, bool right) {
    float own[4];
    for (int i = 0; i < 4; ++i) own[i] = in[i];
    out[threadIdx.x] = own[right ? threadIdx.x : threadIdx.x + 1];  // FAULT out of local bounds
}
// before the first element of a local array <<<1, 4>>>
__global__ void local_begin(const float* in, float* out, int* flags, bool right) {
    float own[4];
    for (int i = 0; i < 4; ++i) own[i] = in[i];
    out[threadIdx.x] = own[right ? threadIdx.x : (int)threadIdx.x - 1];  // MISSED out of local bounds
}
// past the end of memory from malloc <<<1, 4>>>
__global__ void heap_end(const float* in, float* out, int* flags, bool right) {
    float* own = (float*)malloc(16);
    for (int i = 0; i < (right ? 4 : 5); ++i) own[i] = in[i];  // FAULT out of bounds
    out[threadIdx.x] = own[3];
    free(own);
}
// memory that is freed too early <<<1, 4>>>
__global__ void freed_early(const float* in, float* out, int* flags, bool right) {
    float* own = (float*)malloc(16);
    own[0] = in[threadIdx.x];
    if (!right) free(own);
    out[threadIdx.x] = own[0];  // FAULT out of bounds
    if (right) free(own);
}
// memory that is freed twice <<<1, 1>>>
__global__ void freed_twice(const float* in, float* out, int* flags, bool right) {
    float* own = (float*)malloc(16);
    own[flags[0]] = in[0];
    out[0] = own[0];
    free(own);
    if (!right) free(own);  // FAULT assertion
}
// the address of a local variable that has gone <<<1, 4>>>
__device__ __noinline__ float* pointer_to(float value, float* place) {
    float own = value;
    float* volatile address = &own;
    *place = own;
    return address;
}
__global__ void gone_variable(const float* in, float* out, int* flags, bool right) {
    float mine = 0;
    float* address = pointer_to(in[threadIdx.x], &mine);
    out[threadIdx.x] = right ? mine : *address;  // FAULT local gone
}
// the local variable of another thread <<<1, 32>>>
__global__ void variable_of_a_neighbour(const float* in, float* out, int* flags, bool right) {
    __shared__ float* address;
    __shared__ float value;
    float own = in[threadIdx.x];
    if (threadIdx.x == 0) address = &own, value = own;
    __syncthreads();
    out[threadIdx.x] = right ? value : *address;  // FAULT local of another thread
    __syncthreads();
}
// the row of a tile has one column too few: the next row is read, which is there <<<1, 16>>>
__global__ void next_row(const float* in, float* out, int* flags, bool right) {
    __shared__ float tile[17][16];
    for (int y = 0; y < 17; ++y) tile[y][threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    float* row = &tile[3][0];
    out[threadIdx.x] = row[right ? threadIdx.x : threadIdx.x + 1];  // MISSED out of shared bounds
}
