"use strict";
// Elements and numbers. Text only ever reaches the page as text, never as markup.
const Page = { charts: {}, started: performance.now() };

Page.el = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
};

Page.fill = (id, ...children) => {
  const element = document.getElementById(id);
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

Page.known = (value) => typeof value === "number" && Number.isFinite(value);

// Four significant digits, thousands apart.
Page.number = (value, digits = 4) => {
  if (!Page.known(value)) return "–";
  if (Math.abs(value) >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(digits)));
};
Page.fixed = (value, digits = 1) => (Page.known(value) ? value.toFixed(digits) : "–");
Page.signed = (value, digits = 1) => (Page.known(value) ? (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(digits) : "–");

// As the command line writes amounts.
Page.amount = (seconds) => {
  if (!Page.known(seconds)) return "–";
  if (seconds >= 3600) return `${(seconds / 3600).toFixed(2)} device-hours`;
  if (seconds >= 120) return `${(seconds / 60).toFixed(1)} device-minutes`;
  return `${seconds.toFixed(0)} device-seconds`;
};
Page.duration = (seconds) => {
  if (seconds >= 3600) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 120) return `${(seconds / 60).toFixed(1)} min`;
  return `${seconds.toFixed(1)} s`;
};
Page.words = (name) => String(name).replaceAll("_", " ");
Page.cell = (value, text, kind = "td") => Page.el(kind, { class: "num", "data-value": value === undefined ? null : value }, text);

Page.table = (heads, rows, caption) => {
  const body = rows.map((row) => Page.el("tr", {}, ...row.map((cell, i) => (cell instanceof Node && /^T[DH]$/.test(cell.tagName) ? cell : Page.el(i ? "td" : "th", i ? { class: "num" } : { scope: "row" }, cell)))));
  // A head stands as the cells under it do.
  const head = Page.el("tr", {}, ...heads.map((name, i) => Page.el("th", { scope: "col", class: body[0]?.cells[i]?.classList.contains("num") ? "num" : null }, name)));
  const wrap = Page.el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption });
  wrap.append(Page.el("table", {}, Page.el("thead", {}, head), Page.el("tbody", {}, ...body)));
  return wrap;
};

// Plotly reads a few tags in its texts; names of trials must not be read so.
Page.plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
Page.wrap = (text, width = 70) => {
  const lines = [""];
  for (const word of String(text).slice(0, 400).split(/\s+/)) {
    if (lines.at(-1).length + word.length > width && lines.at(-1)) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.map(Page.plain).join("<br>");
};

// Do something again only if what it rests on has changed: what is not touched keeps focus and scroll.
Page.seen = {};
Page.ifNew = (key, value, act) => {
  const text = JSON.stringify(value);
  if (Page.seen[key] === text) return;
  Page.seen[key] = text;
  act();
};
