// cub::BlockRadixSort and cub::BlockMergeSort: stable sorts of the items of a thread block. Each thread counts what
// comes before its items, so a sort of n items takes n n comparisons.
#pragma once

#include "block_scan.cuh"

namespace cub {

// The sort of both. `before(a, b)` says whether key a comes before key b; equal keys keep their order.
template <class K, int X, int N, class V, int Y, int Z>
class BlockSort {
    static constexpr int threads = X * Y * Z, items = threads * N;
    static constexpr bool has_values = !std::is_same_v<V, NullType>;

public:
    struct Storage {
        Room<K, items> keys;
        Room<V, has_values ? items : 1> values;
    };

    template <class Before>
    SIMT_METHOD static void sort(
        Storage& temp, K (&keys)[N], V* values, int valid, bool striped, Before before, Line line) {
        int first = thread_rank() * N, ranks[N];
        for (int i = 0; i < N; ++i) temp.keys.put(first + i, keys[i]);
        __syncthreads(line.number);
        count(temp, first, valid, before, ranks);
        __syncthreads(line.number);
        for (int i = 0; i < N; ++i) {
            temp.keys.put(ranks[i], keys[i]);
            if constexpr (has_values) temp.values.put(ranks[i], values[i]);
        }
        __syncthreads(line.number);
        for (int i = 0; i < N; ++i) {
            int at = striped ? thread_rank() + threads * i : first + i;
            keys[i] = temp.keys[at];
            if constexpr (has_values) values[i] = temp.values[at];
        }
    }

private:
    template <class Before>
    SIMT_UNSEEN static __attribute__((noinline)) void count(
        Storage& temp, int first, int valid, Before before, int* ranks) {
        for (int i = 0; i < N; ++i) {
            int own = first + i;
            ranks[i] = own;
            if (own >= valid) continue;
            ranks[i] = 0;
            for (int other = 0; other < valid; ++other)
                ranks[i] += before(temp.keys[other], temp.keys[own])
                    || (other < own && !before(temp.keys[own], temp.keys[other]));
        }
    }
};

template <class K, int X, int N, class V = NullType, int RADIX_BITS = 4, bool MEMOIZE_OUTER_SCAN = true,
          BlockScanAlgorithm INNER_SCAN_ALGORITHM = BLOCK_SCAN_WARP_SCANS, auto SMEM_CONFIG = 0, int Y = 1, int Z = 1,
          int LEGACY_PTX_ARCH = 0>
class BlockRadixSort
    : public Collective<typename BlockSort<K, X, N, V, Y, Z>::Storage,
                        BlockRadixSort<K, X, N, V, RADIX_BITS, MEMOIZE_OUTER_SCAN, INNER_SCAN_ALGORITHM, SMEM_CONFIG, Y,
                                       Z, LEGACY_PTX_ARCH>> {
    static constexpr int all_bits = 8 * sizeof(K);

public:
    using BlockRadixSort::Collective::Collective;

#define SIMT_SORT(name, descending, striped)                                                                       \
    SIMT_METHOD void name(K (&keys)[N], int begin = 0, int end = all_bits, Line line = {__builtin_LINE()}) {         \
        sort(keys, (V*)nullptr, begin, end, descending, striped, line);                                            \
    }                                                                                                              \
    template <class Values>                                                                                        \
    SIMT_METHOD void name(                                                                                         \
        K (&keys)[N], Values (&values)[N], int begin = 0, int end = all_bits, Line line = {__builtin_LINE()}) {      \
        sort(keys, values, begin, end, descending, striped, line);                                                 \
    }
    SIMT_SORT(Sort, false, false)
    SIMT_SORT(SortDescending, true, false)
    SIMT_SORT(SortBlockedToStriped, false, true)
    SIMT_SORT(SortDescendingBlockedToStriped, true, true)
#undef SIMT_SORT

private:
    using Bits = typename Traits<K>::UnsignedBits;
    SIMT_UNSEEN static Bits digits(const K& key, int begin, int end) {
        Bits bits;
        __builtin_memcpy(&bits, &key, sizeof(K));
        if (Traits<K>::is_float && bits == Traits<K>::HIGH_BIT) bits = 0;  // -0 equals 0
        bits = Bits(Traits<K>::TwiddleIn(bits) >> begin);
        return end - begin < all_bits ? Bits(bits & ((Bits(1) << (end - begin)) - 1)) : bits;
    }
    SIMT_METHOD void sort(K (&keys)[N], V* values, int begin, int end, bool descending, bool striped, Line line) {
        auto before = [=](const K& a, const K& b) SIMT_UNSEEN {
            return descending ? digits(b, begin, end) < digits(a, begin, end)
                              : digits(a, begin, end) < digits(b, begin, end);
        };
        BlockSort<K, X, N, V, Y, Z>::sort(this->temp, keys, values, X * Y * Z * N, striped, before, line);
    }
};

template <class K, int X, int N, class V = NullType, int Y = 1, int Z = 1>
class BlockMergeSort
    : public Collective<typename BlockSort<K, X, N, V, Y, Z>::Storage, BlockMergeSort<K, X, N, V, Y, Z>> {
    static constexpr int items = X * Y * Z * N;

public:
    using BlockMergeSort::Collective::Collective;

    template <class Less>
    SIMT_METHOD void Sort(K (&keys)[N], Less less, Line line = {__builtin_LINE()}) {
        sort(keys, (V*)nullptr, less, items, line);
    }
    template <class Less>
    SIMT_METHOD void Sort(K (&keys)[N], V (&values)[N], Less less, Line line = {__builtin_LINE()}) {
        sort(keys, values, less, items, line);
    }
    // Only the first `valid` items are sorted. `largest` takes the place of the others.
    template <class Less>
    SIMT_METHOD void Sort(K (&keys)[N], Less less, int valid, K largest, Line line = {__builtin_LINE()}) {
        fill(keys, valid, largest);
        sort(keys, (V*)nullptr, less, valid, line);
    }
    template <class Less>
    SIMT_METHOD void Sort(
        K (&keys)[N], V (&values)[N], Less less, int valid, K largest, Line line = {__builtin_LINE()}) {
        fill(keys, valid, largest);
        sort(keys, values, less, valid, line);
    }
    template <class... Arguments>
    SIMT_METHOD void StableSort(Arguments&&... arguments) { Sort(arguments...); }

private:
    template <class Less>
    SIMT_METHOD void sort(K (&keys)[N], V* values, Less less, int valid, Line line) {
        BlockSort<K, X, N, V, Y, Z>::sort(this->temp, keys, values, valid, false, less, line);
    }
    SIMT_METHOD static void fill(K (&keys)[N], int valid, const K& largest) {
        for (int i = 0; i < N; ++i)
            if (thread_rank() * N + i >= valid) keys[i] = largest;
    }
};
}  // namespace cub
