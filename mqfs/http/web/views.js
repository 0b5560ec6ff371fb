// The views of the page: of a group, a stream or view, a consumer, and the dead letters.

import {
  age, alertLine, button, el, field, figures, link, notice, number, pathOf, quote, refresh, say, section, size,
  table,
} from "./elements.js";
import { Problem, ask, command, doing, get, getLines, inWords, lines, poll, rates, withSpark } from "./requests.js";
import { confirmed, dangerous, errorsTable, onOpen, readSettings, setting, submits, whoTable } from "./controls.js";
import { NEWEST, messageList, messageRow, publishForm } from "./messages.js";

const ROWS = 50; // of a table's page
const LISTED = 1000; // names asked for at once

// ---------------------------------------------------------------- views: group

export async function showGroup(names, view) {
  const path = pathOf(names, true);
  const { signal, line } = view;
  const settings = await readSettings(names, signal);
  const head = el("dl", { class: "figures" });
  const streams = streamList(names, view);
  const consumers = el("div");
  const views = el("div");
  const steps = firstSteps(names);
  const name = names.at(-1);
  view.place.append(
    el("h1", { text: name ?? "/" }, el("small", { text: " group" })), line, steps,
    streams.place, publishForm(names, view), consumers, views,
    section("Numbers", head),
    section("Make", makeForm(names, view)),
    ctlForm(names, settings, view),
    onOpen("Refused writes", () => errorsTable(path, signal)),
    onOpen("Open files", () => whoTable(path, signal)));
  if (names.length) {
    view.place.append(el("div", { class: "bar" }, dangerous(settings, line, "Remove group",
      "The group has to be empty.", name, async () => {
        await ask("DELETE", path);
        location.hash = pathOf(names.slice(0, -1), true);
        view.drawTree();
      }, `group ${name} removed`)));
  }
  view.keys["/"] = () => streams.filter.focus();
  await poll(signal, line, async () => {
    const [stats] = await Promise.all([get(path + ".stats?streams=no", signal), streams.load()]);
    const failure = stats.failure ? ["read-only", `since ${stats.failure}`] : null;
    refresh(head, ...figures([
      ["rate", withSpark(rates(path, stats.written))],
      ["log", size(stats.log_bytes)],
      ["next sequence", number(stats.next)],
      ["dead letters", link([...names, ".dead"], false, number(stats.dead_letters))],
      ["refused writes", number(stats.refused)],
      ["fell behind", number(stats.fell_behind)],
      ["delayed", number(stats.held)],
      failure,
      stats.damaged ? ["damaged", number(stats.damaged)] : null,
      stats.replica_lag_bytes == null ? null
        : ["replica lacks", `${size(stats.replica_lag_bytes)}, for ${Math.round(stats.replica_lag_seconds)} s`],
    ]));
    const isEmpty = !streams.count() && !stats.groups.length && !Object.keys(stats.consumers).length;
    steps.hidden = !isEmpty;
    refresh(consumers, Object.keys(stats.consumers).length
      ? section("Consumers", consumersTable(names, stats.consumers)) : "");
    const bound = Object.entries(stats.views);
    refresh(views, bound.length ? section("Views", table("", [["view"], ["readers", "number"]],
      bound.map(([one, row]) => [link([...names, one], false, one), number(row.readers)]))) : "");
  });
}

/** Return first steps for a terminal, which are shown while a group is empty. */
function firstSteps(names) {
  const group = location.origin + (names.length ? pathOf(names, true) : "/shop/");
  const steps = [
    names.length ? null : ["Make a group (or use Make below)", `curl -X PUT ${group}`],
    ["Publish to a stream in it; the first message makes the stream", `curl -d hello ${group}orders`],
    ["Read what it keeps", `curl '${group}orders?since=first'`],
    ["Follow it, and publish again", `curl -N -H 'Accept: text/event-stream' ${group}orders`],
  ];
  const rows = steps.filter(Boolean).map(([text, line]) => el("li", {}, text, el("pre", { tabindex: "0", text: line })));
  const node = section("First steps", el("ol", {}, rows));
  node.hidden = true;
  return node;
}

/** Return the list of a group's streams: LISTED names at a time, sorted by rate. */
function streamList(names, view) {
  const path = pathOf(names, true);
  const found = el("div");
  const filter = el("input", { type: "search", "aria-keyshortcuts": "/", oninput: () => { page = 0; draw(); } });
  let entries = [], after = "", more = null, page = 0;
  const step = (pages) => { page += pages; draw(); };
  const place = section("Streams", el("div", { class: "bar" }, field("Filter", filter)), found);
  place.hidden = true; // until the group has streams

  function draw() {
    const chosen = entries.filter((entry) => entry.name.includes(filter.value));
    const pages = Math.max(1, Math.ceil(chosen.length / ROWS));
    page = Math.min(page, pages - 1);
    const rows = chosen.slice(page * ROWS, (page + 1) * ROWS).map((entry) => [
      link([...names, entry.name], false, entry.name), withSpark(entry.rates), number(entry.messages), size(entry.bytes),
      number(entry.readers), number(entry.blocked),
    ]);
    const first = chosen.length ? page * ROWS + 1 : 0;
    const caption = `${first}–${page * ROWS + rows.length} of ${number(chosen.length)}${more || after ? " listed" : ""}, by rate`;
    const tools = [
      pages > 1 && button("Previous page", () => step(-1), { disabled: page === 0 }),
      pages > 1 && button("Next page", () => step(1), { disabled: page === pages - 1 }),
      after && button("First names", () => load("")),
      more && button(`Next ${number(LISTED)} names`, () => load(more)),
    ].filter(Boolean);
    refresh(found, table(caption, [["stream"], ["rate", "number"], ["messages", "number"], ["kept", "number"],
      ["readers", "number wide"], ["blocked writers", "number wide"]], rows), el("div", { class: "bar" }, tools));
  }

  async function load(from = after) {
    const query = `?type=stream&detail&count=${LISTED}` + (from ? `&after=${encodeURIComponent(from)}` : "");
    const listed = await get(path + query, view.signal);
    if (from !== after) page = 0;
    [after, more] = [from, listed.after];
    entries = listed.entries.map((entry) => ({ ...entry, rates: rates(pathOf([...names, entry.name]), entry.written) }));
    entries.sort((a, b) => (b.rates.at(-1) ?? 0) - (a.rates.at(-1) ?? 0) || b.written - a.written
      || a.name.localeCompare(b.name));
    place.hidden = !entries.length && !after;
    draw();
  }
  return { place, filter, load, count: () => entries.length };
}

function consumersTable(names, consumers) {
  const rows = Object.entries(consumers).map(([name, one]) => [
    link([...names, ".consumers", name], false, name), one.over || "the group",
    number(one.waiting) + (one.held_back ? ` (${one.held_back})` : ""), number(one.claimed),
    age(one.oldest), number(one.failed), number(one.dead),
  ]);
  return table("", [["consumer"], ["over", "wide"], ["waiting", "number"], ["claimed", "number"],
    ["oldest", "number"], ["failed", "number wide"], ["dead", "number wide"]], rows);
}

function makeForm(names, view) {
  const line = alertLine();
  const name = el("input", { required: true, autocomplete: "off", spellcheck: "false" });
  const over = el("input", { autocomplete: "off", spellcheck: "false", placeholder: "the group" });
  const overField = field("over", over);
  overField.hidden = true;
  const kind = el("select", { onchange: () => (overField.hidden = kind.value !== "consumer") },
    // In the root group only a first message makes a stream.
    [...(names.length ? ["stream"] : []), "group", "consumer"].map((text) => el("option", { text })));
  const make = doing(line, async () => {
    const within = kind.value === "consumer" ? [...names, ".consumers", name.value] : [...names, name.value];
    const query = kind.value === "consumer" && over.value ? `?over=${encodeURIComponent(over.value)}` : "";
    const answer = await ask("PUT", pathOf(within, kind.value === "group") + query);
    notice(`${kind.value} ${name.value} ${answer.status === 201 ? "made" : "is there"}`);
    if (kind.value === "group") view.drawTree();
    view.again();
  });
  return el("form", { onsubmit: make },
    el("div", { class: "bar" }, field("Make a", kind), field("named", name), overField, el("button", { text: "Make" })), line);
}

let settingsOpen = ""; // the path of the group whose settings are open: they stay open when the view is drawn again

/** Return the form for the text of `ctl`. Only changed lines are sent: other users may have changed other lines. */
function ctlForm(names, settings, view) {
  const line = alertLine();
  const path = pathOf(names, true);
  if (settings.ctl === null) {
    say(line, inWords(settings.why));
    return el("details", { class: "section" }, el("summary", { text: "Settings (ctl)" }), line);
  }
  const text = el("textarea", { rows: "16", spellcheck: "false", "aria-label": "Settings (ctl)", onkeydown: submits });
  text.value = settings.ctl;
  const save = doing(line, async () => {
    const known = new Set(settings.ctl.split("\n"));
    const changed = text.value.split("\n").filter((one) => one.trim() && !known.has(one));
    if (!changed.length) return notice("no line was changed");
    await command(names, ...changed);
    notice(`sent: ${changed.join(" · ")}`);
    view.again();
  });
  const node = el("details", { class: "section", open: settingsOpen === path, ontoggle: () => (settingsOpen = node.open ? path : "") },
    el("summary", { text: "Settings (ctl)" }),
    el("form", { onsubmit: save },
      el("p", { class: "quiet", text: "Changed and new lines are sent, all or none. A line that is taken out changes nothing: "
        + "write remove, unbind, or the default." }),
      text, line, el("div", { class: "bar" }, el("button", { text: "Save" }),
        button("Discard changes", () => { text.value = settings.ctl; say(line, ""); }))));
  return node;
}

// ---------------------------------------------------------------- views: stream

export async function showStream(names, view) {
  const path = pathOf(names);
  const group = names.slice(0, -1);
  const name = names.at(-1);
  const { signal, line } = view;
  const [first, settings] = await Promise.all([ask("HEAD", path, { signal }), readSettings(group, signal)]);
  const isView = !first.headers.has("Mqfs-Messages");
  const head = el("dl", { class: "figures" });
  const list = messageList(names, view, isView);
  const tools = isView
    ? [dangerous(settings, line, "Remove view", "The messages stay in their streams.", name, remove, `view ${name} removed`)]
    : [dangerous(settings, line, "Clear", "All that the stream keeps is dropped, for every reader and consumer.", name,
        async () => { await command(group, `clear ${quote(name)}`); await list.newest(); }, `${name} cleared`),
      dangerous(settings, line, "Remove stream", "The stream goes, with all it keeps.", name, remove, `stream ${name} removed`)];
  async function remove() {
    await ask("DELETE", path);
    location.hash = pathOf(group, true);
  }
  view.place.append(el("h1", { text: name }, el("small", { text: isView ? " view" : " stream" })), line, head);
  if (!isView) view.place.append(publishForm(names, view, list.published));
  view.place.append(list.place, onOpen("Open files", () => whoTable(pathOf(group, true), signal, name)),
    el("div", { class: "bar" }, tools));
  await doing(line, list.newest)();
  await poll(signal, line, async () => {
    const { headers } = await ask("HEAD", path, { signal });
    const value = (key) => headers.get(`Mqfs-${key}`);
    if (isView) return refresh(head, ...figures([["next sequence", number(value("Next"))]]));
    refresh(head, ...figures([
      ["rate", withSpark(rates(path, Number(value("Written"))))],
      ["messages", number(value("Messages"))],
      ["kept", size(Number(value("Bytes")))],
      ["first", number(value("First"))],
      ["next sequence", number(value("Next"))],
      settings.ctl && ["replay", setting(settings.ctl, "replay")],
      settings.ctl && ["deliver", setting(settings.ctl, "deliver")],
    ]));
  });
}

// ---------------------------------------------------------------- views: consumer

export async function showConsumer(names, view) {
  const path = pathOf(names);
  const group = names.slice(0, -2);
  const name = names.at(-1);
  const { signal, line } = view;
  const settings = await readSettings(group, signal);
  const head = el("dl", { class: "figures" });
  const rows = el("ol", { class: "messages", "aria-label": "Waiting messages, the oldest first" });
  const hint = el("p", { class: "quiet" });
  const seekLine = alertLine();
  const word = el("input", { required: true, size: "14", placeholder: "end, 17, -100, -10m", autocomplete: "off" });
  const seek = doing(seekLine, async () => {
    const to = word.value.trim();
    if (!(await confirmed("Seek", `${name} continues at ${to}. All its claims are void: their messages may be done twice.`, name))) return;
    await ask("POST", `${path}/seek`, { body: to });
    notice(`${name} continues at ${to}`);
    await backlog();
  });
  const command = async (verb, done) => {
    await ask("POST", pathOf(group, true) + "ctl", { body: `${verb} '${name.replaceAll("'", "''")}'` });
    notice(done);
  };
  const backlog = async () => {
    const found = await getLines(`${path}?count=${NEWEST}`, signal);
    say(hint, found.length ? `the oldest ${found.length}; claimed ones are not among them` : "nothing waits");
    rows.replaceChildren(...found.map((message) => messageRow(message, {
      source: `${message.stream}, delivery ${message.deliveries ?? 1}` })));
  };
  view.place.append(
    el("h1", { text: name }, el("small", { text: " consumer" })), line, head,
    el("form", { onsubmit: seek }, el("div", { class: "bar" }, field("Seek to", word), el("button", { text: "Seek", class: "danger" })),
      seekLine),
    section("Waiting messages", hint, button("Read again", doing(line, backlog)), rows),
    onOpen("Open files", () => whoTable(pathOf(group, true), signal, name)),
    el("div", { class: "bar" },
      button("Pause", doing(line, () => command("pause", `${name} is paused`))),
      button("Resume", doing(line, () => command("resume", `${name} is resumed`)))),
    el("div", { class: "bar" }, dangerous(settings, line, "Remove consumer", "Its position is forgotten.", name, async () => {
      await ask("DELETE", path);
      location.hash = pathOf(group, true);
    }, `consumer ${name} removed`)));
  await doing(line, backlog)();
  await poll(signal, line, async () => {
    const stats = await get(pathOf(group, true) + ".stats?streams=no", signal);
    const one = stats.consumers[name];
    if (!one) throw new Problem(404, `no consumer ${name}`);
    const over = one.over ? link([...group, one.over], false, one.over) : link(group, true, "the group");
    refresh(head, ...figures([
      ["over", over],
      ["waiting", number(one.waiting)],
      ...(one.held_back ? [["held back by", one.held_back]] : []),
      ["acknowledged", withSpark(rates(`${path}#`, one.acknowledged))],
      ["claimed", number(one.claimed)],
      ["oldest waits", age(one.oldest)],
      ["delayed", number(one.delayed)],
      ["handles", number(one.handles)],
      ["waiting reads", number(one.parked)],
      ["delivered", number(one.delivered)],
      ["failed", number(one.failed)],
      ["dead letters", link([...group, ".dead"], false, number(one.dead))],
    ]));
  });
}

// ---------------------------------------------------------------- views: dead letters

// Headers of a dead letter that are not sent with the changed message: the letter's own, and those that a server sets.
const NOT_SENT = new Set(["stream", "sequence", "deliveries", "reason", "consumer", "sender", "id", "held", "ttl"]);

export async function showDead(names, view) {
  const group = names.slice(0, -1);
  const { signal, line } = view;
  const settings = await readSettings(group, signal);
  const { dead } = settings;
  const path = pathOf([...group, dead]);
  const rows = el("ol", { class: "messages", "aria-label": "Dead letters, the oldest first" });
  const hint = el("p", { class: "quiet" });
  const more = button(`Next ${NEWEST}`, doing(line, () => load(next)));
  const source = el("select", {}, el("option", { value: "", text: "every stream" }));
  const count = el("input", { type: "number", min: "1", size: "5", placeholder: "all", disabled: true });
  source.addEventListener("change", () => { count.disabled = !source.value; count.value = ""; });
  let next = null;

  const letter = (message) => {
    const { stream, sequence, deliveries, reason, consumer } = message.headers ?? {};
    const text = `${reason ?? "no reason"} · from ${stream ?? "?"} ${sequence ?? ""} · deliveries ${deliveries ?? "?"}`
      + (consumer ? ` · ${consumer}` : "");
    const drop = () => el("div", { class: "bar" }, dangerous(settings, line, `Drop ${message.sequence}`,
      `This dead letter of ${stream ?? "?"} is dropped for good.`, dead, async () => {
        await command(group, `drop ${quote(dead)} ${message.sequence}`);
        await load();
      }, `${message.sequence} dropped`));
    const tools = stream && message.body !== undefined && !message.headers.part
      ? () => el("div", { class: "stack" }, drop(), edited(message)) : drop;
    return { stream, node: messageRow(message, { source: text, tools }) };
  };

  /** Return the form that changes a dead letter. It publishes the changed message, with an id so that a repeat is not
   * published twice, and then drops the letter. A text field turns line ends into \n; the original ones are sent. */
  const edited = (message) => {
    const { stream } = message.headers;
    const [end = "\n", ...others] = new Set(message.body.match(/\r\n|\r|\n/g));
    if (others.length) return el("p", { class: "quiet", text: "Its line ends are mixed: it cannot be changed here." });
    const text = el("textarea", { rows: "4", "aria-label": `Body of ${message.sequence}` });
    text.value = message.body;
    return el("div", { class: "bar" }, text, button("Send changed", doing(line, async () => {
      const query = new URLSearchParams({ id: `edit of ${dead} ${message.sequence}`, create: "no" });
      for (const [key, value] of Object.entries(message.headers)) {
        if (key === "priority" || key === "single" || key === "key") query.set(key, key === "single" ? "yes" : value);
        else if (!NOT_SENT.has(key)) query.set(`h-${key}`, value);
      }
      const answer = await ask("POST", `${pathOf([...group, stream])}?${query}`, { body: text.value.replaceAll("\n", end) });
      const { sequence, retained } = await answer.json();
      if (sequence === null) throw new Problem(0, `discarded: ${stream} is full (the dead letter stays)`);
      if (!retained) throw new Problem(0, `no receiver of ${stream} (the dead letter stays)`);
      await command(group, `drop ${quote(dead)} ${message.sequence}`);
      notice(`${message.sequence} sent to ${stream}`);
      await load();
    })));
  };

  async function load(since = null) {
    let found = [];
    if ((await get(pathOf(group, true) + ".stats?streams=no", signal)).dead_letters) { // else the stream may be missing
      const answer = await ask("GET", `${path}?since=${since ?? "first"}&count=${NEWEST}&format=json`, { signal });
      found = lines(await answer.text()).filter((message) => !message.lost);
      next = answer.headers.get("Mqfs-Next");
    }
    if (since === null) rows.replaceChildren();
    for (const { stream, node } of found.map(letter)) {
      rows.append(node);
      const known = [...source.options].some((option) => option.value === stream);
      if (stream && !known) source.append(el("option", { value: stream, text: stream }));
    }
    more.hidden = found.length < NEWEST;
    const shown = rows.childElementCount;
    say(hint, shown ? `${number(shown)} shown, the oldest first` : "no dead letters");
  }

  const retryLine = alertLine();
  const retry = (most) => doing(retryLine, async () => {
    const words = source.value ? ` ${quote(source.value)}${most() ? ` ${most()}` : ""}` : "";
    await command(group, `redrive${words}`);
    notice(`sent back: ${most() || "all"} of ${source.value || "every stream"}`);
    await load();
  });
  const one = button("Retry the oldest", retry(() => "1"), { disabled: true });
  source.addEventListener("change", () => (one.disabled = !source.value));
  view.place.append(
    el("h1", { text: "Dead letters" }, el("small", { text: ` in ${group.at(-1) ?? "/"}, stream ${dead}` })), line,
    el("form", { onsubmit: retry(() => count.value) },
      el("div", { class: "bar" }, field("Of", source), one, field("Count", count), el("button", { text: "Retry" })),
      el("p", { class: "quiet", text: "A retry sends the oldest back to their stream, their deliveries counted from 0. "
        + "A count needs a stream." }), retryLine),
    el("div", { class: "bar" }, button("Read again", doing(line, () => load())), dangerous(settings, line, "Drop all",
      "All dead letters of the group are dropped for good.", dead, async () => {
        await command(group, `clear ${quote(dead)}`);
        await load();
      }, "all dropped")),
    hint, rows, more);
  await doing(line, () => load())();
}
