"use strict";
// The devices' timeline and the parallel coordinates: many shapes in few paths, so that thousands stay quick.
Page.kinds = [
  ["probe", "probe", "k-probe"], ["startup", "start-up", "k-startup"], ["compile", "compile", "k-compile"], ["warmup", "warm-up", "k-warmup"],
  ["measured", "measured steps", "k-measured"], ["stopped_early", "steps of a stopped trial", "k-stopped"], ["profile", "tracing", "k-profile"],
  ["cleanup", "letting go", "k-cleanup"], ["failed", "failed or lost", "k-failed"], ["running", "running now", "k-running"],
];

Page.timeline = (document_) => {
  const { lanes, end_s: end, spans, sessions, idle_s: idle } = document_.timeline;
  const note = document.getElementById("timeline-note");
  if (!spans.length || !end) {
    note.textContent = "";
    return Page.draw("timeline", [], {}, "No trial and no probe has held a device.");
  }
  const total = lanes * end;
  const unit = end >= 7200 ? 3600 : end >= 240 ? 60 : 1, name = unit === 3600 ? "hours" : unit === 60 ? "minutes" : "seconds";
  note.textContent = `${Page.duration(end)} of sessions, ${lanes} gang${lanes === 1 ? "" : "s"} at a time at most. Bare ground is idle: ${Page.duration(idle)} of gang time, ${Page.fixed((100 * idle) / total)}%, in which the study planned, chose or waited.` + (sessions.length > 1 ? ` ${sessions.length} sessions, divided by lines; time between them is cut out.` : "");
  const labels = new Map(document_.trials.map((t) => [t.number, t.label]).concat(document_.running.map((t) => [t.number, t.label])));
  const traces = [{ type: "scatter", mode: "lines", name: "idle", fill: "toself", line: { width: 0 }, fillcolor: Page.colour("idle"), hoverinfo: "skip", x: [], y: [] }];
  const box = (trace, lane, from, to, h) => { trace.x.push(from / unit, to / unit, to / unit, from / unit, from / unit, null); trace.y.push(lane - h, lane - h, lane + h, lane + h, lane - h, null); };
  for (let lane = 0; lane < lanes; lane += 1) box(traces[0], lane, 0, end, 0.4);
  for (const [kind, title, colour] of Page.kinds) {
    const mine = spans.filter((s) => s.kind === kind);
    if (!mine.length) continue;
    const trace = { type: "scatter", mode: "lines", name: title, fill: "toself", line: { width: 0 }, fillcolor: Page.colour(colour), hoverinfo: "skip", x: [], y: [] };
    for (const s of mine) box(trace, s.lane, s.start_s, s.end_s, 0.4);
    traces.push(trace);
  }
  const ends = new Map();
  for (const s of spans) {
    const key = s.number ?? "probe", found = ends.get(key) || { ...s, text: [] };
    found.end_s = s.end_s;
    found.text.push(`${Page.kinds.find((k) => k[0] === s.kind)?.[1] ?? s.kind} ${Page.duration(s.end_s - s.start_s)}`);
    ends.set(key, found);
  }
  const mids = [...ends.values()];
  // Points to hover over: a line without width has them, and needs no element for each.
  traces.push({ type: "scatter", mode: "lines", line: { width: 0 }, showlegend: false, x: mids.map((s) => (s.start_s + s.end_s) / 2 / unit), y: mids.map((s) => s.lane), customdata: mids.map((s) => s.number),
    text: mids.map((s) => `<b>${s.number === null ? "probe" : `trial ${s.number}`}</b> ${Page.plain(labels.get(s.number) ?? "")}<br>${s.text.map(Page.plain).join("<br>")}`), hovertemplate: "%{text}<extra></extra>" });
  // A number on each trial that is wide enough for it.
  const annotations = mids.filter((s) => s.number !== null && (s.end_s - s.start_s) / end > 0.035).map((s) => ({ x: (s.start_s + s.end_s) / 2 / unit, y: s.lane - 0.4, yanchor: "bottom", showarrow: false, text: String(s.number), font: { size: 11, color: Page.colour("muted") } }));
  const shapes = sessions.slice(1).map((at) => ({ type: "line", x0: at / unit, x1: at / unit, yref: "paper", y0: 0, y1: 1, line: { color: Page.colour("muted"), width: 1, dash: "dot" } }));
  document.getElementById("timeline").style.height = `${Math.min(34, 11 + 2.2 * lanes)}rem`;
  Page.draw("timeline", traces, Page.layout({ annotations, shapes, xaxis: Page.axis(`${name} since the study began`, { range: [0, end / unit], showgrid: false, zeroline: false }),
    yaxis: Page.axis("", { tickvals: [...Array(lanes).keys()], ticktext: [...Array(lanes).keys()].map((i) => `gang ${i + 1}`), range: [lanes - 0.4, -0.75], showgrid: false, zeroline: false, fixedrange: true }) }), "");
};

Page.kindsTable = (document_) => Page.ifNew("kinds", document_.spending, () => {
  const { by_kind_s: kinds, saved_device_s: saved } = document_.spending;
  const sum = Object.values(kinds).reduce((a, b) => a + b, 0);
  Page.fill("kinds-table", Page.table(["kind", "device-seconds", "of spent"], Object.entries(kinds).map(([kind, s]) => [Page.words(kind), Page.cell(s, s.toFixed(1)), sum ? `${Page.fixed((100 * s) / sum)}%` : "–"]), "Device-seconds by kind"),
    saved ? Page.el("p", { class: "small muted" }, `Stopping losers early saved ${Page.amount(saved)}.`) : null);
});

// Axes of the parallel coordinates: the knobs that were varied, then MFU.
Page.varied = (document_) => {
  const trials = document_.trials;
  return document_.knobs.map((knob, i) => ({ ...knob, i, values: [...new Set(trials.map((t) => t.knobs[i]))] })).filter((knob) => knob.values.length > 1).map((knob) => {
    const numeric = knob.values.every((v) => typeof v === "number");
    knob.values.sort((a, b) => (numeric ? a - b : String(a).localeCompare(String(b))));
    return knob;
  });
};

Page.parallel = (document_, trials) => {
  const knobs = Page.varied(document_), note = document.getElementById("lines-note");
  note.textContent = "";
  if (!knobs.length || !trials.length) return Page.draw("lines", [], {}, trials.length ? "No knob was varied yet." : "No trial passes the filter.");
  const mfus = Page.measured(document_.trials).map((t) => t.mfu_pct).filter(Page.known);
  const low = Math.min(...mfus), high = Math.max(...mfus);
  const spot = (knob, value) => { const at = knob.values.indexOf(value); return knob.values.length === 1 ? 0.5 : at / (knob.values.length - 1); };
  const scaled = (mfu) => (high > low ? (mfu - low) / (high - low) : 0.5);
  // A little apart, so that lines that share a value can be told from each other.
  const apart = (t) => (((t.number * 7919) % 101) / 101 - 0.5) * 0.035;
  const varied = new Set(knobs.map((knob) => knob.i));
  const fixed = document_.knobs.filter((_, i) => !varied.has(i)).map((knob) => `${Page.words(knob.name)} ${Page.knobText(document_.trials[0].knobs[document_.knobs.indexOf(knob)])}`);
  note.textContent = `One line a trial through its ${knobs.length} varied knobs, ending at its MFU. Colours rank the trials by MFU; broken red lines failed or were stopped.` + (fixed.length ? ` The same in all: ${fixed.join(", ")}.` : "");
  const traces = [];
  const line = (name, mine, look, legend) => {
    if (!mine.length) return;
    const x = [], y = [];
    for (const t of mine) {
      knobs.forEach((knob, k) => { x.push(k); y.push(spot(knob, t.knobs[knob.i]) + (look.exact ? 0 : apart(t))); });
      if (t.state === "measured" && Page.known(t.mfu_pct)) { x.push(knobs.length); y.push(scaled(t.mfu_pct)); }
      x.push(null); y.push(null);
    }
    traces.push({ type: "scatter", mode: "lines", name, x, y, showlegend: legend, hoverinfo: "skip", ...look.trace });
  };
  const special = new Set([document_.winner, document_.baseline]), many = trials.length > 150;
  const ranked = trials.filter((t) => t.state === "measured" && Page.known(t.mfu_pct)).sort((a, b) => a.mfu_pct - b.mfu_pct);
  const part = (from, to) => ranked.slice(Math.floor(from * ranked.length), Math.floor(to * ranked.length)).filter((t) => !special.has(t.number));
  line("failed or stopped", trials.filter((t) => t.state !== "measured"), { trace: { line: { color: Page.colour("failed"), width: 1, dash: "dot" }, opacity: many ? 0.2 : 0.6 } }, true);
  line("slower half", part(0, 0.5), { trace: { line: { color: Page.colour("ghost"), width: 1 }, opacity: many ? 0.3 : 0.8 } }, true);
  line("faster half", part(0.5, 0.9), { trace: { line: { color: Page.colour("measured"), width: 1.2 }, opacity: many ? 0.35 : 0.9 } }, true);
  line("fastest tenth", part(0.9, 1), { trace: { line: { color: Page.colour("winner"), width: 1.6 }, opacity: 0.9 } }, true);
  line("baseline", trials.filter((t) => t.number === document_.baseline && t.number !== document_.winner), { exact: true, trace: { line: { color: Page.colour("baseline"), width: 3, dash: "dash" } } }, true);
  line("winner", trials.filter((t) => t.number === document_.winner), { exact: true, trace: { line: { color: Page.colour("winner"), width: 4 } } }, true);
  const shapes = [...knobs, null].map((_, k) => ({ type: "line", x0: k, x1: k, y0: -0.04, y1: 1.04, line: { color: Page.colour("muted"), width: 1 }, layer: "below" }));
  const annotations = [];
  const tick = (x, y, text) => annotations.push({ x, y, text: Page.plain(text), showarrow: false, xanchor: "left", xshift: 4, font: { size: 11, color: Page.colour("text") }, bgcolor: Page.colour("card"), borderpad: 1 });
  knobs.forEach((knob, k) => {
    const few = knob.values.length <= 9 ? knob.values : [knob.values[0], knob.values[Math.floor(knob.values.length / 2)], knob.values.at(-1)];
    for (const value of few) tick(k, spot(knob, value), typeof value === "boolean" ? (value ? "on" : "off") : value);
  });
  if (mfus.length) for (const value of high > low ? [low, (low + high) / 2, high] : [low]) tick(knobs.length, scaled(value), `${value.toFixed(1)}%`);
  Page.draw("lines", traces, Page.layout({ shapes, annotations, margin: { l: 30, r: 60, t: 8, b: 70 },
    xaxis: Page.axis("", { tickvals: [...knobs, null].map((_, k) => k), ticktext: [...knobs.map((k) => Page.words(k.name).replace(" ", "<br>")), "<b>MFU</b>"], range: [-0.15, knobs.length + 0.35], showgrid: false, zeroline: false, fixedrange: true, tickangle: 0 }),
    yaxis: { visible: false, range: [-0.08, 1.08], fixedrange: true } }), "");
};

Page.mixed = (from, to, share) => {
  const parts = (hex) => (/^#[0-9a-f]{6}$/i.test(hex) ? [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)) : null);
  const a = parts(from), b = parts(to);
  return a && b ? `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * share)).join(",")})` : null;
};
