{
  compute(v) {
    const heads = v.Hkv * v.group, fresh = Math.min(v.T, v.S);
    const pairs = fresh * v.S - fresh * (fresh - 1) / 2;
    const flops = 4 * v.B * heads * pairs * v.D;
    const bytes = 2 * v.B * v.D * (2 * heads * fresh + 2 * v.Hkv * v.S);
    const intensity = flops / bytes, ridge = v.peak_flops / v.bandwidth;
    return {
      new: fresh, flops, bytes, intensity, ridge,
      limit: intensity >= ridge ? "arithmetic" : "memory",
      seconds: Math.max(flops / v.peak_flops, bytes / v.bandwidth),
      attainable: Math.min(v.peak_flops, v.bandwidth * intensity),
    };
  },
  draw(root, v, r) {
    const svg = root.querySelector("svg"), dot = svg.querySelector("circle");
    const [low, high, slow, fast, left, right, bottom, top] = svg.dataset.axes.split(" ").map(Number);
    const share = (x, from, to) => Math.min(1, Math.max(0, Math.log(x / from) / Math.log(to / from)));
    dot.setAttribute("cx", left + (right - left) * share(r.intensity, low, high));
    dot.setAttribute("cy", bottom + (top - bottom) * share(r.attainable, slow, fast));
    for (const roof of svg.querySelectorAll("[data-gpu]")) {
      roof.setAttribute("stroke-width", roof.dataset.gpu === v.gpu ? 4 : 1.5);
    }
  },
}
