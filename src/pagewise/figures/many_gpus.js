{
  compute(v) {
    const share = v.S / v.n, others = v.n - 1;
    const ring = others * 4 * share * v.Hkv * v.D;
    const flops = 4 * v.H * v.D * (v.S * v.S - v.S * (v.S - 1) / 2) / v.n ** 2;
    return {
      held: 4 * v.num_layers * share * v.Hkv * v.D,
      ring,
      all_to_all: v.n <= v.Hkv ? others / v.n * share * 4 * (v.H + v.Hkv) * v.D : "too few KV heads",
      decode: others * 4 * v.H * (v.D + 1),
      compute: flops / v.peak_flops,
      send: ring / others / v.link_bandwidth,
    };
  },
  draw() {},
}
