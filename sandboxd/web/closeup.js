"use strict";
// One sandbox from near, asked for again each second while its dialog is open.

let looking = null;

function openCloseup(name) {
  looking = name;
  put($("closeup-title"), name);
  $("closeup-facts").replaceChildren();
  $("closeup-commands").replaceChildren();
  $("closeup-fault").hidden = true;
  $("closeup").showModal();
  look();
}

async function look() {
  const name = looking;
  if (!name) return;
  const reply = await fetch(`sandboxes/${encodeURIComponent(name)}`).catch(() => null);
  const row = reply && reply.ok ? await reply.json() : null;
  const fault = row ? "" : reply ? (await reply.text()).trim() : "The daemon does not answer; trying again.";
  if (looking !== name) return;
  put($("closeup-fault"), fault);
  $("closeup-fault").hidden = !fault;
  if (row) showCloseup(row);
  setTimeout(look, 1000);
}

function showCloseup(row) {
  const facts = [["pool", row.pool], ["state", row.state.toLowerCase()]];
  if (row.created) facts.push(["age", age(now() - row.created)]);
  if (row.start_seconds) facts.push(["start took", seconds(row.start_seconds)]);
  if (row.lease) {
    facts.push(["held for", age(now() - row.lease.since)], ["tenant", row.lease.tenant || "–"]);
    if (row.lease.expires) facts.push(["lease ends in", age(row.lease.expires - now())]);
    for (const [key, value] of Object.entries(row.lease.labels)) facts.push([key, value]);
  }
  for (const [key, value] of Object.entries(row.place)) facts.push([key, value]);
  if (row.failure) {
    facts.push(["failed", `${age(now() - row.failure.when)} ago, attempt ${row.failure.attempt}, in phase ${row.failure.phase}, cause ${row.failure.cause.toLowerCase()}`],
      ["because", row.failure.message]);
    if (row.failure.log) facts.push(["its last lines", row.failure.log]);
  }
  const list = $("closeup-facts");
  while (list.children.length > 2 * facts.length) list.lastChild.remove();
  facts.forEach(([key, value], number) => {
    if (list.children.length <= 2 * number) list.append(element("dt"), element("dd"));
    put(list.children[2 * number], key);
    put(list.children[2 * number + 1], value);
  });
  showCommands(row);
}

function showCommands(row) {
  const box = $("closeup-commands");
  if (!row.commands.length) {
    const words = row.state === "GONE" ? "" : row.trouble || "No command has run here since the daemon began.";
    if (box.textContent !== words) box.replaceChildren(...(words ? [element("p", { class: "note" }, words)] : []));
    return;
  }
  if (!box.querySelector("article")) box.replaceChildren();
  fill(box, [...row.commands].reverse().map((command) => [command.id, command]), commandBox);
}

function commandBox(id, first) {
  const state = element("span", { class: "badge" }), box = element("article");
  const streams = ["stdout", "stderr"].map((stream) => {
    const title = element("h4"), text = element("pre", { tabindex: "0", "aria-label": `${stream} of ${id}` });
    box.append(title, text);
    return { stream, title, text };
  });
  box.prepend(element("div", { class: "head" }, element("h3", {}, element("code", {}, first.argv || id)), state));
  box.update = (command) => {
    put(state, command.running ? "running" : command.ended || "ended");
    state.className = `badge ${command.running ? "good" : ""}`;
    for (const { stream, title, text } of streams) {
      const size = command[`${stream}_bytes`], shown = command[stream];
      const follow = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
      put(title, size ? `${stream}, ${size > new TextEncoder().encode(shown).length ? "the end of " : ""}${count(size)} bytes` : `${stream}: nothing yet`);
      text.hidden = !size;
      title.hidden = !size && stream === "stderr";
      put(text, shown);
      if (follow) text.scrollTop = text.scrollHeight;
    }
  };
  return box;
}

$("closeup-close").onclick = () => $("closeup").close();
$("closeup").onclose = () => { looking = null; };
