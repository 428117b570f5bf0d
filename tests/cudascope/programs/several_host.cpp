#include <numeric>
#include <vector>

#include "cuda_runtime.h"
#include "several.cuh"

float sum_of(const float* x, int n) {
    std::vector<float> values(x, x + n);
    return std::accumulate(values.begin(), values.end(), 0.0f);
}
