"use strict";
// Hears what is new from the daemon, keeps it by section and key, and shows it once a frame.

const $ = (id) => document.getElementById(id);
const rows = { pools: {}, tenants: {}, leases: {}, failures: {}, runs: {}, steps: {} };
const points = {}; // by pool: [time, warm, starting, active, waiting, failed, start, oldest wait]
const WINDOW_SECONDS = 900;
let source = null, charts = [], begun = false, actions = false, token = null, lead = 0, leased = 0, heard = 0;
let link = "", waitingFrame = false, draining = false;

const now = () => Date.now() / 1000 + lead;

// ---- the stream

function connect() {
  source = new EventSource("events");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => {
    tellLink();
    // The browser tries again by itself, but for refusals.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

function take(message) {
  heard = Date.now();
  lead = message.now - heard / 1000;
  draining = message.draining;
  leased = message.leased;
  const before = new Set(Object.keys(rows.failures));
  if (message.begin) {
    for (const section of Object.keys(rows)) rows[section] = {};
    charts = message.begin.charts;
    actions = message.begin.actions;
    put($("version"), message.begin.version);
    $("unlock").hidden = !actions;
  }
  for (const section of Object.keys(rows)) {
    const change = message[section];
    if (!change) continue;
    Object.assign(rows[section], change.set);
    for (const key of change.gone || []) delete rows[section][key];
  }
  for (const [pool, found] of Object.entries(message.points || {})) addPoints(pool, found);
  if (begun && message.failures) announce(Object.keys(rows.failures).filter((key) => !before.has(key)));
  begun = true;
  tellLink();
  soon();
}

function addPoints(pool, found) {
  const kept = points[pool] = points[pool] || [];
  const last = kept.length ? kept[kept.length - 1][0] : 0;
  kept.push(...found.filter((point) => point[0] > last));
  while (kept.length && kept[0][0] < kept[kept.length - 1][0] - WINDOW_SECONDS) kept.shift();
}

function tellLink() {
  const live = source && source.readyState === EventSource.OPEN && Date.now() - heard < 5000;
  const words = live ? (draining ? "the daemon is shutting down" : "live")
    : begun ? `no connection: shown is ${new Date(heard).toLocaleTimeString()}; trying again` : "connecting";
  if (words === link) return;
  link = words;
  $("link").textContent = words;
  $("link").className = `badge ${live ? (draining ? "fair" : "good") : "bad"}`;
  document.body.classList.toggle("stale", begun && !live);
}

function announce(keys) {
  if (!keys.length) return;
  const last = rows.failures[keys.sort((a, b) => rows.failures[a].when - rows.failures[b].when).pop()];
  const many = keys.length > 0 ? `${keys.length + 1} sandboxes failed; the last: ` : "";
  $("news").textContent = `${many}${last.sandbox} failed in phase ${last.phase}: ${last.message}`;
}

function soon() {
  if (waitingFrame) return;
  waitingFrame = true;
  requestAnimationFrame(() => { waitingFrame = false; show(); });
}

// ---- tables that keep their rows, so that what has the focus keeps it

function fill(body, entries, make) {
  const known = new Map([...body.children].map((line) => [line.dataset.key, line]));
  entries.forEach(([key, row], place) => {
    let line = known.get(key);
    if (!line) {
      line = make(key, row);
      line.dataset.key = key;
    }
    known.delete(key);
    if (body.children[place] !== line) body.insertBefore(line, body.children[place] || null);
    line.update(row);
  });
  for (const line of known.values()) line.remove();
}

function tableRow(cells, update) {
  const line = element("tr", { role: "row" });
  for (const each of cells) each.setAttribute("role", each.tagName === "TH" ? "rowheader" : "cell");
  line.append(...cells);
  line.update = update;
  return line;
}

// The label stands before the value where the screen is too narrow for a table.
const cell = (kind = "", label = "") => element("td", { class: kind, "data-label": label });
const sized = (box, empty, entries) => { $(box).hidden = !entries.length; $(empty).hidden = entries.length > 0; };

function opener(name) {
  const button = element("button", { type: "button", class: "name" }, name);
  button.onclick = () => openCloseup(name);
  return button;
}

function show() {
  showPools();
  showFailures();
  showLeases();
  showTenants();
  showRuns();
}

function showFailures() {
  const entries = Object.entries(rows.failures).sort((a, b) => b[1].when - a[1].when);
  sized("failures-box", "no-failures", entries);
  const failed = Object.values(rows.pools).reduce((sum, row) => sum + row.failed_total, 0);
  put($("failures-count"), failed ? count(failed) : "");
  put($("failures-note"), entries.length < failed ? `The last ${entries.length} that are known, of ${count(failed)} since the daemon began.` : "");
  fill($("failures-rows"), entries, (key, row) => {
    const ago = cell("tight", "Ago"), what = cell("wide"), phase = cell("", "Phase"), cause = cell("tight", "Cause");
    const attempt = cell("number", "Attempt");
    phase.append(row.phase);
    cause.append(row.cause.toLowerCase());
    attempt.append(`${row.attempt}`);
    what.append(row.message);
    if (row.log) what.append(element("details", {}, element("summary", {}, "Its last lines"), element("pre", {}, row.log)));
    const cells = [ago, element("th", { scope: "row", class: "tight" }, opener(row.sandbox)),
      phase, cause, attempt, what];
    return tableRow(cells, (newer) => put(ago, age(now() - newer.when)));
  });
}

function showLeases() {
  $("unlock-form").hidden = Boolean(token);
  $("unlocked").hidden = $("actions-head").hidden = !token;
  const wanted = $("filter").value.toLowerCase();
  const all = Object.entries(rows.leases).sort((a, b) => a[1].since - b[1].since);
  const entries = all.filter(([key, row]) => `${key} ${row.pool} ${row.tenant} ${row.holder}`.toLowerCase().includes(wanted));
  sized("leases-box", "no-leases", entries);
  put($("no-leases"), all.length ? "No lease shown here has that in it." : "Nobody holds a sandbox.");
  put($("leases-count"), leased ? `${leased}` : "");
  put($("leases-note"), all.length && all.length < leased
    ? `${all.length} of ${leased} leases, those that are held longest.` : "");
  fill($("leases-rows"), entries, (key) => {
    const held = cell("number", "Held for"), ends = cell("number", "Ends in"), tenant = cell("", "Tenant");
    const who = cell("wide", "Holder"), uses = cell("number", "Leases"), act = cell("act");
    const release = element("button", { type: "button", class: "small" }, "Release");
    release.setAttribute("aria-label", `Release ${key}`);
    release.onclick = () => act_on(`sandboxes/${key}/release`, {}, `End the lease of ${key}? Its holder loses it.`);
    act.append(release);
    const name = element("th", { scope: "row", class: "tight" }, opener(key));
    return tableRow([name, held, ends, tenant, who, uses, act], (row) => {
      put(held, `${row.exact ? "" : "over "}${age(now() - row.since)}`);
      put(ends, row.expires === null ? "–" : age(row.expires - now()));
      put(tenant, row.tenant || "–");
      put(who, row.holder || "–");
      put(uses, `${row.uses}`);
      release.hidden = act.hidden = !token;
    });
  });
}

function showTenants() {
  const entries = Object.entries(rows.tenants).sort();
  sized("tenants-box", "no-tenants", entries);
  fill($("tenants-rows"), entries, () => {
    const cells = [element("th", { scope: "row" }), cell("", "Pool"),
      ...["Weight", "Holds", "Callers waiting", "They want"].map((label) => cell("number", label))];
    return tableRow(cells, (row) => {
      const values = [row.name, row.pool, row.weight, row.active, row.waiting, row.wanted];
      values.forEach((value, number) => put(cells[number], `${value}`));
    });
  });
}

// ---- pools

function showPools() {
  const entries = Object.entries(rows.pools).sort();
  $("no-pools").hidden = entries.length > 0;
  fill($("cards"), entries, poolCard);
}

function poolCard(name) {
  const card = element("article", { class: "card" });
  const state = element("span", { class: "badge" }), reason = element("p", { class: "reason" });
  const numbers = element("dl", { class: "numbers" }), shown = {};
  for (const key of ["active", "warm", "starting", "waiting", "failed"]) {
    shown[key] = element("dd");
    numbers.append(element("div", { class: key }, element("dt", {}, key), shown[key]));
  }
  const chart = new Chart("Sandboxes; failures as red marks"), starts = new Chart("Median start", "low");
  const facts = element("ul", { class: "facts" }), told = {};
  for (const key of ["Starts", "Next free in", "Longest wait", "Starts at once", "Size limit", "Leased so far", "Expired", "Lost"]) {
    told[key] = element("b");
    facts.append(element("li", {}, `${key} `, told[key]));
  }
  const form = warmForm(name);
  card.append(element("div", { class: "head" }, element("h3", {}, name), state, form), reason, numbers,
    chart.figure, starts.figure, facts);
  card.update = (row) => {
    put(state, row.state);
    state.className = `badge ${{ OK: "good", UNAVAILABLE: "bad" }[row.state] || "fair"}`;
    put(reason, row.state_reason || "");
    reason.hidden = !row.state_reason;
    form.hidden = !token;
    for (const key of ["active", "starting", "waiting"]) put(shown[key], count(row[key]));
    put(shown.failed, count(row.failed_total));
    if (shown.warm.dataset.said !== `${row.warm}/${row.warm_target}`) {
      shown.warm.dataset.said = `${row.warm}/${row.warm_target}`;
      shown.warm.replaceChildren(count(row.warm), element("small", {}, ` of ${count(row.warm_target)}`));
    }
    put(told.Starts, `${row.starts_per_second.toFixed(1)} /s`);
    put(told["Next free in"], seconds(row.next_free_seconds));
    put(told["Longest wait"], seconds(row.oldest_wait_seconds));
    put(told["Starts at once"], `up to ${row.start_limit}`);
    put(told["Size limit"], count(row.size_limit));
    put(told["Leased so far"], count(row.acquired_total));
    put(told.Expired, count(row.expired_total));
    put(told.Lost, count(row.lost_total));
    drawPool(chart, starts, name, row);
  };
  return card;
}

function warmForm(name) {
  const input = element("input", { type: "number", min: "0", required: "", "aria-label": `Sandboxes of ${name} kept warm` });
  const form = element("form", { class: "warm-form" }, "Keep warm", input, element("button", { class: "small" }, "Set"));
  form.onsubmit = (event) => {
    event.preventDefault();
    act_on(`pools/${name}/warm`, { warm: Number(input.value) }, null);
  };
  return form;
}

function drawPool(chart, starts, name, row) {
  const found = points[name] || [];
  if (!found.length) return;
  const end = found[found.length - 1][0], span = Math.max(60, end - found[0][0]);
  const xs = found.map((point) => 1 - (end - point[0]) / span);
  const column = (number) => found.map((point) => point[number]);
  const [warm, starting, active, waiting, failed] = [1, 2, 3, 4, 5].map(column);
  const both = active.map((value, i) => value + warm[i]), all = both.map((value, i) => value + starting[i]);
  const top = nice(Math.max(...all, ...waiting));
  const bad = failed.map((value, i) => i && value > failed[i - 1] ? 1 : 0);
  const zero = active.map(() => 0);
  chart.draw(xs, [
    { kind: "area s-active", values: active, below: zero }, { kind: "s-active", values: active },
    { kind: "area s-warm", values: both, below: active }, { kind: "s-warm", values: both },
    { kind: "area s-starting", values: all, below: both }, { kind: "s-starting", values: all },
    { kind: "s-waiting", values: waiting }, { kind: "s-failed", values: bad, marks: true },
  ], top, `Pool ${name} over the last ${age(span)}: active now ${row.active}, at most ${Math.max(...active)};`
    + ` waiting now ${row.waiting}, at most ${Math.max(...waiting)}; ${failed[failed.length - 1] - failed[0]} failures.`);
  put(chart.top, `up to ${count(top)}`);
  const latencies = column(6), known = latencies.filter((value) => value !== null);
  const slowest = known.length ? Math.max(...known) : null, scale = slowest ? slowest * 1.15 : 1;
  starts.figure.hidden = !known.length;
  starts.draw(xs, [{ kind: "s-active", values: latencies }], scale,
    `Median start of ${name}: now ${seconds(row.start_seconds)}, at most ${seconds(slowest)}.`);
  put(starts.top, `now ${seconds(row.start_seconds)}, at most ${seconds(slowest)}`);
  for (const each of [chart, starts]) { put(each.left, `${age(span)} ago`); put(each.right, "now"); }
}

// ---- what whoever has the token may do

async function act_on(path, body, question) {
  if (question && !confirm(question)) return;
  const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
  const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }).catch(() => null);
  if (reply && reply.ok) return;
  if (reply && reply.status === 401) token = null;
  alert(reply ? (await reply.text()).trim() : "The daemon does not answer.");
  soon();
}

$("unlock-form").onsubmit = (event) => {
  event.preventDefault();
  token = new FormData(event.target).get("token").trim();
  event.target.reset();
  soon();
};
$("filter").oninput = soon;
$("lookup").onsubmit = (event) => {
  event.preventDefault();
  openCloseup(new FormData(event.target).get("name").trim().replace(/^sandboxes\//, ""));
};

setInterval(() => { tellLink(); soon(); }, 1000);
connect();
