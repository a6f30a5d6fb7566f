// Predicted against measured, by source: a scatter plot of parity.csv that filters by table and source.
"use strict";
(() => {
  const box = document.getElementById("parity");
  if (!box) return;
  const colours = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#999999", "#b8a900"];
  const W = 640, H = 460, L = 62, R = 14, T = 12, B = 44;
  const controls = document.createElement("div");
  controls.id = "parity-controls";
  const select = label => {
    const l = document.createElement("label"), s = document.createElement("select");
    l.append(`${label} `, s); controls.append(l); s.addEventListener("change", draw); return s;
  };
  const table = select("table"), source = select("source");
  const plot = document.createElement("div"), key = document.createElement("ul");
  key.id = "parity-key";
  box.replaceChildren(controls, plot, key);
  let rows = [];
  const fill = (s, names) => {
    const before = s.value;
    s.replaceChildren(...names.map(n => new Option(n, n)));
    if (names.includes(before)) s.value = before;
  };
  const escape = t => t.replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[c]));
  const short = v => v >= 1e4 || v < 1e-3 ? v.toExponential(0) : String(+v.toPrecision(3));
  function draw() {
    const inside = rows.filter(r => r.table === table.value);
    const count = new Map();
    for (const r of inside) count.set(r.source, (count.get(r.source) || 0) + 1);
    const names = [...count.keys()].sort((a, b) => count.get(b) - count.get(a));
    fill(source, ["all", ...names]);
    const shown = inside.filter(r => source.value === "all" || r.source === source.value);
    const values = shown.flatMap(r => [r.measured, r.predicted]);
    const low = Math.log10(Math.min(...values)) - 0.05, high = Math.log10(Math.max(...values)) + 0.05;
    const x = v => L + (Math.log10(v) - low) / (high - low) * (W - L - R);
    const y = v => H - B - (Math.log10(v) - low) / (high - low) * (H - T - B);
    let svg = `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="Predicted against measured">`;
    const steps = high - low > 2 ? [1] : [1, 2, 5];
    for (let p = Math.floor(low); p <= high; p++) for (const k of steps) {
      const v = k * 10 ** p;
      if (Math.log10(v) < low || Math.log10(v) > high) continue;
      svg += `<path class="grid" d="M${x(v)} ${T}V${H - B}M${L} ${y(v)}H${W - R}"/>` +
        `<text x="${x(v)}" y="${H - B + 17}" text-anchor="middle">${short(v)}</text><text x="${L - 6}" y="${y(v) + 4}" text-anchor="end">${short(v)}</text>`;
    }
    svg += `<path class="ideal" d="M${x(10 ** low)} ${y(10 ** low)}L${x(10 ** high)} ${y(10 ** high)}"/>`;
    const colour = n => colours[Math.min(names.indexOf(n), colours.length - 1)];
    for (const r of shown) svg += `<circle cx="${x(r.measured).toFixed(1)}" cy="${y(r.predicted).toFixed(1)}" r="3" fill="${colour(r.source)}" fill-opacity="0.65"><title>${escape(r.source)}, ${escape(r.device)}: measured ${short(r.measured)}, predicted ${short(r.predicted)}</title></circle>`;
    svg += `<text x="${(L + W) / 2}" y="${H - 8}" text-anchor="middle">measured (${escape(shown[0].column)})</text>` +
      `<text transform="translate(14 ${H / 2}) rotate(-90)" text-anchor="middle">predicted</text></svg>`;
    plot.innerHTML = svg;
    const errors = shown.map(r => Math.abs(r.predicted / r.measured - 1));
    const mean = errors.reduce((a, b) => a + b, 0) / errors.length;
    key.innerHTML = names.slice(0, colours.length - 1).map(n => `<li><i style="background:${colour(n)}"></i>${escape(n)}</li>`).join("") +
      (names.length >= colours.length ? `<li><i style="background:${colours.at(-1)}"></i>others</li>` : "") +
      `<li>${shown.length} rows, mean error ${(100 * mean).toFixed(1)} %</li>`;
  }
  const parse = line => [...line.matchAll(/("([^"]|"")*"|[^,]*)(,|$)/g)].map(m => m[1].replace(/^"|"$/g, "").replaceAll('""', '"'));
  const [heads, ...lines] = window.PARITY.trim().split("\n").map(l => parse(l.replace(/\r$/, "")));
  rows = lines.map(c => Object.fromEntries(heads.map((h, i) => [h, c[i]])))
      .map(r => ({...r, measured: +r.measured, predicted: +r.predicted}));
  const tables = [...new Set(rows.map(r => r.table))];
  fill(table, tables.sort((a, b) => b.includes("llm_iterations") - a.includes("llm_iterations"))); // steps first
  draw();
})();
