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
