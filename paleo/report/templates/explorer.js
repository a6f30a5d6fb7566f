"use strict";
const F = JSON.parse(document.getElementById("plans").textContent);
const types = {step: Float32Array, memory: Float32Array, gpus: Uint32Array, microbatch: Uint32Array,
  strategy: Uint16Array, policy: Uint8Array, schedule: Uint8Array, overlapped: Uint8Array, run: Uint16Array};
const C = {};
for (const [name, text] of Object.entries(F.columns)) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  C[name] = new types[name](bytes.buffer);
}
const GIB = 2 ** 30, DAY = 86400, $ = id => document.getElementById(id);
const colours = ["#0072B2", "#56B4E9", "#999999", "#D55E00", "#CC79A7", "#009E73", "#F0E442"];
const number = (v, d = 3) => v >= 1e3 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(d));
const time = s => s >= 2 * DAY ? number(s / DAY) + " days" : s >= 7200 ? number(s / 3600) + " h" : s >= 120 ?
  number(s / 60) + " min" : s >= 1 ? number(s) + " s" : number(s * 1e3) + " ms";
const gpuCounts = [...new Set(C.gpus)].sort((a, b) => a - b);
const state = {gpus: gpuCounts.length - 1, memory: 100, price: F.gpuHour, deadline: null, budget: null, chosen: F.bestIndex};

const whole = i => F.steps === null ? null : C.step[i] * F.steps;
const nodes = i => Math.ceil(C.gpus[i] / F.perNode) * F.perNode;
const cost = i => whole(i) === null || state.price === null ? null : whole(i) / 3600 * nodes(i) * state.price;
const name = i => {
  const parts = [F.strategies[C.strategy[i]], "microbatch " + C.microbatch[i]];
  if (F.policies[C.policy[i]] !== "none") parts.push(F.policies[C.policy[i]] + " recomputation");
  const schedule = F.schedules[C.schedule[i]];
  if (/pp=/.test(parts[0])) parts.push(schedule);
  if (C.overlapped[i]) parts.push("overlapped");
  return parts.join(", ");
};

function control(id, label, html) {
  const box = document.createElement("div");
  box.innerHTML = `<label for="${id}">${label} <output id="${id}-out" for="${id}"></output></label>${html}`;
  $("controls").append(box);
  const input = box.querySelector("input");
  input.addEventListener("input", () => { read(); draw(); });
  return input;
}
const slider = (id, label, min, max, value) =>
  control(id, label, `<input id="${id}" type="range" min="${min}" max="${max}" value="${value}">`);
const field = (id, label, value, step) =>
  control(id, label, `<input id="${id}" type="number" min="0" step="${step}" value="${value ?? ""}">`);
if (gpuCounts.length > 1) slider("gpus", "GPUs, at most", 0, gpuCounts.length - 1, state.gpus);
slider("memory", "Memory of a GPU, at most", 1, 100, 100);
if (F.steps !== null) {
  field("deadline", "Deadline in days", "", "any");
  field("price", "Price of a GPU-hour in USD", state.price === null ? "" : +state.price.toPrecision(6), "any");
  field("budget", "Budget in USD", "", "any");
}
const value = id => { const e = $(id); return e && e.value !== "" && isFinite(+e.value) ? +e.value : null; };
function read() {
  if ($("gpus")) { state.gpus = +$("gpus").value; $("gpus-out").textContent = gpuCounts[state.gpus]; }
  state.memory = +$("memory").value;
  $("memory-out").textContent = number(F.capacity * state.memory / 100 / GIB) + " GiB";
  if (F.steps === null) return;
  state.deadline = value("deadline"); state.budget = value("budget"); state.price = value("price");
}
function passes(i) {
  if (C.memory[i] > F.capacity * state.memory / 100 || C.gpus[i] > gpuCounts[state.gpus]) return false;
  if (state.deadline !== null && whole(i) > state.deadline * DAY) return false;
  const usd = cost(i);
  return state.budget === null || (usd !== null && usd <= state.budget);
}
let shown = [], front = [];
function select() {
  shown = [];
  for (let i = 0; i < F.count; i++) if (passes(i)) shown.push(i);
  const dims = i => [C.step[i], C.memory[i], cost(i) ?? C.step[i] * nodes(i)];
  const order = shown.slice().sort((a, b) => C.step[a] - C.step[b] || C.memory[a] - C.memory[b]);
  front = [];
  for (const i of order) {
    const d = dims(i);
    if (!front.some(j => { const e = dims(j); return e[0] <= d[0] && e[1] <= d[1] && e[2] <= d[2] * (1 + 1e-9); })) front.push(i);
    if (front.length > 60) break;
  }
  const score = F.objective === "cost" && F.steps !== null ? i => cost(i) ?? Infinity :
    F.objective === "gpus" ? i => C.gpus[i] : i => C.step[i];
  if (state.chosen < 0 || !passes(state.chosen)) state.chosen = front.length ? front.reduce((a, b) => score(b) < score(a) ? b : a) : -1;
}
const roundStep = v => { const p = 10 ** Math.floor(Math.log10(v)); return p * [1, 2, 5, 10].find(k => k * p >= v); };
function roundTimes(low, high) {
  const all = [];
  for (let p = 10 ** Math.floor(Math.log10(low)); p <= high; p *= 10)
    for (const k of high / low > 100 ? [1] : high / low > 3 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]) if (k * p >= low && k * p <= high) all.push(k * p);
  return all;
}
let view = null;
function plot() {
  const canvas = $("plot"), ratio = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
  const w = canvas.clientWidth, h = canvas.clientHeight, ink = k => style.getPropertyValue(k).trim();
  canvas.width = w * ratio; canvas.height = h * ratio;
  const g = canvas.getContext("2d"); g.scale(ratio, ratio); g.clearRect(0, 0, w, h);
  g.font = "12px system-ui"; g.fillStyle = ink("--soft");
  if (!shown.length) { g.fillText("No plan passes the filters.", 20, 30); view = null; return; }
  let t0 = Infinity, t1 = 0, m0 = Infinity, m1 = 0;
  for (const i of shown) { t0 = Math.min(t0, C.step[i]); t1 = Math.max(t1, C.step[i]); m0 = Math.min(m0, C.memory[i]); m1 = Math.max(m1, C.memory[i]); }
  t1 = Math.min(t1, t0 * 20);
  const L = 56, R = 12, T = 12, B = 34, lx = Math.log(t0 / 1.03), ux = Math.log(t1 * 1.03), uy = Math.max(m1 * 1.03, m0 * 1.1), ly = m0 * .97;
  const x = s => L + (Math.log(s) - lx) / (ux - lx) * (w - L - R), y = m => h - B - (m - ly) / (uy - ly) * (h - T - B);
  view = {x, y};
  g.strokeStyle = ink("--line"); g.lineWidth = 1;
  for (const s of roundTimes(Math.exp(lx), Math.exp(ux))) {
    g.beginPath(); g.moveTo(x(s), T); g.lineTo(x(s), h - B); g.stroke();
    g.textAlign = "center"; g.fillText(time(s), Math.min(Math.max(x(s), L + 14), w - R - 18), h - B + 16);
  }
  const each = roundStep((uy - ly) / GIB / 4);
  for (let m = Math.ceil(ly / GIB / each) * each; m <= uy / GIB; m += each) {
    g.beginPath(); g.moveTo(L, y(m * GIB)); g.lineTo(w - R, y(m * GIB)); g.stroke();
    g.textAlign = "right"; g.fillText(number(m) + " GiB", L - 5, y(m * GIB) + 4);
  }
  g.textAlign = "center"; g.fillText("time of a step (logarithmic)", (L + w - R) / 2, h - 4);
  g.fillStyle = ink("--dot");
  for (const i of shown) if (C.step[i] <= t1) g.fillRect(x(C.step[i]) - 1, y(C.memory[i]) - 1, 2, 2);
  g.fillStyle = ink("--blue");
  for (const i of front) { if (C.step[i] > t1) continue; g.beginPath(); g.arc(x(C.step[i]), y(C.memory[i]), 4, 0, 7); g.fill(); }
  if (state.chosen >= 0) {
    g.strokeStyle = ink("--orange"); g.lineWidth = 3; g.beginPath();
    g.arc(x(Math.min(C.step[state.chosen], t1)), y(C.memory[state.chosen]), 8, 0, 7); g.stroke();
  }
}
const rows = [["step", i => time(C.step[i])], ["GPUs", i => C.gpus[i].toLocaleString("en")],
  ["memory", i => number(C.memory[i] / GIB) + " GiB"],
  ...(F.tokensPerSample ? [["tokens/s", i => number(F.samplesPerStep * F.tokensPerSample / C.step[i])]] :
    [["samples/s", i => number(F.samplesPerStep / C.step[i])]]),
  ...(F.steps !== null ? [["training", i => time(whole(i))], ["cost", i => cost(i) === null ? "–" : number(cost(i)) + " USD"]] : [])];
function command(i) {
  if (i === F.bestIndex) return F.command;
  const words = [F.commands[C.run[i]], "--gpus", C.gpus[i], "--microbatch", C.microbatch[i], "--strategy", F.strategies[C.strategy[i]]];
  if (F.policies[C.policy[i]] !== "none") words.push("--recompute", F.policies[C.policy[i]]);
  const schedule = F.schedules[C.schedule[i]];
  if (/pp=/.test(F.strategies[C.strategy[i]]) && schedule !== "1f1b") words.push("--schedule", schedule === "interleaved" ? "1f1b" : schedule);
  if (!words[0].includes("exchange=")) words.push("--set", "exchange=" + (C.overlapped[i] ? "overlapped" : "after"));
  return words.join(" ");
}
function details() {
  const i = state.chosen, box = $("chosen");
  if (i < 0) { box.innerHTML = "<p>No plan passes the filters: loosen one.</p>"; return; }
  let html = `<h2>${name(i)}</h2><dl>` + rows.map(([k, f]) => `<dt>${k}</dt><dd>${f(i)}</dd>`).join("").replace(/<dt>/g, "<div><dt>").replace(/<\/dd>/g, "</dd></div>") + "</dl>";
  if (i === F.bestIndex) {
    const parts = Object.entries(F.breakdown).filter(([, v]) => v > 0), total = parts.reduce((s, [, v]) => s + v, 0);
    html += `<div class="bar" role="img" aria-label="Where the step goes">` + parts.map(([k, v], n) =>
      `<span style="width:${100 * v / total}%;background:${colours[n % 7]}" title="${k}: ${time(v)}"></span>`).join("") + "</div>" +
      `<div class="key">` + parts.map(([k, v], n) => `<span><i style="background:${colours[n % 7]}"></i>${k} ${Math.round(100 * v / total)} %</span>`).join("") + "</div>";
  }
  box.innerHTML = html + '<pre tabindex="0"></pre>';
  box.lastChild.textContent = command(i);
}
function table() {
  $("front").tHead.innerHTML = "<tr><th>plan</th>" + rows.map(([k]) => `<th>${k}</th>`).join("") + "</tr>";
  $("front").tBodies[0].innerHTML = front.map(i => `<tr tabindex="0" data-i="${i}" aria-selected="${i === state.chosen}"><td>${name(i)}</td>` +
    rows.map(([, f]) => `<td>${f(i)}</td>`).join("") + "</tr>").join("");
}
function draw() {
  select(); plot(); details(); table();
  const i = state.chosen, few = F.count < F.evaluated ? `the best ${F.count.toLocaleString("en")} of ` : "";
  $("verdict").textContent = i < 0 ? "Nothing passes the filters." :
    `${name(i)} on ${C.gpus[i].toLocaleString("en")} GPUs: ${time(C.step[i])} a step` +
    (whole(i) === null ? "" : `, ${time(whole(i))}` + (cost(i) === null ? "" : `, ${number(cost(i))} USD`)) + ".";
  $("legend").textContent = `${shown.length.toLocaleString("en")} plans pass the filters (${few}${F.evaluated.toLocaleString("en")} evaluated); ` +
    `large dots: Pareto front of time, memory and cost.`;
}
const choose = i => { state.chosen = i; plot(); details(); table(); };
$("front").addEventListener("click", e => { const r = e.target.closest("tr[data-i]"); if (r) choose(+r.dataset.i); });
$("front").addEventListener("keydown", e => {
  const r = e.target.closest("tr[data-i]");
  if (r && (e.key === "Enter" || e.key === " ")) { e.preventDefault(); choose(+r.dataset.i); }
});
$("plot").addEventListener("keydown", e => {
  const k = front.indexOf(state.chosen), step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[e.key];
  if (step && front.length) { e.preventDefault(); choose(front[(k + step + front.length) % front.length]); }
});
$("plot").addEventListener("click", e => {
  if (!view) return;
  const b = $("plot").getBoundingClientRect(), px = e.clientX - b.left, py = e.clientY - b.top;
  let best = -1, near = 400;
  for (const i of shown) { const d = (view.x(C.step[i]) - px) ** 2 + (view.y(C.memory[i]) - py) ** 2; if (d < near) { near = d; best = i; } }
  if (best >= 0) choose(best);
});
addEventListener("resize", plot);
matchMedia("(prefers-color-scheme:dark)").addEventListener("change", plot);
read(); draw();
document.documentElement.dataset.ready = "yes";
