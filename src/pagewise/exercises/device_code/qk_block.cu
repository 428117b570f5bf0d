// scores[token] = scale · q·k for the 16 tokens of one block, −INFINITY for those from num_tokens on (their slots hold
// anything, NaN too). One warp: a thread group of 2 threads per token, each reads every second vec of 4 floats.
__global__ void qk_block(const float4* q,  // [8] vecs: a head of 32 elements
                         const float4* k,  // [8][16]: vec, token (vLLM's layout: x = 4)
                         float* scores,    // [16]
                         int num_tokens, float scale) {
    const int token = threadIdx.x / 2, member = threadIdx.x % 2;
    float qk = 0;
    for (int vec = member; vec < 8; vec += 2) {
        const float4 a = q[vec], b = k[vec * 16 + token];
        qk += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    qk += __shfl_xor_sync(0xffffffff, qk, 1);
    if (member == 0) scores[token] = token < num_tokens ? scale * qk : -INFINITY;
}
