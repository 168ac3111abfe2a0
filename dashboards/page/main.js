"use strict";
// From the data to the page: the words first, then one chart a frame, so that something is there at once.
Page.headline = () => {
  const d = Page.document, { el } = Page;
  const winner = d.trials.find((t) => t.number === d.winner), baseline = d.trials.find((t) => t.number === d.baseline);
  document.getElementById("study").textContent = d.study;
  document.getElementById("state").textContent = d.state;
  const f = d.facts;
  document.getElementById("about").textContent = [f.function, f.num_devices && `${f.num_devices} × ${f.hardware}`, f.seq_len && `sequence ${f.seq_len}`, f.global_batch_seqs && `global batch ${f.global_batch_seqs}`, f.precision].filter(Boolean).join(" · ");
  const verdict = [];
  if (f.rehearsal) verdict.push(el("p", { class: "gain bad" }, "A rehearsal: nothing was trained, every figure is the ledger's own prediction."));
  if (winner) {
    verdict.push(el("p", { class: "verdict", id: "winner", "data-value": d.winner }, d.winner === d.baseline ? "The baseline stays: " : "Winner: ", `trial ${d.winner}, ${winner.label}`));
    const c = d.comparison;
    if (d.winner === d.baseline) verdict.push(el("p", { class: "gain" }, "Nothing measured beat it beyond noise."));
    else if (c) verdict.push(el("p", { class: "gain", id: "gain", "data-value": c.step_time_change_pct, "data-low": c.step_time_change_ci_pct[0], "data-high": c.step_time_change_ci_pct[1] },
      el("strong", { class: c.significant ? "good" : null }, `step time ${Page.signed(c.step_time_change_pct)}%`), ` [${Page.signed(c.step_time_change_ci_pct[0])}, ${Page.signed(c.step_time_change_ci_pct[1])}] against the baseline · MFU ${Page.signed(c.mfu_points)} points · ${c.significant ? "significant" : "within noise"}`));
  } else if (d.feasible === 0) {
    verdict.push(el("p", { class: "verdict" }, "No candidate is feasible"));
    for (const miss of d.near_misses) verdict.push(el("p", {}, "Nearest: ", el("strong", {}, miss.label), `: ${miss.reasons.map((r) => r.text).join("; ")}.`));
  }
  else verdict.push(el("p", { class: "verdict" }, d.state === "running" ? "No winner yet" : "No winner"));
  if (!winner) {
    const best = Page.measured(d.trials).sort((a, b) => a.step_time_s - b.step_time_s)[0];
    if (best) verdict.push(el("p", { class: "gain" }, `Best so far: trial ${best.number}, ${best.label}: ${Page.number(best.step_time_s)} s a step, MFU ${Page.fixed(best.mfu_pct)}%.`));
  }
  if (d.ended) verdict.push(el("p", { class: "muted" }, `Ended: ${d.ended}.`));
  if (d.state === "interrupted") verdict.push(el("p", { class: "muted" }, "Interrupted; go on with ", el("code", {}, `tune resume ${d.study}`)));
  Page.fill("verdict", ...verdict);
  const count = (state) => d.trials.filter((t) => t.state === state).length;
  const tile = (name, value, ...shown) => el("div", {}, el("dt", {}, name), el("dd", { "data-tile": name, "data-value": value }, ...shown));
  const share = d.budget_device_s ? (100 * d.spent_device_s) / d.budget_device_s : 0;
  const tiles = [
    tile("budget spent", d.spent_device_s, Page.amount(d.spent_device_s), " ", el("small", {}, `of ${Page.amount(d.budget_device_s)}`), el("progress", { max: 100, value: share, "aria-label": `${Page.fixed(share, 0)}% of the budget spent` })),
    tile("into measured steps", d.spending.measured_share_pct, `${Page.fixed(d.spending.measured_share_pct, 0)}%`, " ", el("small", {}, "of what was spent")),
  ];
  if (winner && Page.known(winner.mfu_pct)) tiles.unshift(tile("MFU", winner.mfu_pct, `${Page.fixed(winner.mfu_pct)}%`, " ", el("small", {}, baseline && Page.known(baseline.mfu_pct) ? `baseline ${Page.fixed(baseline.mfu_pct)}%` : "")));
  if (winner && Page.known(winner.step_time_s)) tiles.unshift(tile("step time", winner.step_time_s, `${Page.number(winner.step_time_s)} s`, " ", el("small", {}, baseline && Page.known(baseline.step_time_s) ? `baseline ${Page.number(baseline.step_time_s)} s` : "")));
  const ends = [`${count("failed")} failed`, count("stopped") ? `${count("stopped")} stopped early` : "", count("infeasible") ? `${count("infeasible")} infeasible` : ""].filter(Boolean).join(", ");
  tiles.push(tile("trials", d.trials.length, `${count("measured")} measured`, " ", el("small", {}, ends)));
  if (Page.known(d.enumerated)) tiles.push(tile("candidates", d.enumerated, d.enumerated.toLocaleString("en"), " ", el("small", {}, `${d.feasible.toLocaleString("en")} feasible`)));
  if (d.given_back_device_s) tiles.push(tile("given back", d.given_back_device_s, Page.amount(d.given_back_device_s)));
  Page.fill("tiles", ...tiles);
  Page.fill("running", ...d.running.map((t) => el("p", { class: "small" }, el("span", { class: "mark", style: "background:var(--running)" }), `trial ${t.number} runs: ${t.label}, ${Page.amount(t.device_s)} so far`)));
};

Page.evidence = () => {
  const d = Page.document, { el } = Page, c = d.comparison, proof = [];
  const winner = d.trials.find((t) => t.number === d.winner), baseline = d.trials.find((t) => t.number === d.baseline);
  if (winner && baseline && c) {
    const pair = (name, of, show) => [name, Page.cell(of(baseline), show(of(baseline))), Page.cell(of(winner), show(of(winner)))];
    proof.push(Page.table(["figure", `baseline (trial ${d.baseline})`, `winner (trial ${d.winner})`], [
      pair("step time, s", (t) => t.step_time_s, Page.number), ["95% interval, s", ...[baseline, winner].map((t) => (t.step_time_ci_s ? t.step_time_ci_s.map((v) => Page.number(v)).join(" to ") : "–"))],
      pair("MFU, %", (t) => t.mfu_pct, (v) => Page.fixed(v, 2)), pair("HFU, %", (t) => t.hfu_pct, (v) => Page.fixed(v, 2)), pair("tokens per second and device", (t) => t.tokens_per_s_per_device, Page.number), pair("peak reserved memory, GiB", (t) => t.peak_reserved_gib, (v) => Page.fixed(v, 2)),
    ], "Winner and baseline"));
    proof.push(el("p", {}, `The change of ${Page.signed(c.step_time_change_pct, 2)}% [${Page.signed(c.step_time_change_ci_pct[0], 2)}, ${Page.signed(c.step_time_change_ci_pct[1], 2)}] rests on ${c.runs[0]} run${c.runs[0] === 1 ? "" : "s"} of the winner and ${c.runs[1]} of the baseline; the interval counts the noise between runs and of steps. A gain under one MFU point counts as noise.`));
    if (d.why) proof.push(el("p", { id: "why-winner" }, `Why this one: ${d.why}.`));
    if (d.parity) proof.push(el("p", {}, `Loss against the baseline's: ${d.parity.verdict}; ${d.parity.why}.`));
  } else proof.push(el("p", { class: "muted" }, "There is no winner to prove."));
  if (d.changes?.length) {
    const knobs = (change) => Object.entries(change.knobs).map(([knob, [before, after]]) => `${Page.words(knob)} ${Page.knobText(before)} → ${Page.knobText(after)}`).join(", ");
    const effect = (change) => Page.known(change.step_time_change_pct) ? `${Page.signed(change.step_time_change_pct)}%${change.interval_pct ? ` [${change.interval_pct.map((v) => Page.signed(v)).join(", ")}]` : ""}` : "cannot be undone alone";
    proof.push(el("h3", {}, "What each change bought"), Page.table(["change", "step time", "how known", "in the winner"], d.changes.map((change) => [el("td", { class: "wide-text" }, knobs(change)), effect(change), Page.words(change.source), change.kept ? (change.sure === false ? "kept, undecided" : "kept") : "left out"]), "What each change bought"));
  }
  const confirms = d.trials.filter((t) => ["confirm", "ablate", "canary"].includes(t.role));
  if (confirms.length) proof.push(el("h3", {}, "Measured again in turns"), Page.table(["trial", "for", "candidate", "step time, s", "MFU, %"], confirms.map((t) => [String(t.number), t.role, Page.el("td", {}, t.label), t.state === "measured" ? Page.number(t.step_time_s) : t.state, Page.fixed(t.mfu_pct, 2)]), "Confirming trials"));
  if (d.commit) proof.push(el("p", {}, "Committed as ", el("code", { id: "commit", "data-value": d.commit.hash }, d.commit.hash.slice(0, 12)), " on branch ", el("code", {}, d.commit.branch), " of ", el("code", {}, d.commit.repo)));
  else if (winner) proof.push(el("p", { class: "muted" }, "Nothing was committed."));
  Page.fill("proof", ...proof);
  Page.fill("changes", d.changed.length ? Page.table(["knob", "baseline", "winner"], d.changed.map(([knob, before, after]) => [Page.words(knob), Page.knobText(before ?? "–"), Page.knobText(after)]), "Changed knobs") : el("p", { class: "muted" }, winner ? "The winner is the baseline." : "There is no winner."));
  const pre = document.getElementById("diff");
  pre.hidden = !d.diff.length;
  pre.replaceChildren(...d.diff.map((line) => el("span", { class: /^\+/.test(line) ? "add" : /^-/.test(line) ? "del" : /^@@/.test(line) ? "hunk" : null }, line + "\n")));
  const notes = [...d.notes, ...d.warnings.map((text) => `Warning: ${text}`)];
  const traced = [baseline, winner].filter(Boolean).flatMap((t) => t.breakdown?.warnings ?? []);
  Page.fill("notes", ...(notes.concat(traced).length ? [...new Set(notes.concat(traced))].map((text) => el("li", {}, text)) : [el("li", { class: "muted" }, "none")]));
  const plain = Object.entries(d.facts).filter(([key, value]) => value !== null && typeof value !== "object" && key !== "study");
  const versions = Object.entries(d.facts.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  Page.fill("facts", Page.table(["fact", "value"], [...plain.map(([key, value]) => [Page.words(key), typeof value === "number" ? Page.number(value) : Page.knobText(value)]), ...(versions ? [["versions", Page.el("td", { class: "wide-text" }, versions)]] : []), ["folder", Page.el("td", { class: "wide-text" }, d.folder)]], "Facts of the study"));
};

Page.perTrial = (done) => {
  const trials = Page.filtered();
  Page.rows(trials);
  const jobs = [() => Page.pareto(trials, Page.refused), () => Page.predicted(trials), () => Page.parallel(Page.document, trials)];
  Page.frames(jobs, () => {
    // Counts how often the filtered charts were drawn: what waits for a filter can see when it has come through.
    document.documentElement.dataset.turn = Number(document.documentElement.dataset.turn || 0) + 1;
    done?.();
  });
};

Page.frames = (jobs, done) => {
  if (!jobs.length) return done?.();
  requestAnimationFrame(() => { jobs[0](); Page.frames(jobs.slice(1), done); });
};

Page.all = (done) => {
  Page.headline();
  Page.options();
  const d = Page.document;
  Page.ifNew("evidence", [d.winner, d.baseline, d.commit, d.comparison, d.notes, d.warnings, d.state, d.trials.length], Page.evidence);
  Page.ifNew("groups", d.rejected ?? null, Page.groupsTable);
  Page.kindsTable(d);
  Page.perTrial(() => Page.frames([() => Page.regret(Page.document), () => Page.parts(Page.document), () => Page.timeline(Page.document)], done));
};

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  Page.document = data.document;
  Page.refused = data.refused;
  Page.live = data.live;
  Page.initTable();
  Page.initLookup();
  Page.initTheme(() => Page.all());
  let wait = null;
  const later = () => { clearTimeout(wait); wait = setTimeout(() => Page.perTrial(), 150); };
  const form = document.getElementById("filter");
  form.addEventListener("input", later);
  form.addEventListener("reset", () => setTimeout(() => Page.perTrial(), 0));
  form.addEventListener("submit", (event) => event.preventDefault());
  Page.all(() => { document.documentElement.dataset.drawnMs = Math.round(performance.now()); });
})();
