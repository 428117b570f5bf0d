// Inline PTX as kernels use it: loads and stores, copies, barriers, flags, products of matrices.

#include <cuda_fp16.h>

// ---------------------------------------------------------------------------------------------- helpers

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ unsigned shared_address_in_ptx(const void* p) {
    unsigned address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(p));
    return address;
}
__device__ __forceinline__ void copy16(unsigned to, const void* from, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(16), "r"(bytes));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;\n" ::); }
template <int newest>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(newest) : "memory");
}

// ---------------------------------------------------------------------------------------------- threads

__global__ void who_am_i(unsigned* out) {  // [gridDim, blockDim, 8]
    unsigned me = blockIdx.x * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x;
    unsigned* mine = out + 8 * me;
    asm("mov.u32 %0, %%tid.x;" : "=r"(mine[0]));
    asm("mov.u32 %0, %%tid.y;" : "=r"(mine[1]));
    asm("mov.u32 %0, %%ctaid.x;" : "=r"(mine[2]));
    asm("mov.u32 %0, %%ntid.y;" : "=r"(mine[3]));
    asm("mov.u32 %0, %laneid;" : "=r"(mine[4]));
    asm("mov.u32 %0, %%warpid;" : "=r"(mine[5]));
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mine[6]));
    asm("mov.u32 %0, %%nctaid.x;" : "=r"(mine[7]));
}

__global__ void countdown(const int* from, int* out) {  // a loop with labels: how often n halves before it is 0
    int n = from[threadIdx.x];
    asm volatile(
        "{\n"
        "  .reg .pred done;\n"
        "  .reg .s32 steps, rest<2>;\n"
        "  mov.s32 steps, 0;\n"
        "  mov.s32 rest0, %1;\n"
        "AGAIN:\n"
        "  setp.eq.s32 done, rest0, 0;\n"
        "  @done bra FINISHED;\n"
        "  shr.s32 rest1, rest0, 1;\n"
        "  mov.s32 rest0, rest1;\n"
        "  add.s32 steps, steps, 1;\n"
        "  bra.uni AGAIN;\n"
        "FINISHED:\n"
        "  mov.s32 %0, steps;\n"
        "}\n"
        : "=r"(out[threadIdx.x])
        : "r"(n));
}

__global__ void early_exit(int* out) {
    asm volatile("{ .reg .pred p; setp.gt.u32 p, %0, 4; @p exit; }" ::"r"(threadIdx.x));
    out[threadIdx.x] = 1;
}

__global__ void wide_sum(const unsigned* a, const unsigned* b, unsigned* sum, unsigned* difference) {  // 96 bits
    asm("add.cc.u32 %0, %1, %2;" : "=r"(sum[0]) : "r"(a[0]), "r"(b[0]));
    asm("addc.cc.u32 %0, %1, %2;" : "=r"(sum[1]) : "r"(a[1]), "r"(b[1]));
    asm("addc.u32 %0, %1, %2;" : "=r"(sum[2]) : "r"(a[2]), "r"(b[2]));
    asm("sub.cc.u32 %0, %3, %6;\n\tsubc.cc.u32 %1, %4, %7;\n\tsubc.u32 %2, %5, %8;"
        : "=r"(difference[0]), "=r"(difference[1]), "=r"(difference[2])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(b[0]), "r"(b[1]), "r"(b[2]));
}

__global__ void updated_operand(const float* x, float* out) {  // 2 x + 1 where x > 0, else -x; x stays in a register
    float y = x[threadIdx.x];
    asm volatile(
        "{\n\t.reg .pred %%positive;\n\t"
        "setp.gt.f32 %%positive, %0, 0f00000000;\n\t"  // a comment, and /* another */
        "@%%positive fma.rn.f32 %0, %0, %1, 0d3FF0000000000000;\n\t"
        "@!%%positive neg.f32 %0, %0;\n\t}"
        : "+f"(y)
        : "f"(2.0f));
    out[threadIdx.x] = y;
}

// ---------------------------------------------------------------------------------------------- warps

__global__ void exchanges(const unsigned* x, unsigned* out) {  // [9, 32]
    unsigned lane = threadIdx.x, mine = x[lane], d, there;
    asm volatile("shfl.sync.idx.b32 %0, %1, 5, 0x1f, 0xffffffff;" : "=r"(d) : "r"(mine));
    out[lane] = d;
    asm volatile("{ .reg .pred p; shfl.sync.up.b32 %0|p, %2, 3, 0, -1; selp.u32 %1, 1, 0, p; }"
                 : "=r"(d), "=r"(there) : "r"(mine));
    out[32 + lane] = d + 1000 * there;
    asm volatile("{ .reg .pred p; shfl.sync.down.b32 %0|p, %2, %3, %4, -1; selp.u32 %1, 1, 0, p; }"
                 : "=r"(d), "=r"(there) : "r"(mine), "r"(1), "r"((32 - 8) << 8 | 0x1f));  // segments of 8
    out[64 + lane] = d + 1000 * there;
    asm volatile("shfl.sync.bfly.b32 %0, %1, 16, 31, -1;" : "=r"(d) : "r"(mine));
    out[96 + lane] = d;
    asm volatile("{ .reg .pred p; setp.gt.u32 p, %1, 20; vote.sync.ballot.b32 %0, p, -1; }" : "=r"(d) : "r"(lane));
    out[128 + lane] = d;
    asm volatile("{ .reg .pred p, q; setp.lt.u32 p, %1, 32; vote.sync.all.pred q, p, -1; selp.u32 %0, 1, 0, q; }"
                 : "=r"(d) : "r"(lane));
    out[160 + lane] = d;
    asm volatile("match.any.sync.b32 %0, %1, -1;" : "=r"(d) : "r"(lane / 4));
    out[192 + lane] = d;
    asm volatile("redux.sync.add.u32 %0, %1, -1;" : "=r"(d) : "r"(lane));
    out[224 + lane] = d;
    asm volatile("activemask.b32 %0;" : "=r"(d));
    out[256 + lane] = d;
}

// ---------------------------------------------------------------------------------------------- memory

__global__ void copies(const float* x, float* out, int n) {  // in fours, none past the end; then what is left
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    float a, b, c, d;
    asm volatile(
        "{ .reg .pred p; setp.le.s32 p, %5, %6;\n"
        "  @p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "  @p st.global.cs.v4.f32 [%7], {%0, %1, %2, %3}; }"
        : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(x + i), "r"(i + 4), "r"(n), "l"(out + i) : "memory");
    if (i < n && i + 4 > n)
        for (; i < n; ++i) {
            asm volatile("ld.global.f32 %0, [%1 + -4];" : "=f"(a) : "l"(x + i + 1));
            asm volatile("st.global.f32 [%0+4], %1;" ::"l"(out + i - 1), "f"(a) : "memory");
        }
}

__global__ void narrow_loads(const signed char* x, int* out) {
    int a;
    unsigned b;
    asm("ld.global.s8 %0, [%1];" : "=r"(a) : "l"(x + threadIdx.x));
    asm("ld.global.u8 %0, [%1];" : "=r"(b) : "l"(x + threadIdx.x));
    out[2 * threadIdx.x] = a, out[2 * threadIdx.x + 1] = (int)b;
}

__global__ void rotate_shared(const float* x, float* out) {
    __shared__ float before[8];
    __shared__ float row[64];
    before[threadIdx.x % 8] = 0;
    unsigned address = shared_address_in_ptx(row);
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address + 4 * threadIdx.x), "f"(x[threadIdx.x]) : "memory");
    asm volatile("bar.sync 0;" ::: "memory");
    float y;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(shared_address(row) + (threadIdx.x + 1) % 64 * 4));
    out[threadIdx.x] = __isShared(row) && !__isShared(x) && __isGlobal(x) ? y : -1.0f;
}

__global__ void atomics(unsigned* u, float* f, unsigned* halves) {
    __shared__ unsigned most;
    unsigned old;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(shared_address(&most)), "r"(threadIdx.x) : "memory");
    asm volatile("atom.global.add.u32 %0, [%1], 2;" : "=r"(old) : "l"(u) : "memory");
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], 0f3F000000;" ::"l"(f) : "memory");
    asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(halves), "r"(0x3C004000) : "memory");  // 1 and 2
    asm volatile("atom.global.cas.b32 %0, [%1], 0, 7;" : "=r"(old) : "l"(u + 1) : "memory");
    __syncthreads();
    if (threadIdx.x == 0 && blockIdx.x == 0) u[2] = most;
}

// One thread block writes, another waits for its flag.
__global__ void flag(int* data, int* ready, int* out) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = 10 + threadIdx.x;
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("st.global.release.gpu.b32 [%0], 1;" ::"l"(ready) : "memory");
    } else {
        int seen = 0;
        while (threadIdx.x == 0 && !seen) {
            asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
            if (!seen) asm volatile("nanosleep.u32 20;");
        }
        __syncthreads();
        out[threadIdx.x] = data[threadIdx.x];
    }
}
__global__ void volatile_flag(int* ready, int* out) {
    if (blockIdx.x == 1) {
        for (long long start = clock64(); clock64() - start < 20'000'000;) {}  // the other one waits by now
        asm volatile("st.volatile.global.b32 [%0], 5;" ::"l"(ready) : "memory");
        return;
    }
    int seen = 0;
    while (!seen) asm volatile("ld.volatile.global.b32 %0, [%1];" : "=r"(seen) : "l"(ready));
    *out = seen;
}
__global__ void flag_not_released(int* data, int* ready, int* out) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = 10 + threadIdx.x;
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("st.relaxed.gpu.global.b32 [%0], 1;" ::"l"(ready) : "memory");
    } else {
        int seen = 0;
        while (threadIdx.x == 0 && !seen)
            asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
        __syncthreads();
        out[threadIdx.x] = data[threadIdx.x];  // the bug: nothing orders it after the other thread block's write
    }
}

// Two pairs of warps, each with a barrier of its own; then all of them.
template <int barriers>
__device__ __forceinline__ void exchange_in_pairs(const float* x, float* out) {
    __shared__ float row[128];
    int t = threadIdx.x, pair = t / 64;
    row[t] = x[t];
    asm volatile("bar.sync %0, 64;" ::"r"(1 + pair % barriers) : "memory");
    out[t] = row[t ^ 32];
}
__global__ void pairs_of_warps(const float* x, float* out) { exchange_in_pairs<2>(x, out); }
__global__ void pairs_share_a_barrier(const float* x, float* out) {
    exchange_in_pairs<1>(x, out);  // the bug: whoever comes first is freed with whoever comes second
}
__global__ void produce_and_consume(const float* x, float* out) {  // two buffers; full: 1 and 2, empty: 3 and 4
    __shared__ float buffers[2][32];
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 6; ++i) {
        int which = i % 2;
        if (threadIdx.x < 32) {
            if (i >= 2) asm volatile("barrier.sync %0, 64;" ::"r"(3 + which) : "memory");
            buffers[which][lane] = x[32 * i + lane];
            asm volatile("bar.arrive %0, 64;" ::"r"(1 + which) : "memory");
        } else {
            asm volatile("bar.sync %0, 64;" ::"r"(1 + which) : "memory");
            out[32 * i + lane] = buffers[which][31 - lane];
            if (i < 4) asm volatile("barrier.arrive %0, 64;" ::"r"(3 + which) : "memory");
        }
    }
}

// ---------------------------------------------------------------------------------------------- matrices

// C[16, 8] = A[16, K] B[K, 8], both of halves, B stored as [8, K]. Two stages of shared memory of 16 columns each.
template <bool waits, bool all_lanes>
__device__ __forceinline__ void product(const __half* a, const __half* b, float* c, int k) {
    __shared__ __align__(16) __half as[2][16][16], bs[2][8][16];
    int lane = threadIdx.x, stages = k / 16;
    float sum[4] = {};
    auto fetch = [&](int stage) {
        int row = lane / 2, part = lane % 2 * 8, from = row * k + 16 * stage + part;
        copy16(shared_address(&as[stage % 2][row][part]), a + from, true);
        if (row < 8) copy16(shared_address(&bs[stage % 2][row][part]), b + from, true);
    };
    fetch(0);
    commit();
    for (int stage = 0; stage < stages; ++stage) {
        if (stage + 1 < stages) fetch(stage + 1);
        commit();
        if (waits) wait<1>();
        __syncwarp();
        unsigned ra[4], rb[2];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3])
                     : "r"(shared_address(&as[stage % 2][lane % 16][lane / 16 * 8])));
        asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 {%0, %1}, [%2];\n"
                     : "=r"(rb[0]), "=r"(rb[1])
                     : "r"(shared_address(&bs[stage % 2][lane % 8][lane / 8 % 2 * 8])));
        if (all_lanes || lane < 31)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                         : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
        __syncwarp();
    }
    for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}
__global__ void tensor_cores(const __half* a, const __half* b, float* c, int k) { product<true, true>(a, b, c, k); }
__global__ void never_waits(const __half* a, const __half* b, float* c, int k) { product<false, true>(a, b, c, k); }
__global__ void a_lane_stays_away(const __half* a, const __half* b, float* c, int k) {
    product<true, false>(a, b, c, k);
}

// Eight matrices, each transposed on its way: by ldmatrix, by movmatrix, by stmatrix.
__global__ void transposes(const unsigned short* x, unsigned short* out) {  // [3, 8, 8]
    __shared__ __align__(16) unsigned short in[8][8], turned[8][8];
    int lane = threadIdx.x;
    unsigned a, b;
    for (int i = lane; i < 64; i += 32) in[i / 8][i % 8] = x[i];
    __syncwarp();
    unsigned row = shared_address(&in[lane % 8][0]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(a) : "r"(row));
    *(unsigned*)&out[2 * lane] = a;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(a) : "r"(row));
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
    *(unsigned*)&out[64 + 2 * lane] = b;
#if __CUDA_ARCH__ >= 900
    row = shared_address(&turned[lane % 8][0]);
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(a));
    __syncwarp();
    for (int i = lane; i < 64; i += 32) out[128 + i] = turned[i / 8][i % 8];
#endif
}

// ---------------------------------------------------------------------------------------------- refused, and bugs

__global__ void knows_most(int* out, int use_what_is_not_known) {
    __shared__ unsigned long long barrier;
    if (use_what_is_not_known) asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(&barrier)));
    out[threadIdx.x] = 1;
}
__global__ void no_barrier(const float* x, float* out) {
    __shared__ float row[64];
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared_address(&row[threadIdx.x])), "f"(x[threadIdx.x]) : "memory");
    float y;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(shared_address(&row[63 - threadIdx.x])));
    out[threadIdx.x] = y;
}
__global__ void reads_past_the_end(const float* x, float* out) {
    float y;
    asm volatile("ld.global.f32 %0, [%1+4];" : "=f"(y) : "l"(x + threadIdx.x));
    out[threadIdx.x] = y;
}
__global__ void misaligned(const float* x, float* out) {
    float y, z;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(y), "=f"(z) : "l"(x + threadIdx.x));
    out[threadIdx.x] = y + z;
}
