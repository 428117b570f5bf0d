{
  compute(v) {
    const held = Math.min(v.held, v.longest);
    const pieces = { reserved: v.longest, paged: v.P > held ? v.P : held + (v.P - 1) / 2 };
    const results = {};
    for (const [name, piece] of Object.entries(pieces)) {
      results[name] = Math.floor(v.capacity / piece);
      results[name + "_used"] = `${Math.floor(100 * results[name] * held / v.capacity + 0.5)} %`;
    }
    results.times = results.paged / results.reserved;
    return results;
  },
  draw(root, v, r) {
    const held = Math.min(v.held, v.longest);
    const pieces = { reserved: v.longest, paged: v.P > held ? v.P : held + (v.P - 1) / 2 };
    for (const [name, piece] of Object.entries(pieces)) {
      const row = root.querySelector(`svg [data-row="${name}"]`), { y, left, width } = row.dataset;
      const scale = Number(width) / v.capacity;
      let rects = "";
      for (let i = 0; i < r[name]; i++) {
        const x = Number(left) + i * piece * scale;
        rects += `<rect x="${x}" y="${y}" width="${piece * scale}" height="34" fill="#fff" stroke="#8a8aa0" stroke-width="0.4"/>`;
        rects += `<rect x="${x}" y="${y}" width="${held * scale}" height="34" fill="${i % 2 ? "#2a8f9d" : "#22437a"}"/>`;
      }
      row.innerHTML = rects;
    }
  },
}
