{
  compute(v) {
    const programs = v.B * v.Hkv * (v.packed ? 1 : v.group) * v.splits, H = v.Hkv * v.group;
    const speed = (n) => Math.min(n * v.in_flight / v.latency, v.bandwidth);
    const terms = (splits) => {
      const n = programs / v.splits * splits, waves = Math.floor(n / v.num_sms), rest = n % v.num_sms;
      const flops = 4 * v.rows * Math.ceil(v.S / splits) * v.D;
      const products = Math.ceil(n / v.num_sms) * flops * v.num_sms / (v.share * v.peak_flops);
      const bytes = 4 * v.B * v.Hkv * v.S * v.D / n;
      const reading = waves * v.num_sms * bytes / speed(v.num_sms) + (rest ? rest * bytes / speed(rest) : 0);
      const merging = splits > 1 ? 8 * v.B * H * splits * (v.D + 2) / v.bandwidth : 0;
      const launches = v.launch * (splits > 1 ? 2 : 1);
      return { products, reading, merging, launches, total: Math.max(products, reading) + merging + launches };
    };
    const { products, reading, merging, launches, total } = terms(v.splits);
    return {
      programs, waves: Math.ceil(programs / v.num_sms), products, reading, merging, launches, total,
      limit: products > reading ? "products" : "reading",
      curves: { splits: (choices) => choices.map((s) => [s, terms(s)]) },
    };
  },
  draw(root, v, r) {
    const svg = root.querySelector("svg");
    const [low, high, fast, slow, left, right, bottom, top] = svg.dataset.axes.split(" ").map(Number);
    const share = (x, from, to) => Math.min(1, Math.max(0, Math.log(x / from) / Math.log(to / from)));
    const at = (s, time) => [left + (right - left) * share(s, low, high), bottom + (top - bottom) * share(time, fast, slow)];
    const { choices } = JSON.parse(root.dataset.constants);
    for (const line of svg.querySelectorAll("[data-term]")) {
      const points = r.curves.splits(choices.splits).map(([s, terms]) => at(s, terms[line.dataset.term]));
      line.setAttribute("points", points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "));
    }
    const [x, y] = at(v.splits, r.total), dot = svg.querySelector("circle");
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", y);
  },
}
