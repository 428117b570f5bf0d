// The draw of tokens on a CPU, as engine/sampling.py describes it (lesson 9).
//
// A limit on tokens (top_k, top_p, min_p) keeps a beginning of the vocabulary in the order of the scores, and the token
// that a number draws is the next one behind a beginning. Only the few tokens where a beginning ends need to be sorted.
//
// Scores and weights are float32, and sums of weights float64. The bits of a row depend on no other row.

#include "vectors.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace {

// How a token is drawn: the parameters of a request in engine/sampling.py, and a number in [0, 1). At temperature 0 the
// likeliest token is taken, the first of equal ones.
struct Draw {
    double temperature, top_k, top_p, min_p, u;  // top_k and top_p are infinite if they leave out no token
};

using Row = std::vector<float>;  // of as many whole vectors as hold it

float max_of(const Row& x) {
    Floats most = load(&x[0]);
    for (size_t d = W; d < x.size(); d += W) {
        const Floats v = load(&x[d]);
        most = v > most ? v : most;
    }
    return max_of(most);
}

// Return the sum of exp(x - most).
double sum_of_weights(const Row& x, float most) {
    Floats total = {};
    for (size_t d = 0; d < x.size(); d += W) total += exp2((load(&x[d]) - most) * LOG2_E);
    return sum_of(total);
}

// The tokens whose weight is above 0, in falling order of their scores, of equal scores the smaller id first. They are
// counted by ranges of scores. Only a range in which something ends is sorted.
class InOrder {
  public:
    struct End {
        int64_t tokens;
        double weight;
        int64_t next;  // the token behind them
    };

    // Scores are at most 0, and the largest is 0.
    InOrder(const Row& scores, const Row& weights) : scores(scores), weights(weights), range_of(scores.size()) {
        Floats lowest = {};
        for (size_t d = 0; d < scores.size(); d += W) {
            const Floats score = load(&scores[d]), low = score < lowest ? score : lowest;
            lowest = load(&weights[d]) > 0 ? low : lowest;
        }
        const float scale = (RANGES - 1) / std::max(max_of(-lowest), 1e-30f);
        for (size_t d = 0; d < scores.size(); d += W) {
            const Floats place = load(&weights[d]) > 0 ? -load(&scores[d]) * scale : Floats{} + RANGES;
            const Shorts numbers = __builtin_convertvector(__builtin_convertvector(place, Ints), Shorts);
            std::memcpy(&range_of[d], &numbers, sizeof numbers);
        }
        for (size_t i = 0; i < scores.size(); i++) {
            Range& range = ranges[range_of[i]];
            range.tokens++;
            range.weight += weights[i];
        }
    }

    // Return the longest beginning of at most `most` tokens and of at most this weight.
    End beginning(double most, double weight) const {
        End end = {0, 0.0, -1};
        for (int range = 0; range < RANGES; range++) {
            if (end.tokens + ranges[range].tokens <= most && end.weight + ranges[range].weight <= weight) {
                end.tokens += ranges[range].tokens;
                end.weight += ranges[range].weight;
                continue;
            }
            std::vector<std::pair<float, int64_t>> members;
            const auto last = range_of.end();
            for (auto at = std::find(range_of.begin(), last, range); at != last; at = std::find(at + 1, last, range))
                members.emplace_back(-scores[at - range_of.begin()], at - range_of.begin());
            std::sort(members.begin(), members.end());
            for (const auto& [_, token] : members) {
                if (end.tokens + 1 > most || end.weight + weights[token] > weight) {
                    end.next = token;
                    return end;
                }
                end.tokens++;
                end.weight += weights[token];
            }
        }
        return end;
    }

  private:
    static constexpr int RANGES = 1024;
    struct Range {
        int64_t tokens = 0;
        double weight = 0;
    } ranges[RANGES + 1];  // the last one: of the tokens without weight
    const Row &scores, &weights;
    std::vector<uint16_t> range_of;  // each token
};

// Draws in the order of scores. The tokens within top_k, top_p and min_p have a total weight. The result is the first
// token up to which the weights exceed the part u of this total.
int64_t drawn_in_order(const Row& scores, const Row& weights, const Draw& how) {
    const InOrder order(scores, weights);
    InOrder::End kept = order.beginning(how.top_k, INFINITY);
    if (how.top_p < 1) {  // the token that crosses it is included
        const InOrder::End below = order.beginning(kept.tokens, std::nextafter(how.top_p * kept.weight, 0.0));
        if (below.tokens < kept.tokens) kept = {below.tokens + 1, below.weight + weights[below.next], -1};
    }
    if (const float least = how.min_p; least > 0) {
        InOrder::End likely = {0, 0.0, -1};
        for (const float weight : weights)
            if (weight >= least) {
                likely.tokens++;
                likely.weight += weight;
            }
        if (likely.tokens < kept.tokens) kept = likely;
    }
    return order.beginning(kept.tokens - 1, how.u * kept.weight).next;
}

// Draws in the order of ids, in the same way, where only min_p limits the tokens.
int64_t drawn_by_id(const Row& weights, const Draw& how) {
    constexpr size_t PART = 256;
    const float least = how.min_p;
    std::vector<double> parts;
    double total = 0, sum = 0;
    for (size_t start = 0; start < weights.size(); start += PART) {
        Floats part = {};
        for (size_t d = start; d < std::min(start + PART, weights.size()); d += W) {
            const Floats weight = load(&weights[d]);
            part += weight >= least ? weight : Floats{};
        }
        parts.push_back(sum_of(part));
        total += parts.back();
    }
    const double end = how.u * total;
    size_t i = 0;
    for (size_t part = 0; part < parts.size() && sum + parts[part] <= end; part++, i += PART) sum += parts[part];
    for (; i < weights.size() && sum <= end; i++) sum += weights[i] >= least ? weights[i] : 0.0f;
    do i--;
    while (weights[i] < least || weights[i] == 0);  // rounded sums may have led behind the last one
    return i;
}

// Draws a token for each row: for row rows[i][0] of the logits x by the scores rows[i][1] of `changed`, or by the logits
// themselves if this is -1. log p is the logits'. It is NaN if these or the scores have no largest number.
template <class T>
void draw(Tensor x, Tensor changed, const int64_t (*rows)[2], const Draw* how, int64_t count, int64_t n,
          int64_t* tokens, float* logprobs, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        static thread_local Row scores, weights;  // which the next row finds in a cache
        const auto read_row = [&](const auto* from) {
            scores.assign((n + W - 1) / W * W, -INFINITY);
            int64_t d = 0;
            for (; d + W <= n; d += W) store(&scores[d], load(from + d));
            for (; d < n; d++) scores[d] = value(from[d]);
        };
        const T* logits = at<T>(x, rows[i][0], 0, 0);
        read_row(logits);
        const float most = max_of(scores);
        const float log_sum = std::log(sum_of_weights(scores, most));
        if (rows[i][1] >= 0) read_row(at<float>(changed, rows[i][1], 0, 0));
        const float best = max_of(scores);
        if (!std::isfinite(log_sum) || !std::isfinite(best)) {
            tokens[i] = 0;
            logprobs[i] = NAN;
            continue;
        }
        if (how[i].temperature == 0) {
            tokens[i] = std::find(scores.begin(), scores.end(), best) - scores.begin();
        } else {
            weights.resize(scores.size());
            for (size_t d = 0; d < scores.size(); d += W) {
                const Floats score = (load(&scores[d]) - best) / (float)how[i].temperature;
                store(&scores[d], score);
                store(&weights[d], exp2(score * LOG2_E));
            }
            const bool ordered = how[i].top_k < INFINITY || how[i].top_p < 1;
            tokens[i] = ordered ? drawn_in_order(scores, weights, how[i]) : drawn_by_id(weights, how[i]);
        }
        logprobs[i] = value(logits[tokens[i]]) - most - log_sum;
    }
}

}  // namespace

#define FUNCTION(name, T)                                                                                      \
    extern "C" void draw_##name(Tensor x, Tensor changed, const int64_t (*rows)[2], const Draw* how,           \
                                int64_t count, int64_t n, int64_t* tokens, float* logprobs, int num_threads) { \
        draw<T>(x, changed, rows, how, count, n, tokens, logprobs, num_threads);                               \
    }
FUNCTION(float32, float)
FUNCTION(bfloat16, BFloat16)
