// out[seq] = softmax(scale · q·K) V over the first seq_lens[seq] tokens of a sequence, and its m
// and l of lesson 3. Without tokens: out = 0, m = −INFINITY, l = 0. Slots after the last token may
// hold anything, NaN too. Grid (num_seqs), one warp each. The head has 32 elements, a block 16
// tokens, a sequence at most 128.
__global__ void paged_decode(const float4* q,      // [num_seqs][8] vecs of 4 elements
                             const float4* k,      // [num_blocks][16][8]: token, vec
                             const float* v,       // [num_blocks][16][32]: token, element
                             const int* tables,    // [num_seqs][max_blocks]
                             const int* seq_lens,  // [num_seqs]
                             float* m_out, float* l_out,  // [num_seqs]
                             float* out,           // [num_seqs][32]
                             int max_blocks, float scale) {
    __shared__ float weights[128];
    const unsigned ALL_LANES = 0xffffffff;
    const int seq = blockIdx.x, lane = threadIdx.x, length = seq_lens[seq];
    const int* table = tables + seq * max_blocks;
    float m = -INFINITY, l = 0, acc = 0;
    const int token = lane / 2, member = lane % 2;
    for (int first = 0; first < length; first += 16) {
        const float4* key = k + (table[first / 16] * 16 + token) * 8;
        float qk = 0;
        for (int vec = member; vec < 8; vec += 2) {
            const float4 a = q[seq * 8 + vec], b = key[vec];
            qk += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
        qk += __shfl_xor_sync(ALL_LANES, qk, 1);
        const float score = first + token < length ? scale * qk : -INFINITY;
        if (member == 0) weights[first + token] = score;
        m = fmaxf(m, score);
    }
    for (int distance = 16; distance > 0; distance /= 2) m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, distance));
    __syncwarp();
    for (int j = lane; j < length; j += 32) {
        weights[j] = expf(weights[j] - m);
        l += weights[j];
    }
    for (int distance = 16; distance > 0; distance /= 2) l += __shfl_xor_sync(ALL_LANES, l, distance);
    __syncwarp();
    if (lane == 0) m_out[seq] = m, l_out[seq] = l;
    for (int j = 0; j < length; ++j) acc += weights[j] * v[(table[j / 16] * 16 + j % 16) * 32 + lane];
    out[seq * 32 + lane] = length > 0 ? acc / l : 0;
}
