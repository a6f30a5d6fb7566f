"""Style and script of the HTML report, as text, so that the page needs nothing else."""

from __future__ import annotations

STYLE = """
:root{--ink:#1a1a1a;--soft:#5b6068;--line:#d9dce1;--wash:#f5f7fa;--blue:#0072B2;--warn:#8a3b00;--paper:#fff;--best:#eef6fb;--care:#fff6ec}
*{box-sizing:border-box}
body{margin:0;color:var(--ink);background:var(--paper);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:1rem 1.25rem 3rem}
h1{font-size:1.75rem;line-height:1.2;margin:.2rem 0}
h2{font-size:1.25rem;margin:2rem 0 .5rem;padding-top:.5rem;border-top:1px solid var(--line)}
header p{margin:.3rem 0;color:var(--soft)}
#answer h2{margin-top:.6rem}
h3{font-size:1rem;margin:.8rem 0 .2rem}
.badge{background:var(--warn);color:#fff;border-radius:.3rem;padding:.1rem .5rem;font-size:.8rem;font-weight:600;white-space:nowrap}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(16rem,1fr));gap:.8rem}
.card{border:1px solid var(--line);border-radius:.5rem;padding:.6rem .9rem;background:var(--wash)}
.card.main{border:2px solid var(--blue);background:var(--best)}
.card h3{margin:0;color:var(--soft);text-transform:uppercase;letter-spacing:.04em;font-size:.8rem}
.card p{margin:.1rem 0}.winner{font-weight:700;font-size:1.1rem;overflow-wrap:anywhere}.figure{font-size:1.5rem;font-weight:700;color:var(--blue)}
.note{color:var(--soft);font-size:.85rem}
.caution{background:var(--care);border-left:4px solid #E69F00;padding:.5rem .5rem .5rem 1.6rem;margin:.8rem 0;font-size:.9rem}
.verdict.no{font-size:1.2rem;font-weight:700;color:var(--warn)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;width:100%}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
small{color:var(--soft)}.narrow{max-width:34rem}th.number{text-align:right}
td.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.sortable td:first-child{white-space:nowrap;font-weight:600}
th button{font:inherit;font-weight:600;background:none;border:0;padding:0;cursor:pointer;color:inherit;text-align:left;white-space:nowrap}
th button:focus-visible{outline:2px solid var(--blue);outline-offset:2px}
th[aria-sort=ascending] button::after{content:" \\25B2"}th[aria-sort=descending] button::after{content:" \\25BC"}
.plain th{width:13rem;font-weight:600}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(21rem,100%),1fr));gap:1.2rem;align-items:start}
figure{margin:0;min-width:0}figcaption{font-weight:600;font-size:.9rem;margin-bottom:.3rem}
svg{width:100%;height:auto;max-width:34rem;display:block;overflow:visible}
svg text{font-size:11px;fill:var(--ink)}svg text.b{font-weight:700}
svg .axis,svg .whisker{stroke:var(--ink);fill:none;stroke-width:1}svg .grid{stroke:var(--line);fill:none}
svg .limit{stroke:var(--ink);stroke-dasharray:3 2;fill:none}svg .line{fill:none;stroke-width:2}
svg .ideal{fill:none;stroke-dasharray:2 3;stroke-width:1}svg .mark{fill:none;stroke-dasharray:5 3;stroke-width:1.5}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem .9rem;margin:.3rem 0;padding:0;font-size:.8rem}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px;vertical-align:-.05em}
.verdicts{font-size:.9rem;padding-left:1.2rem;margin:.2rem 0}
details{margin-top:.8rem}summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font-size:.8rem}
.sources{font-size:.8rem;color:var(--soft);overflow-wrap:anywhere}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a5abb4;--line:#3a3f47;--wash:#20242a;--blue:#56B4E9;--warn:#b35a1f;--paper:#15181c;--best:#16293a;--care:#33281a}
svg rect[fill="#000000"],svg circle[fill="#000000"]{fill:#e8eaed}svg [stroke="#000000"]{stroke:#e8eaed}.legend i[style*="#000000"]{background:#e8eaed!important}
svg rect[fill="#0072B2"],svg circle[fill="#0072B2"]{fill:#3d9bd6}svg [stroke="#0072B2"]{stroke:#3d9bd6}.legend i[style*="#0072B2"]{background:#3d9bd6!important}}
@media (max-width:640px){main{padding:.6rem .8rem 2rem}h1{font-size:1.35rem}.plain th{width:8rem}th,td{padding:.3rem .4rem}}
@media print{body{font-size:10pt}h2{break-after:avoid}figure,.card,tr{break-inside:avoid}.scroll{overflow:visible}table{font-size:7.5pt}
th,td{padding:2pt 3pt}td.number,.sortable td:first-child,th button{white-space:normal}details>*{display:block}svg{max-width:9cm}
.badge,.card,rect,.legend i{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

SCRIPT = """
"use strict";
function sortBy(header) {
  const table = header.closest("table"), body = table.tBodies[0];
  const column = Array.from(header.parentNode.children).indexOf(header);
  const rising = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const key = row => row.cells[column].dataset.key;
  const numeric = Array.from(body.rows).every(row => key(row) === "" || !isNaN(Number(key(row))));
  const compare = (a, b) => {
    if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
    const order = numeric ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b));
    return rising ? order : -order;
  };
  Array.from(body.rows).sort(compare).forEach(row => body.appendChild(row));
}
for (const header of document.querySelectorAll("table.sortable th"))
  header.querySelector("button").addEventListener("click", () => sortBy(header));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
"""
