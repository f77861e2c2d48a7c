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
  const facts = element("ul", { class: "facts" }), families = element("tbody");
  const rates = new Chart("Solve rate");
  const others = charts.map((chart) => ({ ...chart, drawn: new Chart(chart.title, "low") }));
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Family"),
    element("th", { scope: "col", class: "number" }, "First"), element("th", { scope: "col", class: "number" }, "Latest"))), families);
  const small = element("div", { class: "charts" }, ...others.map((other) => other.drawn.figure));
  const body = element("div", {}, facts, rates.figure, table, small);
  card.append(element("div", { class: "head" }, element("h3", {}, name), step), fault, body);
  card.update = (head) => {
    const steps = Object.values(rows.steps).filter((row) => row.run === name).sort((a, b) => a.step - b.step);
    put(step, steps.length ? `step ${head.step}` : "no step yet");
    put(fault, head.fault || (steps.length ? "" : "Its first step has not ended."));
    fault.hidden = !fault.textContent;
    body.hidden = !steps.length;
    if (!steps.length) return;
    tellFacts(facts, head.facts);
    const first = steps[0].step, last = steps[steps.length - 1].step;
    const xs = steps.map((row) => steps.length < 2 ? 1 : (row.step - first) / (last - first));
    const column = (key) => steps.map((row) => row[key] ?? null);
    const names = Object.keys(head.families).sort();
    const kinds = Object.fromEntries(names.map((key, number) => [key, `l${number % 6} ${["", "dashed", "dotted"][Math.floor(number / 6) % 3]}`.trim()]));
    rates.draw(xs, names.map((key) => ({ kind: kinds[key], values: column(FAMILY + key), join: true })), 1,
      `Solve rate by family: ${names.map((key) => `${key} ${percent(head.families[key].latest)}`).join(", ")}.`);
    put(rates.top, "up to 100 %");
    fill(families, names.map((key) => [key, { ...head.families[key], kind: kinds[key] }]), familyRow);
    for (const { drawn, key, share } of others) line(drawn, xs, column(key), share ? percent : count, share ? 1 : 0);
    for (const chart of [rates, ...others.map((other) => other.drawn)]) { put(chart.left, `step ${first}`); put(chart.right, `step ${last}`); }
  };
  return card;
}

function tellFacts(list, facts) {
  while (list.children.length > facts.length) list.lastChild.remove();
  facts.forEach(([title, value], number) => {
    if (list.children.length <= number) list.append(element("li", {}, element("span"), " ", element("b")));
    put(list.children[number].firstChild, title);
    put(list.children[number].lastChild, value);
  });
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
  const name = element("th", { scope: "row" }, swatch, key);
  return tableRow([name, first, latest], (newer) => {
    stroke.setAttribute("class", newer.kind);
    put(first, percent(newer.first));
    put(latest, percent(newer.latest));
  });
}
