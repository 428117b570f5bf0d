// Every way to launch a kernel, and one call of each kind of the CUDA runtime API. test_programs.py has what it prints.
#include <cstdio>
#include <vector>
#include <string>
#include <stdexcept>
#include <memory>
#include <thread>
#include <map>
#include <cassert>
#include <cooperative_groups.h>
#include <omp.h>
namespace cg = cooperative_groups;
namespace {
__device__ int counter;
__global__ void hidden(int* x) { x[threadIdx.x] = threadIdx.x; atomicAdd(&counter, 1); }
}
static __global__ void fixed(int* x, int) { x[0] = 5; }
template <typename T, int N = 4, typename... Rest> __global__ void many(T* x, Rest... rest) { x[threadIdx.x] = N + (rest + ... + 0); }
template <> __global__ void many<float, 7>(float* x) { x[threadIdx.x] = 7; }
__global__ void over(float* x, float v = 2.5f) { x[threadIdx.x] = v; }
__global__ void over(int* x) { x[threadIdx.x] = 1; }
template <class F> __global__ void apply(F f, int n) { int i = threadIdx.x; if (i < n) f(i); }
struct Pair { float a; double b; };
__global__ void structs(const Pair p, float* __restrict__ out, int unused[], unsigned) { out[threadIdx.x] = p.a + p.b; }
__managed__ int managed_counter = 3;
__constant__ float table[4];
__device__ float result[4];
__global__ void tables() { int i = threadIdx.x; result[i] = table[i] * 2; if (i == 0) managed_counter++; }
__global__ void coop(int* x) { cg::grid_group g = cg::this_grid(); if (threadIdx.x == 0) x[blockIdx.x] = blockIdx.x + 1; g.sync(); if (threadIdx.x == 0) x[gridDim.x + blockIdx.x] = x[(blockIdx.x + 1) % gridDim.x]; }
__global__ void big(float* o) { extern __shared__ float s[]; s[threadIdx.x + 20000] = 1; __syncthreads(); if (threadIdx.x == 0) o[0] = s[20000]; }
__host__ __device__ int twice(int x) { return 2 * x; }
struct Launcher { float* p; template <int N> void go() { many<float, N><<<1, 4>>>(p); } void (*k)(float*, float) = over; };
#define LAUNCH(k, n, ...) k<<<1, n>>>(__VA_ARGS__)
int main(int argc, char** argv) {
    float* d; int* di; std::vector<float> h(64);
    if (cudaMalloc(&d, 64 * sizeof(float)) || cudaMalloc(&di, 64 * sizeof(int))) return 1;
    auto show = [&](const char* w) { cudaMemcpy(h.data(), d, 64 * sizeof(float), cudaMemcpyDeviceToHost); printf("%s %g %g %g %g\n", w, h[0], h[1], h[2], h[3]); };
    cudaMemset(d, 0, 256);
    hidden<<<1, 4>>>(di); fixed<<<dim3(1), dim3(1, 1, 1), 0, 0>>>(di, 1);
    many<float><<<1, 4>>>(d, 1, 2); show("many");
    many<float, 7><<<1, 4>>>(d); show("special");
    over<<<1, 4>>>(d); show("over"); over<<<1, 4>>>(di);
    apply<<<1, 4>>>([=] __device__ (int i) { d[i] = i * 10; }, 4); show("lambda");
    Pair p{1, 2}; structs<<<1, 4>>>(p, d, nullptr, 3u); show("structs");
    structs<<<1, 4>>>({3, 4}, d, NULL, 3u); show("structs");
    float t[4] = {1, 2, 3, 4}, r[4]; int c;
    cudaMemcpyToSymbol(table, t, sizeof(t)); tables<<<1, 4>>>(); cudaMemcpyFromSymbol(r, result, sizeof(r)); cudaDeviceSynchronize();
    cudaMemcpyFromSymbol(&c, counter, sizeof(c)); printf("tables %g %g %d %d\n", r[0], r[3], managed_counter, c);
    int blocks = 4; void* args[] = {&di}; 
    cudaError_t e = cudaLaunchCooperativeKernel((void*)coop, blocks, 32, args); int hi[8]; cudaMemcpy(hi, di, 32, cudaMemcpyDeviceToHost); printf("coop %s %d %d\n", cudaGetErrorName(e), hi[4], hi[7]);
    big<<<1, 32, 100000>>>(d); printf("big %s\n", cudaGetErrorString(cudaGetLastError()));
    cudaFuncSetAttribute(big, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000); big<<<1, 32, 100000>>>(d); printf("big %s\n", cudaGetErrorString(cudaGetLastError()));
    void (*fp)(int*) = hidden; (*fp)<<<1, 2>>>(di); fp<<<1, 2>>>(di); void (*ks[2])(float*, float) = {over, over}; ks[1]<<<1, 2>>>(d, 9); show("array");
    Launcher l{d}; l.go<3>(); show("member"); l.k<<<1, 1>>>(d, 8); show("member"); (&l)->k<<<1, 1>>>(d, 11); show("arrow");
    LAUNCH(over, 2, d, 1.25f); show("macro");
    if (argc > 5) over<<<1, 4>>>(d); else over<<<1, 1>>>(d, 77); show("else");
    for (int i = 0; i < 3; i++) ::over<<<1, 1, 0, nullptr>>>(d, (float)i); show("loop");
    void* a2[] = {&d, &t[3]}; cudaLaunchKernel((const void*)(void (*)(float*, float))over, dim3(1), dim3(2), a2, 0, 0); show("launchKernel");
    try { throw std::runtime_error("thrown"); } catch (const std::exception& x) { printf("caught %s\n", x.what()); }
    auto sp = std::make_shared<int>(3); static thread_local int tl = 4; tl++; assert(tl == 5); std::thread th([&] { over<<<1, 4>>>(d, 55); }); th.join(); show("thread");
    float* m; cudaMallocManaged(&m, 16); for (int i = 0; i < 4; i++) m[i] = i; over<<<1, 2>>>(m); apply<<<1, 4>>>([=] __device__ (int i) { m[i] += 1; }, 4); cudaDeviceSynchronize(); printf("managed %g %g %g\n", m[0], m[2], m[3]); cudaFree(m);
    size_t pitch; float* pd; cudaMallocPitch(&pd, &pitch, 12, 5); cudaMemcpy2D(pd, pitch, t, 4, 4, 4, cudaMemcpyHostToDevice); float back[4]; cudaMemcpy2D(back, 4, pd, pitch, 4, 4, cudaMemcpyDeviceToHost); printf("pitch %zu %g %g\n", pitch, back[0], back[3]);
    cudaStream_t s; cudaStreamCreate(&s); cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b); cudaEventRecord(a, s); over<<<1, 4, 0, s>>>(d); cudaEventRecord(b, s); cudaEventSynchronize(b); float ms = -1; cudaEventElapsedTime(&ms, a, b); printf("elapsed %d\n", ms > 0); cudaStreamDestroy(s);
    int bs, gs, nb; cudaOccupancyMaxPotentialBlockSize(&gs, &bs, tables, 0, 0); cudaOccupancyMaxActiveBlocksPerMultiprocessor(&nb, tables, 128, 0); printf("occupancy %d %d %d\n", gs, bs, nb);
    cudaDeviceProp prop; cudaGetDeviceProperties(&prop, 0); printf("%s %d.%d %d %zu %d\n", prop.name, prop.major, prop.minor, prop.multiProcessorCount, prop.sharedMemPerBlock, prop.clockRate > 0);
    over<<<0, 1>>>(d, 1.f); printf("zero: %s\n", cudaGetErrorName(cudaGetLastError())); over<<<1, 2048>>>(d, 1.f); printf("large: %s %s\n", cudaGetErrorName(cudaPeekAtLastError()), cudaGetErrorString(cudaGetLastError()));
    printf("%s\n", cudaGetErrorString(cudaSetDevice(3)));
    printf("threads %d\n", omp_get_num_threads());
    cudaFree(d); cudaFree(di); cudaFree(pd);
    return 42;
}
