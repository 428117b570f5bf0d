// A program with one mistake in each function. Its first argument names the function; test_programs.py has what is found.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

constexpr int N = 100, BYTES = N * sizeof(float);
struct Table { float* row; int n; };
struct Doubles { double* row; };
__constant__ float weights[4];
__device__ float result[4];
static float host[N], plain;
static float *d, *e;

__global__ void fill(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = i;  // the kernel writes
}
__global__ void shift(float* x, int by) { x[(int)threadIdx.x + by] = 1; }  // shifted
__global__ void copy(const float* x, float* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];  // the kernel copies
}
__global__ void by_struct(Table table, int n) {
    if (threadIdx.x < n) table.row[threadIdx.x] = 1;  // through a struct
}
__global__ void by_struct(Doubles table, int n) { table.row[n] = 1; }  // doubles
__global__ void neighbour(float* x) { x[threadIdx.x] = x[(threadIdx.x + 1) % blockDim.x]; }  // a race
__global__ void bytes(char* x, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = 1;  // bytes
}
__global__ void has_bytes(const char* x, int n, int* number) {
    if (threadIdx.x < n && x[threadIdx.x]) atomicAdd(number, 1);
}
__global__ void says(int n) { printf("kernel %d\n", n); }
__global__ void total(const float* x, float* sum) {
    for (int i = 0; i < 4; ++i) *sum += x[i];  // sums up
}
__global__ void asserts(int n) { assert(threadIdx.x < n); }
__global__ void waits(volatile int* flag) { while (!*flag) {} }
__global__ void __launch_bounds__(64) bounded(float* x) { x[threadIdx.x] = 0; }
__global__ void together(float* x) { cooperative_groups::this_grid().sync(); }
__global__ void misaligned(float* x) { *(float2*)(x + 1) = make_float2(0, 0); }  // misaligned

static void (*unconfigured)(float*, int) = fill;
static const void* of(void (*kernel)(float*)) { return (const void*)kernel; }
static void* leaked(size_t bytes) {
    void* p = nullptr;
    cudaMalloc(&p, bytes);
    return p;
}
static void say(const char* what) { printf("%s: %s\n", what, cudaGetErrorName(cudaGetLastError())); }

int main(int argc, char** argv) {
    std::string name = argv[1];
    cudaMalloc(&d, BYTES);
    cudaMalloc((void**)&e, BYTES);
    auto is = [&](const char* other) { return name == other; };
    if (is("right")) {
        fill<<<2, 64>>>(d, N);
        copy<<<1, 128>>>(d, e, N);
        cudaMemcpy(host, e, BYTES, cudaMemcpyDeviceToHost);
        printf("%g\n", host[N - 1]);
        says<<<1, 1>>>(2);
        fill<<<4300, 1>>>(d, N);  // more thread blocks than a cooperative launch may have
        cudaMemset(e, 0, 4);
        has_bytes<<<1, 400>>>((char*)d, BYTES, (int*)e);
        cudaMemcpy(host, e, 4, cudaMemcpyDeviceToHost);
        printf("%d\n", *(int*)host);
    }
    // ------------------------------------------------------------------------------------------ in kernels
    if (is("past_end")) fill<<<2, 64>>>(d, N + 1), fill<<<1, 64>>>(d, N);
    if (is("far_past_end")) shift<<<1, 1>>>(d, N + 5000), say("far_past_end");
    if (is("before_start")) shift<<<1, 1>>>(d, -3);
    if (is("through_struct")) by_struct<<<1, 128>>>(Table{d, N}, N + 2);
    if (is("doubles_in_struct")) {
        double* doubles;
        cudaMalloc(&doubles, 80);
        by_struct<<<1, 1>>>(Doubles{doubles}, 10);  // of doubles
    }
    if (is("in_bytes")) bytes<<<1, 512>>>((char*)d, BYTES + 1);
    if (is("race")) cudaMemset(d, 0, BYTES), neighbour<<<1, 64>>>(d);
    if (is("unwritten")) copy<<<1, 1>>>(d, e, 1);
    if (is("half_written")) cudaMemcpy(d, host, BYTES / 2, cudaMemcpyHostToDevice), copy<<<1, 51>>>(d, e, 51);
    if (is("written_by_kernel")) fill<<<1, 64>>>(d, N), copy<<<1, 65>>>(d, e, 65);
    if (is("second_launch")) fill<<<1, 64>>>(d, N), fill<<<2, 64>>>(d, N + 3);
    if (is("misaligned")) misaligned<<<1, 1>>>(d);
    if (is("host_pointer")) fill<<<1, 64>>>(host, N);
    if (is("host_pointer_read")) cudaMemset(d, 0, 4), total<<<1, 1>>>(host, d);
    if (is("host_stack")) {
        float local[4] = {};
        cudaMemset(d, 0, 4), total<<<1, 1>>>(local, d);
    }
    if (is("null_pointer")) fill<<<1, 64>>>(nullptr, N);
    if (is("freed_before_launch")) {
        cudaFree(d);  // freed
        fill<<<1, 64>>>(d, N);
    }
    if (is("assertion")) {
        asserts<<<1, 64>>>(60);
        say("launch");
        printf("synchronize: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
        printf("malloc: %s\n", cudaGetErrorName(cudaMalloc(&e, 4)));
    }
    if (is("kernel_hangs")) cudaMemset(d, 0, BYTES), waits<<<1, 1>>>((int*)d);
    // ------------------------------------------------------------------------------------------ launches
    if (is("grid_of_0")) fill<<<N / 128, 128>>>(d, N), say("grid_of_0");
    if (is("large_block")) fill<<<1, dim3(32, 33)>>>(d, N), say("large_block");
    if (is("tall_grid")) fill<<<dim3(1, 65536), 1>>>(d, N), say("tall_grid");
    if (is("much_shared")) fill<<<1, 64, (48 << 10) + 1>>>(d, N), say("much_shared");
    if (is("too_much_shared")) {
        cudaError_t error = cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20);
        printf("attribute: %s\n", cudaGetErrorName(error));
        fill<<<1, 64, 1 << 20>>>(d, N), say("too_much_shared");
    }
    if (is("launch_bounds")) bounded<<<1, 65>>>(d), say("launch_bounds");
    if (is("cooperative")) {
        void* arguments[] = {&d};
        cudaLaunchCooperativeKernel(of(together), 5000, 1024, arguments), say("cooperative");
    }
    if (is("no_kernel")) cudaLaunchKernel(host, 1, 1, nullptr, 0, 0), say("no_kernel");
    if (is("not_configured")) fill<<<1, 1>>>(d, 1), unconfigured(d, N), say("not_configured");
    // ------------------------------------------------------------------------------------------ copies
    if (is("copy_too_long")) cudaMemcpy(d, host, BYTES + 4, cudaMemcpyHostToDevice), say("copy_too_long");
    if (is("copy_from_too_short")) cudaMemcpy(host, d + 1, BYTES, cudaMemcpyDeviceToHost), say("copy_from_too_short");
    if (is("copy_swapped")) cudaMemcpy(host, d, BYTES, cudaMemcpyHostToDevice), say("copy_swapped");
    if (is("copy_to_host")) cudaMemcpy(host, host + 1, 4, cudaMemcpyHostToDevice), say("copy_to_host");
    if (is("copy_null")) cudaMemcpy(nullptr, host, 4, cudaMemcpyHostToDevice), say("copy_null");
    if (is("copy_freed")) cudaFree(d), cudaMemcpy(host, d, 4, cudaMemcpyDeviceToHost), say("copy_freed");
    if (is("copy_2d")) cudaMemcpy2D(d, 40, host, 40, 40, 11, cudaMemcpyHostToDevice), say("copy_2d");
    if (is("copy_rows")) cudaMemcpy2D(d, 80, host, 40, 40, 6, cudaMemcpyHostToDevice), say("copy_rows");
    if (is("copy_pitch")) cudaMemcpy2D(d, 36, host, 40, 40, 10, cudaMemcpyHostToDevice), say("copy_pitch");
    if (is("copy_direction")) cudaMemcpy(d, host, 4, (cudaMemcpyKind)9), say("copy_direction");
    if (is("copy_async")) cudaMemcpyAsync(host, d, BYTES + 1, cudaMemcpyDeviceToHost), say("copy_async");
    if (is("fill_too_long")) cudaMemset(d, 0, BYTES + 1), say("fill_too_long");
    if (is("fill_host")) cudaMemset(host, 0, 4), say("fill_host");
    if (is("symbol_too_long")) cudaMemcpyToSymbol(weights, host, 20), say("symbol_too_long");
    if (is("symbol_offset")) cudaMemcpyFromSymbol(host, result, 8, 12), say("symbol_offset");
    if (is("no_symbol")) cudaMemcpyToSymbol(plain, host, 4), say("no_symbol");
    // ------------------------------------------------------------------------------------------ frees
    if (is("double_free")) cudaFree(d), cudaFree(d), say("double_free");
    if (is("double_free_of_copy")) {
        float* same = d;
        cudaFree(same), cudaFreeAsync(d, 0), say("double_free_of_copy");
    }
    if (is("double_free_of_host")) {
        float* h;
        cudaMallocHost(&h, 64);
        cudaFreeHost(h), cudaFreeHost(h), say("double_free_of_host");
    }
    if (is("free_inside")) cudaFree(d + 1), say("free_inside");
    if (is("free_host_memory")) cudaFree(host), say("free_host_memory");
    if (is("free_by_host")) free(d);
    if (is("free_pinned")) {
        float* h;
        cudaHostAlloc(&h, 64, 0);
        cudaFree(h), say("free_pinned");
    }
    if (is("free_host_of_device")) cudaFreeHost(d), say("free_host_of_device");
    if (is("leak")) leaked(12), cudaFree(d), cudaFree(e);
    // ------------------------------------------------------------------------------------------ the host
    if (name.rfind("host_", 0) == 0) fill<<<1, 1>>>(d, 1);
    if (is("host_reads")) return (int)d[3];  // the host reads
    if (is("host_writes")) d[N - 1] = 1;  // the host writes
    if (is("host_in_library")) memset(d, name.size(), BYTES);  // in a function of the library
    if (is("host_reads_freed")) cudaFree(d), plain = d[1];  // the host reads freed memory
    if (is("host_reads_freed_managed")) {
        int* m;
        cudaMallocManaged(&m, 4);
        cudaFree(m), plain = *m;  // managed memory that was freed
    }
    if (is("host_null")) *(volatile int*)nullptr = 1;  // null
    if (is("host_division")) return 7 / (int)(host[0] * argc);  // zero
    if (is("host_past_managed")) {
        float* m;
        cudaMallocManaged(&m, 4096);  // of 1024 floats
        m[1024] = 1;  // behind its end
    }
    if (is("host_hangs")) for (volatile int i = 0; i < 1; i += 0) {}  // the host hangs
    if (is("aborts")) abort();
    if (is("asserts")) printf("before\n"), assert(argc == 0);
    if (is("exits")) exit(5);
    return 3;
}
