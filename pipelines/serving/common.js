"use strict";
// All text of the model and of the database is inserted as text: `make` sets textContent, and nothing here parses HTML.
const find = (id) => document.getElementById(id);
const make = (name, text, more) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  return Object.assign(element, more || {});
};
const drawn = (name, facts, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(facts)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};

async function call(path, body, more) {
  const headers = {};
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { headers, ...(more || {}) };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const answer = await fetch(path, options);
  if (answer.status === 401 && find("key")) find("key").hidden = false;
  if (!answer.ok) {
    const said = await answer.json().catch(() => null);
    throw new Error(said && said.error ? said.error.message : `the server answers ${answer.status}`);
  }
  return answer;
}

function fill(place, event) {
  place.replaceChildren();
  const bar = make("div", undefined, { className: "bar" });
  const csv = make("button", "Download CSV", { type: "button" });
  csv.addEventListener("click", () => download(event));
  const count = event.more ? `first ${event.rows.length} rows` : `${event.rows.length} row${event.rows.length === 1 ? "" : "s"}`;
  bar.append(csv, make("span", count, { className: "said" }));
  const scroll = make("div", undefined, { className: "scroll", tabIndex: 0 });
  scroll.append(table(event));
  place.append(scroll, bar);
}

function table(event) {
  const grid = make("table");
  const head = grid.createTHead().insertRow();
  const body = grid.createTBody();
  const fillRows = (rows) => {
    body.replaceChildren();
    for (const row of rows) {
      const line = body.insertRow();
      for (const cell of row) {
        const kind = cell === null ? "null" : typeof cell === "number" ? "number" : "";
        line.append(make("td", cell === null ? "NULL" : String(cell), { className: kind }));
      }
    }
  };
  event.columns.forEach((name, at) => {
    const isNumber = event.rows.some((row) => typeof row[at] === "number");
    const cell = head.appendChild(make("th", "", { className: isNumber ? "number" : "" }));
    const button = cell.appendChild(make("button", name === null ? "" : String(name), { type: "button" }));
    cell.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const up = cell.getAttribute("aria-sort") !== "ascending";
      for (const other of head.children) other.setAttribute("aria-sort", "none");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      fillRows([...event.rows].sort((a, b) => (up ? 1 : -1) * order(a[at], b[at])));
    });
  });
  fillRows(event.rows);
  return grid;
}

function order(a, b) {
  if (a === null || b === null) return (a === null ? 0 : 1) - (b === null ? 0 : 1);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

function save(text, type, name) {
  const link = make("a", "", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

function download(event) {
  // A text that a spreadsheet would take for a formula is kept one.
  const cell = (value) => {
    if (value === null) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [event.columns, ...event.rows].map((row) => row.map(cell).join(","));
  save(lines.join("\r\n"), "text/csv", "answer.csv");
}

find("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
