// Kernels whose results depend on the machine, unless the runner makes the machines alike.

// More numbers live across each barrier than registers that a called function keeps.
__global__ void keep_registers(const double* x, const long long* n, double* sums, long long* products) {
    int t = threadIdx.x;
    double a = x[t], b = a + 1, c = a * 3, d = a * b, e = b * c, f = c * d, g = d + e, h = e - f, i = f + g, j = g * 0.5;
    long long k = n[t], l = k + 1, m = k * 3, o = k * l, p = l ^ m, q = m + o, r = o ^ p, s = p + q, u = q ^ r, v = r + s;
    for (int turn = 0; turn < 3; ++turn) {
        __syncthreads();
        sums[t] += a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j;
        products[t] += k + 2 * l + 3 * m + 4 * o + 5 * p + 6 * q + 7 * r + 8 * s + 9 * u + 10 * v;
    }
}

__global__ void signed_char(const char* x, int* out) { out[threadIdx.x] = x[threadIdx.x] >> 1; }

__global__ void no_contraction(const float* x, float* out) {
    out[0] = x[0] * x[1] + x[2];
    out[1] = __fadd_rn(__fmul_rn(x[0], x[1]), x[2]);
    out[2] = __fmaf_rn(x[0], x[1], x[2]);
}

// Each thread rounds to nearest once, and up for a time. The clock may let the next thread begin in the middle of an
// operation that rounds up.
__global__ void take_turns_rounding(long long nanoseconds, double* nearest, int* wrong) {
    volatile double one = 1, three = 3;
    nearest[threadIdx.x] = one / three;
    double up = __ddiv_ru(one, three);
    for (long long end = clock64() + nanoseconds; clock64() < end;)
        for (int i = 0; i < 1000; ++i) wrong[threadIdx.x] += __ddiv_ru(one, three) != up;
}

template <class T>
__device__ void divide(const T* a, const T* b, T* out) { out[threadIdx.x] = a[threadIdx.x] / b[threadIdx.x]; }
template <class T>
__device__ void remain(const T* a, const T* b, T* out) { out[threadIdx.x] = a[threadIdx.x] % b[threadIdx.x]; }
__global__ void divide_i32(const int* a, const int* b, int* out) { divide(a, b, out); }
__global__ void divide_u32(const unsigned* a, const unsigned* b, unsigned* out) { divide(a, b, out); }
__global__ void divide_i64(const long long* a, const long long* b, long long* out) { divide(a, b, out); }
__global__ void divide_u64(const unsigned long long* a, const unsigned long long* b, unsigned long long* out) {
    divide(a, b, out);
}
__global__ void remain_i32(const int* a, const int* b, int* out) { remain(a, b, out); }
__global__ void remain_i64(const long long* a, const long long* b, long long* out) { remain(a, b, out); }

// The flags of the comparison are needed after the division.
__global__ void compare_around_division(const int* a, const int* b, int* out) {
    int x = a[threadIdx.x], y = b[threadIdx.x], quotient = x / y;
    out[threadIdx.x] = x < y ? quotient - 1 : x == y ? quotient + 10 : quotient + 100;
}

__global__ void stop_itself(int* out) {
    out[threadIdx.x] = 1;
    if (threadIdx.x == 3) __builtin_trap();
}

// A frame larger than a page, and a stack that ends in the middle of one.
__device__ int descend(int depth, volatile int* out) {
    volatile char frame[12345];
    frame[depth % 12345] = 1;
    return depth ? descend(depth - 1, out) + frame[depth % 12345] : out[threadIdx.x];
}
__global__ void use_stack(int* out, int depth) { out[threadIdx.x] = descend(depth, out); }

// Variables of this file alone, which a compiler may address from one another. (`check` puts gaps between them.)
static __device__ int first[3], second[5], third[7];
__global__ void use_variables(int* out) {
    for (int i = 0; i < 7; ++i) {
        if (i < 3) first[i] = 10 + i;
        if (i < 5) second[i] = 20 + i;
        third[i] = 30 + i;
    }
    for (int i = 0; i < 7; ++i) out[i] = (i < 3 ? first[i] : 0) + 100 * (i < 5 ? second[i] : 0) + 10000 * third[i];
}

__global__ void allocate(int* out) {
    int *a = (int*)malloc(64), *b = new int[4];
    a[15] = 7, b[3] = 5;
    out[threadIdx.x] = a[15] + b[3];
    free(a);
    delete[] b;
}
