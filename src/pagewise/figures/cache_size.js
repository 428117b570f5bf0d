{
  compute(v) {
    const token = 2 * v.num_layers * v.num_kv_heads * v.head_size * v.itemsize;
    const sequence = token * v.context, left = v.memory - v.weights;
    return { token, sequence, weights: v.weights, left, fit: Math.max(0, Math.floor(left / sequence)) };
  },
  draw() {},
}
