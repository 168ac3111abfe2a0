"use strict";
// The filter, the table of trials and one trial in full.
Page.knobText = (value) => (typeof value === "boolean" ? (value ? "on" : "off") : String(value));
Page.knobIndex = (name) => Page.document.knobs.findIndex((k) => k.name === name || k.short === name || (name === "dp" && k.short === "dps"));
Page.sameKnob = (value, text) => {
  const wanted = text.toLowerCase(), own = Page.knobText(value).toLowerCase();
  if (typeof value === "boolean") return value === ["on", "true", "1", "yes"].includes(wanted);
  return own === wanted || (typeof value === "number" && Number(wanted) === value);
};

Page.figures = {
  mfu: (t) => t.mfu_pct, gib: (t) => t.peak_reserved_gib, mem: (t) => t.peak_reserved_gib, step: (t) => t.step_time_s,
  cost: (t) => t.device_s, predicted: (t) => t.predicted?.step_time_s, number: (t) => t.number,
};

Page.filtered = () => {
  const text = document.getElementById("filter-text").value.trim();
  const state = document.getElementById("filter-state").value, role = document.getElementById("filter-role").value;
  const tests = text.split(/[\s,]+/).filter(Boolean).map((term) => {
    const figure = /^([a-z]+)(<=|>=|<|>)(-?[\d.]+)$/i.exec(term);
    if (figure && Page.figures[figure[1].toLowerCase()]) {
      const of = Page.figures[figure[1].toLowerCase()], limit = Number(figure[3]);
      const holds = { "<": (v) => v < limit, ">": (v) => v > limit, "<=": (v) => v <= limit, ">=": (v) => v >= limit }[figure[2]];
      return (t) => Page.known(of(t)) && holds(of(t));
    }
    const knob = /^([a-z_0-9]+)=(.+)$/i.exec(term), index = knob ? Page.knobIndex(knob[1]) : -1;
    if (index >= 0) return (t) => Page.sameKnob(t.knobs[index], knob[2]);
    const word = term.toLowerCase();
    return (t) => `${t.number} ${t.label} ${t.state} ${t.role} ${t.failure?.class ?? ""} ${t.failure?.text ?? ""} ${(t.flags || []).join(" ")}`.toLowerCase().includes(word);
  });
  return Page.document.trials.filter((t) => (!state || t.state === state) && (!role || t.role === role) && tests.every((test) => test(t)));
};

Page.columns = [
  ["#", (t) => t.number], ["state", (t) => t.state], ["candidate", (t) => t.label], ["role", (t) => t.role],
  ["MFU, %", (t) => t.mfu_pct, (v) => Page.fixed(v, 2)], ["step, s", (t) => t.step_time_s, Page.number],
  ["95% interval, s", (t) => t.step_time_ci_s?.[0], null], ["predicted, s", (t) => t.predicted?.step_time_s, (v) => Page.number(v, 3)],
  ["GiB", (t) => t.peak_reserved_gib, (v) => Page.fixed(v, 2)], ["device-s", (t) => t.device_s, (v) => Page.fixed(v, 0)], ["what happened", (t) => t.failure?.class ?? (t.flags || []).join(" ")],
];
Page.sort = { column: 0, down: false };

Page.widths = [4.5, 7.5, 21, 8.5, 6.5, 6.5, 12, 9.5, 5, 7, 12];

Page.initTable = () => {
  document.getElementById("table").prepend(Page.el("colgroup", {}, ...Page.widths.map((width) => Page.el("col", { style: `width:${width}%` }))));
  const row = document.querySelector("#table thead tr");
  Page.columns.forEach(([name], i) => {
    const numeric = i === 0 || (i >= 4 && i <= 9);
    const button = Page.el("button", { type: "button", onclick: () => { Page.sort = { column: i, down: Page.sort.column === i ? !Page.sort.down : i === 4 }; Page.rows(Page.filtered()); } }, name);
    row.append(Page.el("th", { scope: "col", class: numeric ? "num" : null }, button));
  });
};

Page.rows = (trials) => {
  const { column, down } = Page.sort, of = Page.columns[column][1];
  const order = (a, b) => {
    const [x, y] = [of(a), of(b)], [no, none] = [x === undefined || x === null || x === "", y === undefined || y === null || y === ""];
    if (no || none) return no - none || a.number - b.number;
    const by = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return (down ? -by : by) || a.number - b.number;
  };
  document.querySelectorAll("#table thead th").forEach((th, i) => {
    if (i === column) th.setAttribute("aria-sort", down ? "descending" : "ascending"); else th.removeAttribute("aria-sort");
    th.firstElementChild.textContent = Page.columns[i][0] + (i === column ? (down ? " ▾" : " ▴") : "");
  });
  const { winner, baseline } = Page.document;
  const row = (t) => {
    const open = Page.el("button", { type: "button", class: "link", "aria-label": `Trial ${t.number} in full`, onclick: () => Page.showTrial(t.number) }, t.number);
    const cells = [Page.el("th", { scope: "row", class: "num" }, open), Page.el("td", {}, t.state)];
    cells.push(Page.el("td", {}, t.label), Page.el("td", {}, [t.role, t.number === winner ? "winner" : ""].filter(Boolean).join(", ")));
    for (let i = 4; i <= 9; i += 1) {
      const value = Page.columns[i][1](t);
      if (i === 6) cells.push(Page.cell(null, t.step_time_ci_s ? `${Page.number(t.step_time_ci_s[0])} to ${Page.number(t.step_time_ci_s[1])}` : ""));
      else cells.push(Page.cell(Page.known(value) ? value : undefined, Page.known(value) ? Page.columns[i][2](value) : ""));
    }
    cells.push(Page.el("td", { class: "wide-text" }, t.failure ? `${t.failure.class}: ${t.failure.text.split("\n")[0].slice(0, 140)}` : (t.flags || []).map(Page.words).join(", ")));
    return Page.el("tr", { "data-number": t.number, class: t.number === winner ? "winner" : t.number === baseline ? "baseline" : null }, ...cells);
  };
  const body = document.querySelector("#table tbody"), ordered = [...trials].sort(order);
  const focused = document.activeElement?.closest?.("#table tr")?.dataset.number, scroll = body.closest(".scroll"), top = scroll.scrollTop;
  // At first a screenful, so that the page stands at once; later all, so that it does not jump.
  const first = document.documentElement.dataset.drawnMs ? ordered.length : 100;
  body.replaceChildren(...ordered.slice(0, first).map(row));
  scroll.scrollTop = top;
  if (focused) body.querySelector(`tr[data-number="${focused}"] button`)?.focus({ preventScroll: true });
  // The rest comes in pieces between other work; a newer table takes over from one that is not finished.
  const turn = (Page.turn = (Page.turn || 0) + 1);
  const more = (from) => {
    if (turn !== Page.turn) return;
    body.append(...ordered.slice(from, from + 300).map(row));
    if (from + 300 < ordered.length) setTimeout(more, 0, from + 300);
  };
  if (ordered.length > first) setTimeout(more, 0, first);
  if (!trials.length) body.append(Page.el("tr", {}, Page.el("td", { colspan: Page.columns.length }, Page.document.trials.length ? "No trial passes the filter." : "No trial has ended yet.")));
  document.getElementById("filter-count").textContent = `${trials.length} of ${Page.document.trials.length} trials`;
};

Page.options = () => {
  for (const [id, of] of [["filter-state", (t) => t.state], ["filter-role", (t) => t.role]]) {
    const select = document.getElementById(id), have = new Set([...select.options].map((o) => o.value));
    for (const value of new Set(Page.document.trials.map(of))) if (value && !have.has(value)) select.append(Page.el("option", { value }, value));
  }
};

Page.showTrial = (number) => {
  const t = Page.document.trials.find((each) => each.number === number), dialog = document.getElementById("detail");
  if (!t) return;
  document.getElementById("detail-title").textContent = `Trial ${t.number}: ${t.label}`;
  const rows = [["state", `${t.state} (${t.role})`]];
  const add = (name, value, text) => { if (Page.known(value)) rows.push([name, Page.cell(value, text)]); };
  add("step time", t.step_time_s, `${Page.number(t.step_time_s)} s` + (t.step_time_ci_s ? ` [${Page.number(t.step_time_ci_s[0])}, ${Page.number(t.step_time_ci_s[1])}]` : ""));
  add("predicted", t.predicted?.step_time_s, `${Page.number(t.predicted?.step_time_s)} s` + (t.predicted?.step_time_interval_s ? ` [${t.predicted.step_time_interval_s.map((v) => Page.number(v, 3)).join(", ")}]` : ""));
  add("MFU", t.mfu_pct, `${Page.fixed(t.mfu_pct, 2)}%`);
  add("HFU", t.hfu_pct, `${Page.fixed(t.hfu_pct, 2)}%`);
  add("tokens per second and device", t.tokens_per_s_per_device, Page.number(t.tokens_per_s_per_device));
  add("peak reserved memory", t.peak_reserved_gib, `${Page.fixed(t.peak_reserved_gib, 2)} GiB`);
  add("predicted memory", t.predicted?.memory_gib, `${Page.fixed(t.predicted?.memory_gib, 2)} GiB`);
  add("charged", t.device_s, Page.amount(t.device_s));
  const body = [Page.table(["figure", "value"], rows, "Figures of the trial")];
  if (t.failure) body.push(Page.el("h3", {}, `${t.failure.class}${t.failure.rank !== undefined ? ` on rank ${t.failure.rank}` : ""}`), Page.el("pre", { tabindex: 0, "aria-label": "Text of the failure" }, t.failure.text), t.failure.advice ? Page.el("p", {}, t.failure.advice) : "");
  if (t.move) body.push(Page.el("p", {}, `Came from trial ${t.move.from_trial}: ${Page.words(t.move.part)} → ${t.move.move} (${t.move.reason}).`));
  if (t.hopeless_part) body.push(Page.el("p", {}, t.hopeless_part));
  if (t.flags?.length) body.push(Page.el("p", {}, `Flags: ${t.flags.map(Page.words).join(", ")}.`));
  if (t.breakdown) body.push(Page.el("h3", {}, "Where a traced step went"), Page.table(["part", "seconds", "of step"], Page.partNames(t.breakdown).map((name, i) => { const v = Page.partValues(t.breakdown)[i]; return [Page.words(name), v.toFixed(4), `${Page.fixed((100 * v) / t.breakdown.step_s)}%`]; }), "Parts of the step"));
  body.push(Page.el("h3", {}, "Knobs"), Page.table(["knob", "value"], Page.document.knobs.map((k, i) => [Page.words(k.name), Page.knobText(t.knobs[i])]), "Knobs of the trial"));
  Page.fill("detail-body", ...body);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
};
