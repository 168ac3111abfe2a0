"use strict";
// "Why was X rejected?": answered from what the page holds, and it says so where that is not enough.
Page.MOST = 12;

Page.terms = (text) => text.trim().split(/[\s,]+/).filter(Boolean).map((term) => {
  const knob = /^([a-z_0-9]+)=(.+)$/i.exec(term);
  if (!knob) return { text: term, holds: (c) => c.label.toLowerCase().split(" ").includes(term.toLowerCase()) };
  const index = Page.knobIndex(knob[1]);
  if (index >= 0) return { text: term, knob: Page.document.knobs[index], index, value: knob[2], holds: (c) => Page.sameKnob(c.knobs[index], knob[2]) };
  return { text: term, unknown: true, holds: (c) => c.label.toLowerCase().split(" ").includes(term.toLowerCase()) };
});

Page.reasonTable = (refusal) => Page.table(["reason", "required", "available", "unit", "in words"], refusal.reasons.map(([code, required, available, unit, text]) =>
  [Page.words(code), Page.cell(required ?? undefined, Page.number(required)), Page.cell(available ?? undefined, Page.number(available)), Page.el("td", {}, unit || ""), Page.el("td", { class: "wide-text" }, text)]), `Reasons against ${refusal.label}`);

Page.degrees = (terms) => {
  // The product of the degrees must be the number of devices: that much needs no ledger.
  const of = (short) => { const term = terms.find((t) => t.knob?.short === short); return term ? Number(term.value) : null; };
  const stated = ["tp", "pp", "cp", "dpr", "dps"].map((short) => [short, of(short)]).filter(([, v]) => v !== null);
  const devices = Page.document.facts.num_devices, product = stated.reduce((a, [, v]) => a * v, 1);
  if (!stated.length || !devices || !Number.isFinite(product) || product <= 0) return null;
  const words = stated.map(([short, v]) => `${short} ${v}`).join(" × ");
  if (stated.length === 5 && product !== devices) return `${words} = ${product} devices are required, ${devices} are available.`;
  if (devices % product) return `${words} = ${product} does not divide the ${devices} devices of the job.`;
  return null;
};

Page.lookup = (text) => {
  const terms = Page.terms(text), answer = [];
  if (!terms.length) return Page.fill("answer");
  const say = (...words) => answer.push(Page.el("p", {}, ...words));
  for (const term of terms.filter((t) => t.unknown)) say(`There is no knob “${term.text.split("=")[0]}”.`);
  const all = (c) => terms.every((term) => term.holds(c));
  const refused = Page.refused.filter(all), tried = Page.document.trials.filter(all), running = Page.document.running.filter(all);
  for (const t of tried.slice(0, Page.MOST)) {
    const open = Page.el("button", { type: "button", class: "link", onclick: () => Page.showTrial(t.number) }, `trial ${t.number}`);
    say(Page.el("strong", {}, t.label), " was not rejected, it was tried: ", open, t.state === "measured" ? `, ${Page.number(t.step_time_s)} s a step, MFU ${Page.fixed(t.mfu_pct)}%.` : `, ${t.state}: ${t.failure?.class ?? ""}: ${(t.failure?.text ?? "").split("\n")[0]}`);
  }
  if (tried.length > Page.MOST) say(`${tried.length - Page.MOST} more trials fit these words; the table above filters them.`);
  for (const t of running) say(Page.el("strong", {}, t.label), ` runs now, as trial ${t.number}.`);
  if (refused.length) {
    say(`${refused.length} refused candidate${refused.length === 1 ? " fits" : "s fit"}` + (refused.length > Page.MOST ? `, the first ${Page.MOST}:` : ":"));
    for (const r of refused.slice(0, Page.MOST)) answer.push(Page.el("h3", {}, r.label), Page.reasonTable(r));
  }
  if (!refused.length && !tried.length && !running.length) Page.unknownCandidate(terms, say, answer);
  Page.fill("answer", ...answer);
};

Page.unknownCandidate = (terms, say, answer) => {
  const { document: d } = Page, held = Page.refused.length, counted = (d.rejected || []).reduce((sum, group) => sum + group.count, 0);
  const product = Page.degrees(terms);
  if (product) say(product);
  for (const term of terms.filter((t) => t.knob)) {
    const values = [...new Set([...d.trials, ...Page.refused, ...d.running].map((c) => c.knobs[term.index]))];
    if (values.length && !values.some((v) => Page.sameKnob(v, term.value))) say(`No candidate on this page has ${term.knob.name} = ${term.value}; there are ${values.map(Page.knobText).sort((a, b) => a.localeCompare(b, "en", { numeric: true })).join(", ")}.`);
  }
  if (counted > held) say(`This page holds ${held} of ${counted} refused candidates, and this is none of them. The whole account of any candidate: `, Page.el("code", {}, `tune explain JOB.toml --candidate ${terms.map((t) => t.text).join(",")}`));
  else if (!product && counted) say(`All ${counted} refused candidates are on this page and this is none of them: it is either outside the job's search space, or it was feasible and not tried${d.ended ? ` (the study ended: ${d.ended})` : " yet"}.`);
  const near = [...Page.refused].map((r) => [terms.filter((term) => term.holds(r)).length, r]).filter(([n]) => n > 0).sort((a, b) => b[0] - a[0]).slice(0, 3);
  if (near.length) {
    say("The refused candidates nearest to it:");
    for (const [, r] of near) answer.push(Page.el("h3", {}, r.label), Page.reasonTable(r));
  }
};

Page.groupsTable = () => {
  const groups = Page.document.rejected || [];
  if (!groups.length) return Page.fill("groups", Page.el("p", { class: "muted" }, "No candidate was refused."));
  const rows = groups.map((group) => {
    const open = Page.el("button", { type: "button", class: "link", onclick: () => { document.getElementById("lookup-text").value = group.example; Page.lookup(group.example); } }, group.example);
    return [Page.words(group.code), Page.cell(group.count, group.count.toLocaleString("en")), Page.el("td", {}, open)];
  });
  Page.fill("groups", Page.table(["reason", "refused", "an example"], rows, "Refused candidates by first reason"));
};

Page.initLookup = () => {
  document.getElementById("lookup").addEventListener("submit", (event) => { event.preventDefault(); Page.lookup(document.getElementById("lookup-text").value); });
  document.getElementById("lookup-text").addEventListener("search", (event) => { if (!event.target.value) Page.fill("answer"); });
};
