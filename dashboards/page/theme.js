"use strict";
// Colours of the page and, since charts cannot read style sheets, of the charts.
Page.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

Page.theme = (value) => {
  if (value === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = value;
  // A page opened from a file may have no storage.
  try { localStorage.setItem("ledgertune-theme", value); } catch { /* it is asked again next time */ }
};

Page.initTheme = (redraw) => {
  const select = document.getElementById("theme");
  let stored = null;
  try { stored = localStorage.getItem("ledgertune-theme"); } catch { /* the system's colours */ }
  if (stored === "light" || stored === "dark") { select.value = stored; Page.theme(stored); }
  select.addEventListener("change", () => { Page.theme(select.value); redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
};

Page.axis = (title, more = {}) => ({
  title: { text: title, font: { size: 13, color: Page.colour("muted") }, standoff: 8 },
  gridcolor: Page.colour("grid"), zerolinecolor: Page.colour("grid"), linecolor: Page.colour("line"),
  tickfont: { size: 12, color: Page.colour("muted") }, ...more,
});

// A logarithmic axis with whole numbers written out; Plotly's own ticks write only the digit.
Page.logAxis = (title, low, high) => {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const digit of [1, 1.5, 2, 3, 5, 7]) all.push(Number((digit * 10 ** power).toPrecision(3)));
  let ticks = all.filter((v) => v >= low && v <= high);
  if (ticks.length > 8) ticks = ticks.filter((v) => /^0*[125]0*$/.test(String(v).replace(".", "")));
  if (ticks.length > 10) ticks = ticks.filter((v) => Number.isInteger(Math.log10(v)));
  return Page.axis(title, { type: "log", tickvals: ticks, ticktext: ticks.map((v) => Page.number(v)), range: [Math.log10(low), Math.log10(high)] });
};

Page.layout = (more) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 60, r: 16, t: 8, b: 48 },
  font: { family: "system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif", size: 13, color: Page.colour("text") },
  legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" },
  hoverlabel: { bgcolor: Page.colour("card"), bordercolor: Page.colour("line"), font: { color: Page.colour("text"), size: 12 }, align: "left" },
  hovermode: "closest", dragmode: "zoom", uirevision: "kept", ...more,
});

// Draw, or say why there is nothing to draw. Zoom and hidden traces survive an update.
Page.draw = (id, traces, layout, empty) => {
  const place = document.getElementById(id);
  if (!traces.length) {
    if (place.classList.contains("js-plotly-plot")) { Plotly.purge(place); delete Page.charts[id]; }
    place.replaceChildren(Page.el("div", { class: "empty" }, empty));
    place.classList.add("bare");
    return;
  }
  place.classList.remove("bare");
  if (place.firstElementChild?.classList.contains("empty")) place.replaceChildren();
  Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  if (!Page.charts[id]) {
    Page.charts[id] = true;
    place.on("plotly_click", (event) => {
      const number = event.points[0]?.customdata;
      if (Number.isInteger(number)) Page.showTrial(number);
    });
  }
};
