"use strict";
// Training runs: what their metrics.jsonl says of each step.

const FAMILY = "solve_rate/";

function showRuns() {
  const entries = Object.entries(rows.runs);
  $("runs").hidden = $("runs-link").hidden = !entries.length;
  fill($("run-cards"), entries, runCard);
}

function runCard(name) {
  const card = element("article", { class: "card" });
  const step = element("span", { class: "badge" }), fault = element("p", { class: "note" });
  const facts = element("ul", { class: "facts" }), told = {};
  for (const key of ["Trainer waits", "Buffer ready", "being played", "Stale by", "Sampled", "Trained", "Sandboxes active", "warm", "waiting"]) {
    told[key] = element("b");
    facts.append(element("li", {}, `${key} `, told[key]));
  }
  const rates = new Chart("Solve rate"), waits = new Chart("Share of time the trainer waits", "low");
  const speed = new Chart("Tokens sampled a second", "low"), boxes = new Chart("Sandboxes active", "low");
  const families = element("tbody");
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Family"),
    element("th", { scope: "col", class: "number" }, "First"), element("th", { scope: "col", class: "number" }, "Latest"))), families);
  const body = element("div", {}, facts, rates.figure, table, waits.figure, speed.figure, boxes.figure);
  card.append(element("div", { class: "head" }, element("h3", {}, name), step), fault, body);
  card.update = (head) => {
    const steps = Object.values(rows.steps).filter((row) => row.run === name).sort((a, b) => a.step - b.step);
    const last = steps[steps.length - 1] || {};
    put(step, steps.length ? `step ${last.step}` : "no step yet");
    put(fault, head.fault || (steps.length ? "" : "Its first step has not ended."));
    fault.hidden = !fault.textContent;
    body.hidden = !steps.length;
    if (!steps.length) return;
    tellRun(told, last);
    const xs = steps.map((row) => steps.length < 2 ? 1 : (row.step - steps[0].step) / (last.step - steps[0].step));
    const names = [...new Set(steps.flatMap((row) => Object.keys(row).filter((key) => key.startsWith(FAMILY))))].sort();
    const kinds = Object.fromEntries(names.map((key, number) => [key, `l${number % 6} ${["", "dashed", "dotted"][Math.floor(number / 6) % 3]}`.trim()]));
    const column = (key) => steps.map((row) => row[key] ?? null);
    const latest = (key) => [...steps].reverse().find((row) => key in row)[key];
    rates.draw(xs, names.map((key) => ({ kind: kinds[key], values: column(key), join: true })), 1,
      `Solve rate by family: ${names.map((key) => `${key.slice(FAMILY.length)} ${percent(latest(key))}`).join(", ")}.`);
    put(rates.top, "up to 100 %");
    fill(families, names.map((key) => [key, { first: steps.find((row) => key in row)[key], latest: latest(key), kind: kinds[key] }]), familyRow);
    line(waits, xs, column("perf/wait_time_ratio"), percent, 1);
    line(speed, xs, column("rollout/generated_tok_s"), (value) => `${count(value)} /s`);
    line(boxes, xs, column("sandbox/active"), count);
    for (const chart of [rates, waits, speed, boxes]) { put(chart.left, `step ${steps[0].step}`); put(chart.right, `step ${last.step}`); }
  };
  return card;
}

function tellRun(told, last) {
  const say = (key, unit = "") => last[key] === undefined ? "–" : `${count(last[key])}${unit}`;
  put(told["Trainer waits"], percent(last["perf/wait_time_ratio"]));
  put(told["Buffer ready"], say("buffer/ready", " groups"));
  put(told["being played"], say("rollout/inflight", " episodes"));
  put(told["Stale by"], `${say("off_policy/mean")} versions, at most ${say("off_policy/max")}`);
  put(told.Sampled, say("rollout/generated_tok_s", " tokens/s"));
  put(told.Trained, say("perf/trained_tok_s", " tokens/s"));
  put(told["Sandboxes active"], say("sandbox/active"));
  put(told.warm, say("sandbox/warm"));
  put(told.waiting, say("sandbox/waiting"));
}

function line(chart, xs, values, say, top) {
  const known = values.filter((value) => value !== null);
  chart.figure.hidden = !known.length;
  if (!known.length) return;
  const most = Math.max(...known), words = `now ${say(known[known.length - 1])}, at most ${say(most)}`;
  chart.draw(xs, [{ kind: "s-active", values, join: true }], top || nice(most), words);
  put(chart.top, words);
}

function familyRow(key, row) {
  const first = cell("number"), latest = cell("number");
  const swatch = document.createElementNS(SVG, "svg"), stroke = document.createElementNS(SVG, "path");
  swatch.setAttribute("class", "key");
  swatch.setAttribute("viewBox", "0 0 26 10");
  swatch.setAttribute("aria-hidden", "true");
  stroke.setAttribute("d", "M0 5H26");
  swatch.append(stroke);
  const name = element("th", { scope: "row" }, swatch, key.slice(FAMILY.length));
  return tableRow([name, first, latest], (newer) => {
    stroke.setAttribute("class", newer.kind);
    put(first, percent(newer.first));
    put(latest, percent(newer.latest));
  });
}
