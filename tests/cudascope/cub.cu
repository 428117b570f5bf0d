// Kernels that use cub, some of them wrongly.
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
__global__ void sorts(const float* x, const int* keys, int* out) {  // [4, 192]
    using Sort = cub::BlockRadixSort<float, 64, 3, int>;
    using Integers = cub::BlockRadixSort<int, 64, 3>;
    using Merge = cub::BlockMergeSort<int, 64, 3>;
    __shared__ union {
        typename Sort::TempStorage sort;
        typename Integers::TempStorage integers;
        typename Merge::TempStorage merge;
    } temp;
    float number[3];
    int place[3], key[3];
    for (int i = 0; i < 3; ++i) place[i] = threadIdx.x * 3 + i, number[i] = x[place[i]], key[i] = keys[place[i]];
    Sort(temp.sort).SortDescending(number, place);
    for (int i = 0; i < 3; ++i) out[threadIdx.x * 3 + i] = place[i];
    __syncthreads();
    Integers(temp.integers).SortBlockedToStriped(key);
    for (int i = 0; i < 3; ++i) out[192 + 64 * i + threadIdx.x] = key[i];
    __syncthreads();
    for (int i = 0; i < 3; ++i) key[i] = keys[threadIdx.x * 3 + i];
    Integers(temp.integers).Sort(key, 0, 2);  // by their last two bits
    for (int i = 0; i < 3; ++i) out[2 * 192 + threadIdx.x * 3 + i] = key[i];
    __syncthreads();
    for (int i = 0; i < 3; ++i) key[i] = keys[threadIdx.x * 3 + i];
    Merge(temp.merge).Sort(key, [](int a, int b) { return a > b; }, 100, -7777);
    for (int i = 0; i < 3; ++i) out[3 * 192 + threadIdx.x * 3 + i] = key[i];
}
__global__ void neighbours(const int* keys, int* out, int valid) {  // [6, 192]
    using Flags = cub::BlockDiscontinuity<int, 64>;
    using Difference = cub::BlockAdjacentDifference<int, 64>;
    using Count = cub::BlockHistogram<int, 64, 3, 8>;
    __shared__ typename Flags::TempStorage flags;
    __shared__ typename Difference::TempStorage difference;
    __shared__ typename Count::TempStorage count;
    __shared__ int counts[8];
    int key[3], bin[3], heads[3], tails[3], less[3], first[3], more[3];
    for (int i = 0; i < 3; ++i) key[i] = keys[threadIdx.x * 3 + i], bin[i] = key[i] & 7;
    Flags(flags).FlagHeadsAndTails(heads, tails, key, cub::Inequality());
    auto minus = [](int a, int b) { return a - b; };
    Difference(difference).SubtractLeft(key, less, minus, 5);
    __syncthreads();
    Difference(difference).SubtractLeftPartialTile(key, first, minus, valid);
    __syncthreads();
    Difference(difference).SubtractRight(key, more, minus);
    Count(count).Histogram(bin, counts);
    __syncthreads();
    for (int i = 0; i < 3; ++i) {
        int at = threadIdx.x * 3 + i;
        out[at] = heads[i], out[192 + at] = tails[i], out[2 * 192 + at] = less[i], out[3 * 192 + at] = first[i];
        out[4 * 192 + at] = more[i];
    }
    if (threadIdx.x < 8) out[5 * 192 + threadIdx.x] = counts[threadIdx.x];
}

__global__ void edges(const int* keys, int* out) {  // items of other thread blocks are beside the first and the last key
    using Flags = cub::BlockDiscontinuity<int, 64>;
    using Difference = cub::BlockAdjacentDifference<int, 64>;
    __shared__ typename Flags::TempStorage flags;
    __shared__ typename Difference::TempStorage difference;
    int key[3], heads[3], tails[3], more[3];
    for (int i = 0; i < 3; ++i) key[i] = keys[threadIdx.x * 3 + i];
    Flags(flags).FlagHeads(heads, key, cub::Inequality(), keys[0]);
    __syncthreads();
    Flags(flags).FlagTails(tails, key, cub::Inequality(), keys[191]);
    Difference(difference).SubtractRight(key, more, [](int a, int b) { return a - b; }, 7);
    for (int i = 0; i < 3; ++i) {
        int at = threadIdx.x * 3 + i;
        out[at] = heads[i], out[192 + at] = tails[i], out[2 * 192 + at] = more[i];
    }
}
__global__ void wide_pairs(const float* x, long* out) {  // a class with padding at its end
    using Pair = cub::KeyValuePair<long, float>;
    using Reduce = cub::BlockReduce<Pair, 64>;
    __shared__ typename Reduce::TempStorage temp;
    Pair largest = Reduce(temp).Reduce(Pair(threadIdx.x, x[threadIdx.x]), cub::ArgMax());
    if (threadIdx.x == 0) out[0] = largest.key;
}
__global__ void pieces(const double* x, double* out, unsigned* bits) {  // [3, 32]
    double value = x[threadIdx.x];
    out[threadIdx.x] = cub::ShuffleDown<32>(value, 2, 30, 0xffffffff);
    out[32 + threadIdx.x] = cub::ShuffleUp<8>(value, 1, 0, 0xffffffff);
    out[64 + threadIdx.x] = cub::ShuffleIndex<16>(value, 3, 0xffffffff);
    using Raking = cub::BlockRakingLayout<int, 256>;
    static_assert(cub::Log2<32>::VALUE == 5 && cub::Log2<33>::VALUE == 6 && Raking::SEGMENT_LENGTH == 8);
    static_assert(Raking::RAKING_THREADS == 32 && sizeof(Raking::TempStorage) == 32 * 9 * 4);
    if (threadIdx.x == 0) bits[0] = cub::Traits<float>::TwiddleIn(0x80000001u), bits[1] = cub::Traits<int>::TwiddleIn(5);
}
