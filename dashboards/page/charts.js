"use strict";
// The charts over two axes. Each takes the trials that pass the filter.
Page.measured = (trials) => trials.filter((t) => t.state === "measured" && Page.known(t.step_time_s));

Page.groups = (trials) => {
  const { winner, baseline } = Page.document;
  const role = (t) => (t.number === winner ? "winner" : t.number === baseline ? "baseline" : t.state);
  const looks = [
    ["failed", "failed", "x-thin-open", 8], ["infeasible", "infeasible", "x-thin-open", 8], ["stopped", "stopped early", "diamond-open", 9],
    ["measured", "measured", "circle", 8], ["baseline", "baseline", "square", 12], ["winner", "winner", "star", 16],
  ];
  return looks.map(([key, name, symbol, size]) => ({ key, name, symbol, size, colour: Page.colour(key === "infeasible" ? "failed" : key), trials: trials.filter((t) => role(t) === key) })).filter((g) => g.trials.length);
};

Page.hover = (t) => {
  const lines = [`<b>trial ${t.number}</b> ${Page.plain(t.label)}`];
  if (Page.known(t.mfu_pct)) lines.push(`MFU ${Page.fixed(t.mfu_pct, 2)}% · ${Page.number(t.step_time_s)} s · ${Page.fixed(t.peak_reserved_gib, 2)} GiB`);
  if (t.failure) lines.push(Page.wrap(`${t.failure.class}: ${t.failure.text}`));
  return lines.join("<br>");
};

Page.pareto = (trials, refused) => {
  const place = (t) => (Page.known(t.mfu_pct) && Page.known(t.peak_reserved_gib) ? [t.peak_reserved_gib, t.mfu_pct] : [t.predicted?.memory_gib ?? null, t.predicted?.mfu_pct ?? null]);
  const ghosts = refused.filter((r) => Page.known(r.mfu_pct) && Page.known(r.memory_gib) && r.memory_gib > 0).slice(0, 1500);
  const traces = [];
  if (ghosts.length) traces.push({
    type: "scatter", mode: "markers", name: "refused", x: ghosts.map((r) => r.memory_gib), y: ghosts.map((r) => r.mfu_pct),
    text: ghosts.map((r) => `<b>refused</b> ${Page.plain(r.label)}<br>${r.reasons.map((x) => Page.wrap(x[4])).join("<br>")}`),
    hovertemplate: "%{text}<extra></extra>", marker: { symbol: "circle-open", size: 7, color: Page.colour("ghost"), opacity: 0.55 },
  });
  const shown = Page.measured(trials).filter((t) => Page.known(t.peak_reserved_gib));
  const frontier = [];
  for (const t of [...shown].sort((a, b) => a.peak_reserved_gib - b.peak_reserved_gib || b.mfu_pct - a.mfu_pct))
    if (!frontier.length || t.mfu_pct > frontier.at(-1).mfu_pct) frontier.push(t);
  if (frontier.length > 1) traces.push({
    type: "scatter", mode: "lines", name: "frontier", x: frontier.map((t) => t.peak_reserved_gib), y: frontier.map((t) => t.mfu_pct),
    line: { shape: "hv", color: Page.colour("winner"), width: 1.5, dash: "dot" }, hoverinfo: "skip",
  });
  for (const group of Page.groups(trials)) {
    const points = group.trials.map(place);
    const predicted = group.key !== "measured" && group.key !== "winner" && group.key !== "baseline";
    traces.push({
      type: "scatter", mode: "markers", name: group.name, x: points.map((p) => p[0]), y: points.map((p) => p[1]),
      text: group.trials.map(Page.hover), customdata: group.trials.map((t) => t.number), hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: group.symbol, size: group.size, color: group.colour, opacity: predicted && group.trials.length > 40 ? 0.6 : 0.9, line: { width: group.symbol.includes("x-thin") ? 2 : 1, color: group.symbol.includes("open") ? group.colour : Page.colour("card") } },
    });
  }
  const xs = traces.flatMap((t) => t.x).filter((x) => Page.known(x) && x > 0);
  const limit = refused.flatMap((r) => r.reasons).find((r) => r[0] === "memory" && Page.known(r[2]))?.[2];
  const wide = xs.length && Math.max(...xs) / Math.min(...xs) > 8;
  const shapes = [], annotations = [];
  if (limit && xs.length) {
    shapes.push({ type: "line", x0: limit, x1: limit, yref: "paper", y0: 0, y1: 1, line: { color: Page.colour("failed"), width: 1, dash: "dash" } });
    annotations.push({ x: wide ? Math.log10(limit) : limit, yref: "paper", y: 1, yanchor: "top", xanchor: "right", showarrow: false, text: `allowed ${Page.number(limit, 3)} GiB`, font: { size: 12, color: Page.colour("failed") } });
  }
  const placed = trials.filter((t) => place(t).every(Page.known)).length;
  const hidden = refused.length - ghosts.length;
  document.getElementById("pareto-note").textContent =
    `${shown.length} measured trial${shown.length === 1 ? "" : "s"}. ` +
    (trials.length > shown.length ? `${trials.length - shown.length} that failed or were stopped stand where the ledger, or their own short run, puts them. ` : "") +
    (ghosts.length ? `${ghosts.length} refused candidates are drawn as ghosts where the ledger would put them` + (hidden ? `; ${hidden} more have no figures or are left out. ` : ". ") : refused.length ? `${refused.length} refused candidates carry no figures; their reasons are below. ` : "") +
    (placed ? "Up and left is better." : "");
  Page.draw("pareto", traces.filter((t) => t.x.some(Page.known)), Page.layout({
    xaxis: wide ? Page.logAxis("peak reserved memory per device, GiB", Math.min(...xs) * 0.85, Math.max(...xs, limit || 0) * 1.15) : Page.axis("peak reserved memory per device, GiB"), yaxis: Page.axis("MFU, %", { rangemode: "tozero" }), shapes, annotations,
  }), "No trial has figures yet.");
};

Page.regret = (document_) => {
  // Every trial counts, whatever the filter: a part of the spending would be no regret.
  const steps = [];
  let spent = document_.probe_device_s || 0, best = Infinity;
  const searched = Page.measured(document_.trials).filter((t) => t.role !== "confirm");
  const last = Math.min(...searched.map((t) => t.step_time_s));
  for (const t of document_.trials) {
    spent += t.device_s;
    if (t.state === "measured" && t.role !== "confirm" && t.step_time_s < best) {
      best = t.step_time_s;
      steps.push({ spent, trial: t, regret: 100 * (best / last - 1) });
    }
  }
  const note = document.getElementById("regret-note");
  if (!steps.length) {
    note.textContent = "";
    Page.fill("regret-table");
    return Page.draw("regret", [], {}, "Nothing was measured, so there is no regret to show.");
  }
  const hours = document_.budget_device_s >= 7200, unit = hours ? 3600 : 60, name = hours ? "device-hours" : "device-minutes";
  note.textContent = `How much slower the best trial so far was than the best this study measured in the end; what a longer study might have found is not known. ${steps.length} improvements in ${document_.trials.length} trials.`;
  const xs = [...steps.map((s) => s.spent), spent].map((s) => s / unit), ys = [...steps.map((s) => s.regret), steps.at(-1).regret];
  const traces = [{ type: "scatter", mode: "lines+markers", name: "regret", x: xs, y: ys, line: { shape: "hv", color: Page.colour("measured"), width: 2 }, marker: { size: [...steps.map(() => 8), 0.1] },
    text: [...steps.map((s) => Page.hover(s.trial)), "spent so far"], customdata: [...steps.map((s) => s.trial.number), null], hovertemplate: "%{text}<br>regret %{y:.2f}% after %{x:.2f} " + name + "<extra></extra>" }];
  const budget = document_.budget_device_s / unit, top = Math.max(...ys, 0.1);
  const shapes = budget ? [{ type: "line", x0: budget, x1: budget, yref: "paper", y0: 0, y1: 1, line: { color: Page.colour("baseline"), width: 1, dash: "dash" } }] : [];
  const annotations = budget ? [{ x: budget, yref: "paper", y: 1, xanchor: "right", yanchor: "top", showarrow: false, text: "budget ", font: { size: 12, color: Page.colour("baseline") } }] : [];
  Page.draw("regret", traces, Page.layout({ showlegend: false, shapes, annotations, xaxis: Page.axis(`spent, ${name}`, { range: [0, 1.02 * Math.max(budget || 0, spent / unit)] }), yaxis: Page.axis("regret, %", { range: [-0.03 * top, 1.08 * top] }) }), "");
  Page.fill("regret-table", Page.table(["trial", "spent", "step time, s", "regret, %"], steps.map((s) => [`${s.trial.number} ${s.trial.label}`, Page.amount(s.spent), Page.number(s.trial.step_time_s), Page.fixed(s.regret, 2)]), "Improvements of the best step time"));
};

Page.predicted = (trials) => {
  const shown = Page.measured(trials).filter((t) => Page.known(t.predicted?.step_time_s));
  const note = document.getElementById("predicted-note");
  note.textContent = "";
  if (!shown.length) return Page.draw("predicted", [], {}, "Nothing was measured beside a prediction.");
  const inside = shown.filter((t) => t.predicted.step_time_interval_s && t.step_time_s >= t.predicted.step_time_interval_s[0] && t.step_time_s <= t.predicted.step_time_interval_s[1]).length;
  note.textContent = `Step time as the ledger predicted it when the trial was started, with its interval, and as measured, with its 95% interval. ${inside} of ${shown.length} measured times lie within the predicted interval.`;
  const all = shown.flatMap((t) => [t.step_time_s, t.predicted.step_time_s, ...(t.predicted.step_time_interval_s || [])]).filter((v) => v > 0);
  const low = Math.min(...all) * 0.9, high = Math.max(...all) * 1.1;
  const traces = [{ type: "scatter", mode: "lines", name: "as predicted", x: [low, high], y: [low, high], line: { color: Page.colour("ghost"), width: 1, dash: "dash" }, hoverinfo: "skip" }];
  for (const group of Page.groups(shown)) {
    // All intervals of a group are one path: an element for each would cost more than everything else.
    const x = [], y = [];
    for (const t of group.trials) {
      const [guess, found] = [t.predicted.step_time_interval_s, t.step_time_ci_s];
      if (guess) { x.push(...guess, null); y.push(t.step_time_s, t.step_time_s, null); }
      if (found) { x.push(t.predicted.step_time_s, t.predicted.step_time_s, null); y.push(...found, null); }
    }
    const thin = (shown.length > 60 && Page.mixed(Page.colour("card"), group.colour, 0.35)) || group.colour;
    traces.push({ type: "scatter", mode: "lines", name: `intervals of ${group.name}`, legendgroup: group.key, showlegend: false, x, y, line: { color: thin, width: 1, simplify: false }, hoverinfo: "skip" });
    traces.push({
      type: "scatter", mode: "markers", name: group.name, legendgroup: group.key, x: group.trials.map((t) => t.predicted.step_time_s), y: group.trials.map((t) => t.step_time_s),
      text: group.trials.map(Page.hover), customdata: group.trials.map((t) => t.number), hovertemplate: "%{text}<br>predicted %{x:.4g} s, measured %{y:.4g} s<extra></extra>",
      marker: { symbol: group.symbol, size: Math.max(7, group.size - 2), color: group.colour, line: { width: 1, color: Page.colour("card") } },
    });
  }
  const times = shown.flatMap((t) => [t.step_time_s, ...(t.step_time_ci_s || [])]);
  Page.draw("predicted", traces, Page.layout({ xaxis: Page.logAxis("predicted step time, s", low, high), yaxis: Page.logAxis("measured step time, s", Math.min(...times) * 0.8, Math.max(...times) * 1.2) }), "");
};

Page.partNames = (broken) => ["useful", ...Object.keys(broken.parts_s), "unexplained"];
Page.partValues = (broken) => [broken.useful_s, ...Object.values(broken.parts_s), broken.unexplained_s];

Page.parts = (document_) => {
  const of = (number) => document_.trials.find((t) => t.number === number && t.breakdown);
  const pairs = [["baseline", of(document_.baseline)], ["winner", document_.winner === document_.baseline ? null : of(document_.winner)]].filter((pair) => pair[1]);
  const note = document.getElementById("parts-note");
  note.textContent = "";
  if (!pairs.length) {
    Page.fill("parts-table");
    return Page.draw("parts", [], {}, "Neither the baseline nor a winner has a traced step.");
  }
  note.textContent = "One traced step, mean over the ranks: each bar begins where the one before ends. " + pairs.map(([name, t]) => `${name}: trial ${t.number}, ${Page.number(t.breakdown.step_s)} s`).join("; ") + ". Tracing slows a step, so these are longer than the measured ones." + (pairs.length === 1 && document_.winner !== null && document_.winner !== document_.baseline ? " The other of the two has no trace." : "");
  const names = Page.partNames(pairs[0][1].breakdown);
  const traces = pairs.map(([name, trial]) => {
    const values = Page.partValues(trial.breakdown);
    let done = 0;
    const base = values.map((v) => { const start = done; done += v; return start; });
    return {
      type: "bar", name: `${name} (trial ${trial.number})`, x: [...names.map(Page.words), "step"], y: [...values, trial.breakdown.step_s], base: [...base, 0], offsetgroup: name,
      marker: { color: Page.colour(name), line: { width: 0 } }, customdata: [...values, trial.breakdown.step_s].map(() => trial.number),
      text: [...values, trial.breakdown.step_s].map((v) => `${Page.number(v, 3)} s, ${Page.fixed((100 * v) / trial.breakdown.step_s)}% of the step`), textposition: "none", hovertemplate: "%{x}: %{text}<extra>" + name + "</extra>",
    };
  });
  Page.draw("parts", traces, Page.layout({ barmode: "group", bargap: 0.15, bargroupgap: 0.05, xaxis: Page.axis("", { tickangle: -35, automargin: true }), yaxis: Page.axis("seconds", { rangemode: "tozero" }) }), "");
  const rows = [...names.map((name, i) => [Page.words(name), ...pairs.flatMap(([, t]) => { const v = Page.partValues(t.breakdown)[i]; return [Page.cell(v, v.toFixed(4)), `${Page.fixed((100 * v) / t.breakdown.step_s)}%`]; })]), ["step", ...pairs.flatMap(([, t]) => [t.breakdown.step_s.toFixed(4), "100.0%"])]];
  Page.fill("parts-table", Page.table(["part", ...pairs.flatMap(([name]) => [`${name}, s`, "of step"])], rows, "Parts of a traced step"));
};
