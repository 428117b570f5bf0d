{
  compute(v) {
    const SCORES = [1, 2, 3, 4].map((s) => s + v.shift), VALUES = [10, 20, 30, 40];
    const summary = (first, last) => {
      const scores = SCORES.slice(first, last), m = Math.max(...scores);
      const weights = scores.map((s) => Math.exp(s - m));
      const l = weights.reduce((sum, w) => sum + w, 0);
      const acc = weights.reduce((sum, w, i) => sum + w * VALUES[first + i], 0);
      return { m, l, acc };
    };
    const first = summary(0, v.split), second = summary(v.split, 4), m = Math.max(first.m, second.m);
    const of = (part) => Math.exp(part.m - m);
    const merged = {
      m,
      l: of(first) * first.l + of(second) * second.l,
      acc: of(first) * first.acc + of(second) * second.acc,
    };
    let plain = 0, weighted = 0;
    SCORES.forEach((s, i) => {
      const w = Math.fround(Math.exp(s));
      plain = Math.fround(plain + w);
      weighted = Math.fround(weighted + Math.fround(w * VALUES[i]));
    });
    const out = Number.isFinite(weighted / plain) ? (weighted / plain).toFixed(2) : "NaN";
    const size = plain === Infinity ? "∞" : plain === 0 ? "0" : plain.toExponential(2);
    return {
      m: `${m}`, l: merged.l.toFixed(4), acc: merged.acc.toFixed(4), out: (merged.acc / merged.l).toFixed(4),
      plain: `${size}, output ${out}`, parts: { first, second, merged },
    };
  },
  draw(root, v, r) {
    const svg = root.querySelector("svg"), { first, second, merged } = r.parts;
    const say = (name, text) => { svg.querySelector(`[data-text="${name}"]`).textContent = text; };
    const scores = [1, 2, 3, 4].map((s) => s + v.shift);
    for (const [name, part] of Object.entries(r.parts)) {
      say(`${name}-m`, `m = ${part.m}`);
      say(`${name}-l`, `l = ${part.l.toFixed(4)}`);
      say(`${name}-acc`, `acc = ${part.acc.toFixed(4)}`);
    }
    say("first-scores", scores.slice(0, v.split).join(", "));
    say("second-scores", scores.slice(v.split).join(", "));
    const power = (part) => (part.m === merged.m ? "× 1" : `× e^(${part.m} − ${merged.m})`);
    say("first-factor", power(first));
    say("second-factor", power(second));
  },
}
