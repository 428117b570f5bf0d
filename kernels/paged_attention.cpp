// Paged attention of one query per sequence on a CPU (lesson 9).
//
// The engine's decode steps read every cached key and value once, so the time of a good kernel is that of the memory.
// torch has no operator that reads keys where a block table says. It needs a gathered copy, which is written and read
// again. This kernel reads the blocks in place.
//
//     a task     one sequence and one KV head, with the query heads that share this KV head, four at a time
//     a tile     W keys, wherever their blocks are: one vector of scores for each query head
//     softmax    online (lesson 3), in base 2 and in float32, so a tile is read once
//
// Scores and sums are float32. A task depends on no other, so the bits of a row depend on its own sequence alone. If a
// result is not finite, `attend` returns 0, and the caller computes the rows by other means.

#include "vectors.h"

#include <vector>

namespace {

constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int AT_ONCE = W / 4;  // vectors of each of 4 heads, whose sums fit into the registers

// Lanes i and i ^ step of a are added up where bit `step` of i is 0, those of b where it is 1.
template <int step> Floats folded(Floats a, Floats b) {
    Ints own, other;
    for (int i = 0; i < W; i++) {
        own[i] = i & step ? W + i : i;
        other[i] = (i & step ? W : 0) + (i ^ step);
    }
    return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

// Lane i of the result is the sum of vector i. The vectors are overwritten.
template <int step = W / 2> Floats sums_of(Floats (&x)[W]) {
    for (int i = 0; i < step; i++) x[i] = folded<step>(x[i], x[i + step]);
    if constexpr (step > 1) return sums_of<step / 2>(x);
    return x[0];
}

struct Sequences {
    const int64_t* row;  // of the query and of the result
    const int32_t* table;
    const int32_t* first;  // the first key that the query sees
    const int32_t* length;  // of the sequence, its newest token included
    int64_t count, blocks_of_table;
};

struct Sizes {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
};

// One tile for G query heads: its part of their scores, and of their sums. `vectors` is D / W.
template <int G, class T> struct Tile {
    const T *keys[W], *values[W];
    int64_t num_keys, vectors;

    void scores(const Floats* queries, Floats (&out)[G]) const {
        Floats products[G][W];
#pragma GCC unroll 1
        for (int j = 0; j < W; j += AT_ONCE) {
            Floats sum[G][AT_ONCE] = {};
            for (int64_t d = 0; d < vectors; d++)
                for (int i = 0; i < AT_ONCE; i++) {
                    const Floats key = load(keys[j + i] + d * W);
                    for (int g = 0; g < G; g++) sum[g][i] += queries[g * vectors + d] * key;
                }
            for (int g = 0; g < G; g++)
                for (int i = 0; i < AT_ONCE; i++) products[g][j + i] = sum[g][i];
        }
        for (int g = 0; g < G; g++) {
            out[g] = sums_of(products[g]);
            for (int64_t j = num_keys; j < W; j++) out[g][j] = -INFINITY;
        }
    }

    template <int n> void add(const float (&weights)[G][W], const float* corrections, Floats* sums) const {
        for (int64_t d = 0; d < vectors; d += n) {
            Floats sum[G][n];
            for (int g = 0; g < G; g++)
                for (int i = 0; i < n; i++) sum[g][i] = sums[g * vectors + d + i] * corrections[g];
            for (int64_t j = 0; j < num_keys; j++)
                for (int i = 0; i < n; i++) {
                    const Floats value = load(values[j] + (d + i) * W);
                    for (int g = 0; g < G; g++) sum[g][i] += weights[g][j] * value;
                }
            for (int g = 0; g < G; g++)
                for (int i = 0; i < n; i++) sums[g * vectors + d + i] = sum[g][i];
        }
    }
};

// Attention of G query heads that share a KV head. Return whether all results are finite.
template <int G, class T>
bool attend_to(int64_t b, int64_t head, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Sequences& sequences, const Sizes& sizes, float scale) {
    const int64_t vectors = sizes.head_dim / W, P = sizes.block_size, kv_head = head * sizes.num_kv_heads / sizes.num_heads;
    const int64_t row = sequences.row[b], length = sequences.length[b];
    const int32_t* table = sequences.table + b * sequences.blocks_of_table;
    std::vector<Floats> queries(G * vectors), sums(G * vectors, Floats{});
    float maximum[G];
    Floats total[G] = {};  // of the weights, in each lane
    for (int g = 0; g < G; g++) {
        maximum[g] = -INFINITY;
        for (int64_t d = 0; d < vectors; d++)
            queries[g * vectors + d] = load(at<T>(q, row, head + g, 0) + d * W) * scale;
    }

    Tile<G, T> tile, next;
    tile.vectors = next.vectors = vectors;
    const auto find = [&](int64_t start) {  // the next tile, whose cache lines arrive while this one is computed
        int64_t block = start / P, offset = start % P;
        next.num_keys = length - start < W ? length - start : W;
        for (int64_t j = 0; j < W; j++) {
            next.keys[j] = at<T>(k, table[block], offset, kv_head);
            next.values[j] = at<T>(v, table[block], offset, kv_head);
            for (int64_t d = 0; d < sizes.head_dim; d += LINE / sizeof(T)) {
                __builtin_prefetch(next.keys[j] + d);
                __builtin_prefetch(next.values[j] + d);
            }
            if (j + 1 < next.num_keys && ++offset == P) block++, offset = 0;  // else the last key again, to be masked
        }
    };
    if (sequences.first[b] < length) find(sequences.first[b]);
    for (int64_t start = sequences.first[b]; start < length; start += W) {
        tile = next;
        if (start + W < length) find(start + W);
        Floats scores[G];
        tile.scores(queries.data(), scores);
        float weights[G][W], corrections[W];
        Floats change = {};
        for (int g = 0; g < G; g++) {
            const float highest = max_of(scores[g]), m = highest > maximum[g] ? highest : maximum[g];
            change[g] = maximum[g] - m;
            maximum[g] = m;
        }
        store(corrections, exp2(change));
        for (int g = 0; g < G; g++) {
            const Floats p = exp2(scores[g] - maximum[g]);
            store(weights[g], p);
            total[g] = total[g] * corrections[g] + p;
        }
        if (vectors % AT_ONCE == 0)
            tile.template add<AT_ONCE>(weights, corrections, sums.data());
        else
            tile.template add<1>(weights, corrections, sums.data());
    }

    Ints finite = Ints{} - 1;
    for (int g = 0; g < G; g++) {
        const float sum = sum_of(total[g]);
        for (int64_t d = 0; d < vectors; d++) {
            const Floats x = sums[g * vectors + d] / sum;
            finite &= x - x == 0.0f;
            store(at<T>(out, row, head + g, 0) + d * W, x);
        }
    }
    bool all = true;
    for (int i = 0; i < W; i++) all = all && finite[i];
    return all;
}

template <class T>
int attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Sequences& sequences,
           const Sizes& sizes, float scale, int num_threads) {
    const int64_t group = sizes.num_heads / sizes.num_kv_heads, tasks = sequences.count * sizes.num_kv_heads;
    int finite = 1;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) reduction(&& : finite)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t b = task / sizes.num_kv_heads, first = task % sizes.num_kv_heads * group;
        for (int64_t g = 0; g < group; g += 4) {
            auto* const attend_to_some = group - g >= 4   ? attend_to<4, T>
                                         : group - g == 3 ? attend_to<3, T>
                                         : group - g == 2 ? attend_to<2, T>
                                                          : attend_to<1, T>;
            finite = attend_to_some(b, first + g, q, k, v, out, sequences, sizes, scale) && finite;
        }
    }
    return finite;
}

}  // namespace

// `scale` includes log2(e). The tensors are q and out [rows, H, D], k and v [blocks, P, Hkv, D].
#define FUNCTION(name, T)                                                                                       \
    extern "C" int name(Tensor q, Tensor k, Tensor v, Tensor out, Sequences sequences, Sizes sizes, float scale, \
                        int num_threads) {                                                                      \
        return attend<T>(q, k, v, out, sequences, sizes, scale, num_threads);                                   \
    }
FUNCTION(attend_float32, float)
FUNCTION(attend_bfloat16, BFloat16)
