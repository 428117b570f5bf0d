{
  compute(v) {
    const seconds = (n, cached) => {
      const computed = cached ? 1 : n, pairs = cached ? n : n * (n + 1) / 2;
      const attention = 4 * v.num_layers * v.num_heads * v.head_size * pairs;
      const flops = v.batch * (2 * v.layers * computed + 2 * v.head + attention);
      const kept = cached ? v.batch * 2 * n * v.num_layers * v.num_kv_heads * v.head_size * 2 : 0;
      return Math.max(flops / v.peak_flops, (2 * (v.layers + v.head) + kept) / v.bandwidth);
    };
    const without = seconds(v.n, false), cached = seconds(v.n, true);
    const weights = 2 * (v.layers + v.head), ridge = v.peak_flops / v.bandwidth / v.batch;
    return { without, cached, gain: `${Number((without / cached).toPrecision(3))}`, weights, ridge, seconds };
  },
  draw(root, v, r) {
    const svg = root.querySelector("svg");
    const [first, last, low, high, left, right, bottom, top] = svg.dataset.axes.split(" ").map(Number);
    const share = (x, from, to) => Math.min(1, Math.max(0, Math.log(x / from) / Math.log(to / from)));
    const across = (n) => left + (right - left) * share(n, first, last);
    const up = (seconds) => bottom + (top - bottom) * share(seconds, low, high);
    for (const name of ["without a cache", "with a cache"]) {
      const cached = name === "with a cache", points = [];
      for (let n = first; n <= last; n *= 2) points.push(`${across(n)},${up(r.seconds(n, cached))}`);
      svg.querySelector(`[data-curve="${name}"]`).setAttribute("points", points.join(" "));
      const dot = svg.querySelector(`[data-dot="${name}"]`);
      dot.setAttribute("cx", across(v.n));
      dot.setAttribute("cy", up(r.seconds(v.n, cached)));
    }
    const ridge = across(r.ridge);
    svg.querySelector("[data-ridge]").setAttribute("points", `${ridge},${bottom} ${ridge},${top}`);
  },
}
