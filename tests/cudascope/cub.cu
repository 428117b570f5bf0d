// What kernels use of cub, and what they get wrong with it.
#include <cub/cub.cuh>

__global__ void reductions(const float* x, float* out, int n) {  // sum of all, of the first n; largest; argmax
    using Reduce = cub::BlockReduce<float, 80>;
    using Pair = cub::KeyValuePair<int, float>;
    using Largest = cub::BlockReduce<Pair, 80>;
    __shared__ typename Reduce::TempStorage a, b;
    __shared__ typename Largest::TempStorage c;
    int t = threadIdx.x;
    float all = Reduce(a).Sum(x[t]), first = Reduce(b).Sum(x[t], n);
    __syncthreads();
    float four[4] = {x[t], x[t] + 1, x[t] - 1, 0};
    float most = Reduce(a).Reduce(four, cuda::maximum<>());
    Pair pair = Largest(c).Reduce(Pair{t, x[t]}, cub::ArgMax());
    if (t == 0) out[0] = all, out[1] = first, out[2] = most, out[3] = pair.key;
}
__global__ void reuses_storage(const float* x, float* out) {
    using Reduce = cub::BlockReduce<float, 80>;
    __shared__ typename Reduce::TempStorage temp;
    float sum = Reduce(temp).Sum(x[threadIdx.x]);
    float most = Reduce(temp).Reduce(x[threadIdx.x], cub::Max());  // the bug: thread 0 may still read
    if (threadIdx.x == 0) out[0] = sum, out[1] = most;
}

__global__ void warps(const int* x, int* out) {  // [5, 64]
    using Eight = cub::WarpReduce<int, 8>;
    using Scan = cub::WarpScan<int>;
    __shared__ typename Eight::TempStorage eight[8];
    __shared__ typename Scan::TempStorage scan[2];
    int t = threadIdx.x, inclusive, exclusive, total;
    out[t] = Eight(eight[t / 8]).Sum(x[t]);
    Scan(scan[t / 32]).InclusiveSum(x[t], inclusive);
    Scan(scan[t / 32]).ExclusiveSum(x[t], exclusive, total);
    out[64 + t] = inclusive, out[128 + t] = exclusive, out[192 + t] = total;
    Scan(scan[t / 32]).ExclusiveScan(x[t], exclusive, 5, cub::Max());
    out[256 + t] = exclusive;
}

struct Running {  // what earlier tiles summed up to
    int total;
    __device__ int operator()(int of_tile) {
        int before = total;
        total += of_tile;
        return before;
    }
};
__global__ void scans(const int* x, int* out, int n) {  // [4, n]: inclusive, exclusive, largest so far, tile by tile
    using Load = cub::BlockLoad<int, 96, 3, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
    using Store = cub::BlockStore<int, 96, 3, cub::BLOCK_STORE_TRANSPOSE>;
    using Scan = cub::BlockScan<int, 96>;
    __shared__ union {
        typename Load::TempStorage load;
        typename Store::TempStorage store;
        typename Scan::TempStorage scan;
    } temp;
    Running running{0};
    for (int start = 0; start < n; start += 288) {
        int items[3], sums[3], total;
        Load(temp.load).Load(x + start, items, n - start, -1000);
        __syncthreads();
        Scan(temp.scan).InclusiveSum(items, sums, total);
        __syncthreads();
        Store(temp.store).Store(out + start, sums, n - start);
        __syncthreads();
        Scan(temp.scan).ExclusiveSum(items, sums);
        __syncthreads();
        Store(temp.store).Store(out + n + start, sums, n - start);
        __syncthreads();
        Scan(temp.scan).InclusiveScan(items, sums, cub::Max());
        __syncthreads();
        Store(temp.store).Store(out + 2 * n + start, sums, n - start);
        __syncthreads();
        Scan(temp.scan).InclusiveScan(items, sums, cub::Sum(), running);
        __syncthreads();
        Store(temp.store).Store(out + 3 * n + start, sums, n - start);
        __syncthreads();
    }
}
__global__ void scan_of_one(const int* x, int* out) {
    using Scan = cub::BlockScan<int, 40>;
    __shared__ typename Scan::TempStorage temp;
    int before, total;
    Scan(temp).ExclusiveSum(x[threadIdx.x], before, total);
    out[threadIdx.x] = before + 1000 * total;
}
