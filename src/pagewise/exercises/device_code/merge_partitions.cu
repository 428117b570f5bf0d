// v2's second kernel: lesson 3's merge of the n partitions of one head, for any n. One thread per element of the head.
//     m = max mᵢ        out = Σ exp(mᵢ − m) · accᵢ / Σ exp(mᵢ − m) · lᵢ
// A partition without a visible token has mᵢ = −INFINITY, lᵢ = 0, accᵢ = 0; if there is no other, out is 0.
__global__ void merge_partitions(const float* ms,    // [n]
                                 const float* ls,    // [n]
                                 const float* accs,  // [n, D], not yet divided by l
                                 float* out,         // [D]
                                 int n) {
    const int d = threadIdx.x, D = blockDim.x;
    float m = -INFINITY, l = 0, acc = 0;
    for (int i = 0; i < n; ++i) m = fmaxf(m, ms[i]);
    if (m == -INFINITY) m = 0;
    for (int i = 0; i < n; ++i) {
        l += expf(ms[i] - m) * ls[i];
        acc += expf(ms[i] - m) * accs[i * D + d];
    }
    out[d] = l > 0 ? acc / l : 0;
}
