"use strict";
// A page that follows a running study asks its own server for what is new; filter, scroll and zoom stay.
Page.follow = () => {
  const { live } = Page, banner = document.getElementById("live");
  if (live.back) Page.fill("back", Page.el("a", { href: live.back }, "all studies"), " · ");
  let version = live.version, failures = 0;
  const say = (text, bad) => {
    banner.hidden = false;
    if (banner.textContent !== text) banner.textContent = text;
    banner.toggleAttribute("data-bad", Boolean(bad));
  };
  const stand = () => {
    const { state } = Page.document;
    if (state === "running") say("Live: this page follows the study while it runs.");
    else if (state === "interrupted") say("The study was interrupted; the page waits for it to be resumed.");
    else if (state === "new") say("The study has not begun; the page waits.");
    else say("The study has ended; these are its last figures.");
  };
  const merge = (update) => {
    const trials = update.document.trials_from === 0 ? update.document.trials : Page.document.trials.slice(0, update.document.trials_from).concat(update.document.trials);
    const before = Page.document;
    Page.document = { ...update.document, trials };
    if (update.refused) Page.refused = update.refused;
    version = update.version;
    const done = () => { document.documentElement.dataset.version = version; };
    // A heartbeat moves the account and the timeline alone.
    const same = trials.length === before.trials.length && ["state", "winner", "baseline"].every((key) => Page.document[key] === before[key]);
    if (same && !update.refused && update.document.trials_from > 0) { Page.headline(); Page.kindsTable(Page.document); Page.timeline(Page.document); done(); } else Page.all(done);
  };
  const ask = async () => {
    let wait = Page.document.state === "running" ? 2000 : 5000;
    try {
      const query = `version=${encodeURIComponent(version)}&trials=${Page.document.trials.length}&refused=${Page.refused.length}`;
      const answer = await fetch(`${live.url}?${query}`, { cache: "no-store", signal: AbortSignal.timeout(15000) });
      if (answer.status === 200) merge(await answer.json());
      else if (answer.status !== 204) throw new Error(`the server answered ${answer.status}`);
      failures = 0;
      stand();
    } catch (error) {
      failures += 1;
      wait = Math.min(30000, 2000 * failures);
      say(`The server is gone (${error.message}); these figures are the last it sent. Asking again.`, true);
    }
    setTimeout(ask, wait);
  };
  document.documentElement.dataset.version = version;
  stand();
  setTimeout(ask, 1000);
};
if (Page.live) Page.follow();
