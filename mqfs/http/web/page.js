// The page of mqfs: a view of the tree for a browser. All it shows comes from the routes of mqfs-http(5).
// What others wrote (names, bodies, headers, reasons) becomes a text node, never markup.

const NEWEST = 50; // messages of a look at a stream
const SHOWN = 500; // messages that stay on the page while a stream is followed
const ROWS = 50; // of a table's page
const LISTED = 1000; // names asked for at once
const SAMPLES = 30; // of a sparkline
const POLL_MS = 2000;
const HEX_BYTES = 16384; // of a body that are shown as hex
const PREVIEW = 200; // characters of a body in a row

const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------- elements

const READ_ALOUD = ["aria-label", "title", "placeholder"];
const HIDDEN = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/** A text with what cannot be seen, or turns what stands beside it around, as an escape. */
const visible = (text) => String(text).replace(HIDDEN, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
const say = (node, text) => { node.textContent = visible(text); };

/** An element. `on…` are listeners, `text` is its text; of everything else attributes. */
function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") say(node, value);
    else if (READ_ALOUD.includes(name)) node.setAttribute(name, visible(value));
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  const there = children.flat().filter((child) => child != null && child !== false);
  node.append(...there.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

const button = (text, onclick, more = {}) => el("button", { type: "button", text, onclick, ...more });
const link = (names, slash, text, more = {}) => el("a", { href: "#" + pathOf(names, slash), text, ...more });
const section = (title, ...children) => el("section", { "aria-label": title }, el("h2", { text: title }), ...children);
const field = (text, input) => el("label", {}, text + " ", input);
const alertLine = () => el("p", { class: "error", role: "alert" });

function spark(found) {
  const values = [...Array(SAMPLES - found.length).fill(0), ...found];
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  const line = document.createElementNS(ns, "polyline");
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, i) => `${(i * 64) / (SAMPLES - 1)},${(15 - (14 * value) / most).toFixed(1)}`);
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 64 16");
  svg.setAttribute("aria-hidden", "true"); // the number stands beside it
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

/** A list of figures: rows of [what, value]; a value may be nodes. */
const figures = (rows) =>
  rows.filter(Boolean).map(([what, value]) => el("div", {}, el("dt", { text: what }), el("dd", {}, value)));

/** A table in its frame. `columns`: [title, class]; rows are lists of cells. */
function table(caption, columns, rows) {
  const cell = (tag, content, kind, more) => el(tag, { class: kind, ...more }, content);
  return el("table", {},
    el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, columns.map(([title, kind]) => cell("th", title, kind, { scope: "col" })))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((one, i) => cell("td", one, columns[i][1]))))));
}

/** Put new nodes in place of the old ones, unless someone is using one: the focus stays where it is. */
function refresh(place, ...nodes) {
  const held = place.contains(document.activeElement) ? document.activeElement : null;
  const key = held?.getAttribute("href") ?? held?.textContent;
  place.replaceChildren(...nodes.flat());
  if (!held) return;
  for (const node of place.querySelectorAll(held.tagName)) {
    if ((node.getAttribute("href") ?? node.textContent) === key) return node.focus();
  }
}

let noticeTimer;
function notice(text) {
  say($("notice"), text);
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => say($("notice"), ""), 6000);
}

// ---------------------------------------------------------------- words

const number = (value) => (value == null ? "–" : Number(value).toLocaleString("en"));

function size(value) {
  if (value == null) return "–";
  let unit = 0;
  for (; value >= 1024 && unit < 4; unit++) value /= 1024;
  return `${unit ? value.toFixed(value < 10 ? 1 : 0) : value} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

const perSecond = (value) => (value == null ? "–" : `${value < 10 ? +value.toFixed(1) : number(Math.round(value))}/s`);

function time(seconds) {
  const date = new Date(seconds * 1000);
  const pad = (value, width = 2) => String(value).padStart(width, "0");
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  const clock = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return el("time", { datetime: date.toISOString(), text: `${day} ${clock}.${pad(date.getMilliseconds(), 3)}` });
}

let ahead = 0; // seconds of the server's clock before ours
function age(seconds) {
  if (seconds == null) return "–";
  let left = Math.max(0, Math.round(Date.now() / 1000 + ahead - seconds));
  const words = [];
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    if (left >= length || (unit === "s" && !words.length)) words.push(`${Math.floor(left / length)} ${unit}`);
    left %= length;
  }
  return words.slice(0, 2).join(" ");
}

/** A word of a command line, quoted as in rc(1). */
const quote = (word) => (/^[^\s'#]+$/.test(word) ? word : `'${word.replaceAll("'", "''")}'`);
const pathOf = (names, slash) => "/" + names.map(encodeURIComponent).join("/") + (slash && names.length ? "/" : "");

// ---------------------------------------------------------------- requests

/** An answer that is a refusal, in words. */
class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

let asking; // the one question for a token

function askToken(text) {
  asking ??= new Promise((resolve) => {
    const dialog = $("ask-token");
    say($("token-text"), text);
    $("token-input").value = "";
    dialog.returnValue = "cancel";
    dialog.onclose = () => {
      asking = undefined;
      const choice = dialog.returnValue;
      const given = $("token-input").value.trim();
      $("token-input").value = "";
      if (choice === "use" && given) sessionStorage.setItem("token", given);
      if (choice === "none") sessionStorage.removeItem("token");
      resolve(choice === "none" || (choice === "use" && given !== ""));
    };
    dialog.showModal();
  });
  return asking;
}

/** The answer to a request. Throws Problem, and what fetch does. */
async function ask(method, path, { body, headers = {}, signal, accept = "application/json" } = {}) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const given = { Accept: accept, ...headers };
    if (token) given.Authorization = `Bearer ${token}`;
    let answer;
    try {
      // With a token nothing else is to be sent, and a refusal is asked about here, not by the browser.
      const credentials = token ? "omit" : "same-origin";
      answer = await fetch(path, { method, body, headers: given, signal, credentials, cache: "no-store" });
    } catch (error) {
      if (error.name !== "AbortError") connected(false);
      throw error;
    }
    connected(true);
    const date = Date.parse(answer.headers.get("Date"));
    if (date) ahead = Math.abs(date - Date.now()) < 2000 ? 0 : (date - Date.now()) / 1000;
    if (answer.ok) return answer;
    if (answer.status === 401) {
      if (sessionStorage.getItem("token") !== token) continue; // another request has asked, since this one was sent
      if (await askToken("The server does not know this token. Enter another one.")) continue;
    }
    throw new Problem(answer.status, await problemText(answer));
  }
}

async function problemText(answer) {
  const text = await answer.text();
  if (answer.headers.get("Content-Type")?.startsWith("application/problem+json")) return JSON.parse(text).detail;
  return text.trim() || `status ${answer.status}`;
}

const get = async (path, signal) => (await ask("GET", path, { signal })).json();
const getText = async (path, signal) => (await ask("GET", path, { signal, accept: "text/plain" })).text();
const getLines = async (path, signal) => lines(await (await ask("GET", path, { signal })).text());
const lines = (text) => text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
const command = (group, ...words) => ask("POST", pathOf(group, true) + "ctl", { body: words.join("\n") + "\n" });

function connected(yes) {
  const text = yes ? "connected" : "no connection: trying again";
  if ($("connection").textContent !== text) say($("connection"), text);
}

function inWords(error) {
  if (!(error instanceof Problem)) return "the server does not answer";
  return error.status === 403 ? `${error.message} (the button Token changes the user)` : error.message;
}

/** Do something on a press; `line` shows how it failed. */
const doing = (line, action) => async (event) => {
  event?.preventDefault();
  say(line, "");
  try {
    await action(event);
  } catch (error) {
    if (error.name !== "AbortError") say(line, inWords(error));
  }
};

/** Call again and again, never for more than a twentieth of the time. */
async function poll(signal, line, action) {
  let shown = ""; // by this: what a press showed stays
  while (!signal.aborted) {
    const began = performance.now();
    try {
      await action();
      if (line.textContent === visible(shown)) say(line, "");
    } catch (error) {
      if (signal.aborted) return;
      shown = inWords(error);
      say(line, shown);
    }
    await sleep(Math.max(POLL_MS, 20 * (performance.now() - began)), signal);
    if (document.hidden) await once(document, "visibilitychange", signal);
  }
}

const sleep = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
const once = (target, name, signal) =>
  new Promise((resolve) => {
    target.addEventListener(name, resolve, { once: true, signal });
    signal.addEventListener("abort", resolve, { once: true });
  });

// ---------------------------------------------------------------- rates

const samples = new Map(); // path -> { at, count, rates }

/** Note a counter; returns its rates, the newest last. */
function rates(key, count) {
  const at = performance.now();
  const known = samples.get(key);
  if (!known || count < known.count) {
    samples.set(key, { at, count, rates: known?.rates ?? [] });
  } else if (at - known.at > POLL_MS / 2) {
    const found = [...known.rates, ((count - known.count) * 1000) / (at - known.at)].slice(-SAMPLES);
    samples.set(key, { at, count, rates: found });
  }
  return samples.get(key).rates;
}

const withSpark = (found) => el("span", {}, spark(found), " ", perSecond(found.at(-1)));

// ---------------------------------------------------------------- destructive actions

/** Whether the name was typed. */
function confirmed(title, text, name) {
  const dialog = $("confirm");
  const input = $("confirm-input");
  say($("confirm-title"), title);
  say($("confirm-text"), text);
  say($("confirm-label"), `Type ${name} to go on:`);
  say($("confirm-yes"), title);
  $("confirm-yes").disabled = true;
  input.value = "";
  const typed = () => input.value === name || input.value === visible(name);
  input.oninput = () => ($("confirm-yes").disabled = !typed());
  dialog.returnValue = "cancel";
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes" && typed());
    dialog.showModal();
    input.focus();
  });
}

/** A button of something that cannot be undone. */
function dangerous(state, line, title, text, name, action, done) {
  const act = doing(line, async () => {
    if (!(await confirmed(title, text, name))) return;
    await action();
    notice(done);
  });
  const made = button(title, act, { class: "danger", disabled: state.protect });
  return state.protect ? el("span", {}, made, el("span", { class: "quiet", text: " protected" })) : made;
}

const isProtected = (ctl) => /^protect on$/m.test(ctl);
const setting = (ctl, name) => ctl.match(new RegExp(`^${name} (.*)$`, "m"))?.[1] ?? "";
const unquote = (word) => (word.startsWith("'") ? word.slice(1, -1).replaceAll("''", "'") : word);

/** The settings, as far as a view depends on them; none where they may not be read. */
async function readSettings(group, signal) {
  try {
    const ctl = await getText(pathOf(group, true) + "ctl", signal);
    return { ctl, protect: isProtected(ctl), dead: unquote(setting(ctl, "dead") || "dead") };
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return { ctl: null, why: error, protect: false, dead: "dead" };
  }
}

// ---------------------------------------------------------------- tree

const opened = new Set(["/"]); // paths of the groups whose groups are shown
let here = []; // the group of what is shown
const treeAlert = alertLine();

async function branch(names, signal) {
  const path = pathOf(names, true);
  const found = await get(`${path}?type=group&detail&count=${LISTED}`, signal);
  const nodes = await Promise.all(found.entries.map((entry) => leaf([...names, entry.name], entry, signal)));
  if (found.after) nodes.push(el("li", { class: "quiet", text: "more groups are not shown" }));
  return el("ul", {}, nodes);
}

async function leaf(names, entry, signal) {
  const path = pathOf(names, true);
  const open = opened.has(path);
  const toggle = button(open ? "▾" : "▸", () => {
    opened[open ? "delete" : "add"](path);
    drawTree();
  }, { "aria-expanded": String(open), "aria-label": `Groups in ${entry.name}` });
  const flow = entry.written == null ? "" : [
    el("span", {}, withSpark(rates(path, entry.written))),
    el("span", { text: size(entry.log_bytes) + (entry.read_only ? ", read-only" : "") }),
  ];
  const current = path === pathOf(here, true) ? "true" : null;
  const row = el("div", { class: "node" }, toggle, link(names, true, entry.name, { "aria-current": current }),
    el("span", { class: "flow" }, flow));
  return el("li", {}, row, open ? await branch(names, signal) : null);
}

let treeDrawn = new AbortController();
async function drawTree() {
  treeDrawn.abort();
  treeDrawn = new AbortController();
  const { signal } = treeDrawn;
  try {
    const nodes = await branch([], signal);
    if (signal.aborted) return;
    const place = $("groups");
    const top = link([], true, "/ (top)", { "aria-current": here.length ? null : "true" });
    refresh(place, place.firstElementChild, el("div", { class: "node" }, top), nodes, treeAlert);
    say(treeAlert, "");
  } catch (error) {
    if (error.name !== "AbortError") {
      say(treeAlert, inWords(error));
      $("groups").append(treeAlert);
    }
  }
}

// ---------------------------------------------------------------- messages

const encoder = new TextEncoder();
const binary = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

function hex(bytes) {
  const rows = [];
  const end = Math.min(bytes.length, HEX_BYTES);
  for (let at = 0; at < end; at += 16) {
    const part = [...bytes.subarray(at, Math.min(at + 16, end))];
    const codes = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const letters = part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    rows.push(`${at.toString(16).padStart(8, "0")}  ${codes.padEnd(47)}  ${letters}`);
  }
  if (end < bytes.length) rows.push(`… ${number(bytes.length - end)} bytes more`);
  return rows.join("\n");
}

function asJson(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" ? JSON.stringify(value, null, 2) : null;
  } catch {
    return null;
  }
}

/** A body in full: as text, hex, and where it is JSON, indented. */
function bodyOf(message) {
  const text = message.body ?? null;
  const bytes = text === null ? binary(message.body_base64) : encoder.encode(text);
  const pre = el("pre", { tabindex: "0", "aria-label": `Body of message ${message.sequence}`, role: "region" });
  const shapes = { hex: () => hex(bytes) };
  if (text !== null) shapes.text = () => text;
  if (text !== null && asJson(text)) shapes.JSON = () => asJson(text);
  const buttons = Object.keys(shapes).map((shape) => button(shape, () => show(shape)));
  const show = (shape) => {
    say(pre, shapes[shape]() || "(empty)");
    for (const one of buttons) one.setAttribute("aria-pressed", String(one.textContent === shape));
  };
  show(text === null ? "hex" : "text");
  return [el("div", { class: "bar" }, buttons, el("span", { class: "quiet", text: size(bytes.length) })), pre];
}

const headersOf = (message) =>
  el("dl", { class: "headers" },
    Object.entries(message.headers ?? {}).flatMap(([name, text]) => [el("dt", { text: name }), el("dd", { text })]));

/** A message as a row that opens. `source`: what is to be read below it, `tools` what is in it when it is open. */
function messageRow(message, { source = "", tools } = {}) {
  const text = message.body ?? null;
  const bytes = text === null ? binary(message.body_base64).length : encoder.encode(text).length;
  const start = text === null ? hex(binary(message.body_base64.slice(0, 64))).slice(10, 57).trimEnd() : text.slice(0, PREVIEW);
  const inside = el("div", { class: "body" });
  const row = el("details", {
    ontoggle: () => inside.replaceChildren(...(row.open ? [headersOf(message), ...bodyOf(message), tools?.() ?? ""] : [])),
  },
  el("summary", {},
    el("span", { class: "meta", text: message.sequence }),
    el("span", { class: "meta" }, time(message.time)),
    el("span", { class: "preview", text: start.replaceAll("\n", "⏎") || "(empty)" }),
    el("span", { class: "meta size", text: (text === null ? "hex " : "") + size(bytes) }),
    source ? el("span", { class: "source", text: source }) : null),
  inside);
  return el("li", {}, row);
}

/** The events of an answer: { id, event, data }. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { id: "", event: "", data: [] };
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    for (const raw of whole) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (!line) {
        if (event.data.length) yield { ...event, data: event.data.join("\n") };
        event = { id: "", event: "", data: [] };
        continue;
      }
      const colon = line.indexOf(":");
      const name = colon < 0 ? line : line.slice(0, colon);
      const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (name === "data") event.data.push(text);
      else if (name in event) event[name] = text;
    }
  }
}

/** Follow a stream from a sequence on, through any number of connections, until aborted or its end. */
async function follow(path, next, signal, on) {
  let last = next - 1;
  while (!signal.aborted) {
    try {
      const headers = { "Last-Event-ID": String(last) };
      const answer = await ask("GET", path, { headers, signal, accept: "text/event-stream" });
      if (answer.status === 204) return on.state("ended: the stream was removed");
      on.state("live");
      for await (const event of events(answer)) {
        if (event.id) last = Number(event.id);
        if (event.event === "end") return on.state("ended: the stream was removed");
        on.event(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      const refused = error instanceof Problem && ![408, 429, 500, 502, 503, 504].includes(error.status);
      if (refused) return on.state(`ended: ${inWords(error)}`);
    }
    on.state("connecting again");
    await sleep(POLL_MS, signal);
  }
}

// ---------------------------------------------------------------- views: group

async function showGroup(names, view) {
  const path = pathOf(names, true);
  const { signal, line } = view;
  const settings = await readSettings(names, signal);
  const head = el("dl", { class: "figures" });
  const streams = streamList(names, view);
  const consumers = el("div");
  const views = el("div");
  const name = names.at(-1);
  view.place.append(
    el("h1", { text: name ?? "/" }, el("small", { text: " group" })), line, head,
    section("Streams", streams.place),
    section("Consumers", consumers), views,
    section("Make", makeForm(names, view)),
    ctlForm(names, settings, view),
    onOpen("Refused writes", () => errorsTable(path, signal)),
    onOpen("Open files", () => whoTable(path, signal)));
  if (names.length) {
    view.place.append(el("div", { class: "bar" }, dangerous(settings, line, "Remove group",
      "The group has to be empty.", name, async () => {
        await ask("DELETE", path);
        location.hash = pathOf(names.slice(0, -1), true);
        drawTree();
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
    ]));
    refresh(consumers, consumersTable(names, stats.consumers));
    const bound = Object.entries(stats.views);
    refresh(views, bound.length ? section("Views", table("", [["view"], ["readers", "number"]],
      bound.map(([one, row]) => [link([...names, one], false, one), number(row.readers)]))) : "");
  });
}

/** The streams of a group: a part of the names at a time, those by rate. */
function streamList(names, view) {
  const path = pathOf(names, true);
  const place = el("div");
  const found = el("div");
  const filter = el("input", { type: "search", "aria-keyshortcuts": "/", oninput: () => { page = 0; draw(); } });
  let entries = [], after = "", more = null, page = 0;
  const step = (pages) => { page += pages; draw(); };
  place.append(el("div", { class: "bar" }, field("Filter", filter)), found);

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
    if (!entries.length) return refresh(found, el("p", { class: "quiet", text: "no streams" }));
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
    draw();
  }
  return { place, filter, load };
}

function consumersTable(names, consumers) {
  const rows = Object.entries(consumers).map(([name, one]) => [
    link([...names, ".consumers", name], false, name), one.over || "the group", number(one.waiting), number(one.claimed),
    age(one.oldest), number(one.failed), number(one.dead),
  ]);
  if (!rows.length) return el("p", { class: "quiet", text: "no consumers" });
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
    ["stream", "group", "consumer"].map((text) => el("option", { text })));
  const make = doing(line, async () => {
    const within = kind.value === "consumer" ? [...names, ".consumers", name.value] : [...names, name.value];
    const query = kind.value === "consumer" && over.value ? `?over=${encodeURIComponent(over.value)}` : "";
    const answer = await ask("PUT", pathOf(within, kind.value === "group") + query);
    notice(`${kind.value} ${name.value} ${answer.status === 201 ? "made" : "is there"}`);
    if (kind.value === "group") drawTree();
    view.again();
  });
  return el("form", { onsubmit: make },
    el("div", { class: "bar" }, field("Make a", kind), field("named", name), overField, el("button", { text: "Make" })), line);
}

let ctlOpen = false; // also when the view is drawn again

/** `ctl` as a text. Only lines that were changed are sent: others may have changed others meanwhile. */
function ctlForm(names, settings, view) {
  const line = alertLine();
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
  const node = el("details", { class: "section", open: ctlOpen, ontoggle: () => (ctlOpen = node.open) },
    el("summary", { text: "Settings (ctl)" }),
    el("form", { onsubmit: save },
      el("p", { class: "quiet", text: "Changed and new lines are sent, all or none. A line that is taken out changes nothing: "
        + "write remove, unbind, or the default." }),
      text, line, el("div", { class: "bar" }, el("button", { text: "Save" }),
        button("Discard changes", () => { text.value = settings.ctl; say(line, ""); }))));
  return node;
}

/** A section that is asked for when it is opened. */
function onOpen(title, make) {
  const inside = el("div");
  const line = alertLine();
  const load = doing(line, async () => refresh(inside, await make()));
  const node = el("details", { class: "section", ontoggle: () => node.open && load() }, el("summary", { text: title }),
    line, inside, el("div", { class: "bar" }, button("Read again", load)));
  return node;
}

async function errorsTable(path, signal) {
  const rows = (await getLines(path + ".errors", signal)).reverse();
  if (!rows.length) return el("p", { class: "quiet", text: "none" });
  return table("newest first", [["time"], ["file"], ["refusal", "long"], ["user", "number wide"], ["process", "number wide"]],
    rows.map((row) => [time(row.time), row.file, row.text, String(row.uid), String(row.pid ?? "")]));
}

async function whoTable(path, signal, file = null) {
  const rows = (await getLines(path + ".who", signal)).filter((row) => file === null || row.file === file);
  if (!rows.length) return el("p", { class: "quiet", text: "none" });
  return table("", [["file"], ["mode"], ["from", "long"], ["user", "number"], ["process", "number wide"], ["for", "number"]],
    rows.map((row) => [row.file, row.mode, row.where ?? "", String(row.uid), String(row.pid ?? ""), age(row.since)]));
}

// ---------------------------------------------------------------- views: stream

async function showStream(names, view) {
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
  if (!isView) view.place.append(publishForm(path, view));
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

/** Messages of a stream, the newest on top: the newest, those from a place on, those that come. */
function messageList(names, view, isView) {
  const path = pathOf(names);
  const line = alertLine();
  const rows = el("ol", { class: "messages", reversed: true, "aria-label": "Messages, the newest first" });
  const state = el("span", { role: "status", class: "quiet" });
  const more = button("", () => {});
  const known = new Set();
  let oldest = Infinity, back = NEWEST, next = 1, jumped = false, tail = null, fresh = [], skipped = 0;

  const row = (message) => messageRow(message, { source: isView ? message.stream : "" });
  const lostRow = (a, b) => el("li", { class: "lost", text: `messages ${a} to ${b} were lost: no longer kept` });

  async function read(query) {
    const answer = await ask("GET", `${path}?${query}&format=json`, { signal: view.signal });
    return { found: lines(await answer.text()), next: Number(answer.headers.get("Mqfs-Next")) };
  }

  function put(message, onTop) {
    if (message.lost) return rows[onTop ? "prepend" : "append"](lostRow(...message.lost));
    if (known.has(message.sequence)) return;
    known.add(message.sequence);
    oldest = Math.min(oldest, message.sequence);
    rows[onTop ? "prepend" : "append"](row(message));
  }

  function reset(isJump) {
    stop();
    rows.replaceChildren();
    known.clear();
    [oldest, back, jumped] = [Infinity, NEWEST, isJump];
  }

  function said(found) {
    const empty = !rows.childElementCount;
    more.hidden = found < NEWEST;
    say(more, jumped ? `${NEWEST} newer` : `${NEWEST} older`);
    say(state, empty ? "no messages" : `${number(known.size)} shown`);
  }

  async function newest() {
    const part = await read(`since=-${NEWEST}&count=${NEWEST}`);
    reset(false);
    add(part);
  }

  async function older() {
    back += NEWEST;
    const { found } = await read(`since=-${back}&count=${NEWEST}`);
    for (const message of found.filter((one) => one.sequence < oldest).reverse()) put(message, false);
    said(found.length);
  }

  async function jump(word) {
    const part = await read(`since=${encodeURIComponent(word)}&count=${NEWEST}`);
    reset(true);
    add(part);
  }

  const newer = async () => add(await read(`since=${next}&count=${NEWEST}`));

  function add(part) {
    next = part.next;
    for (const message of part.found) put(message, true);
    said(part.found.length);
  }

  function draw() {
    for (const event of fresh) {
      const data = JSON.parse(event.data);
      put(event.event === "lost" ? { lost: data } : data, true);
    }
    fresh = [];
    while (rows.childElementCount > SHOWN) rows.lastElementChild.remove();
    for (const sequence of known) { // the oldest first
      if (known.size <= SHOWN) break;
      known.delete(sequence);
    }
    const passed = skipped ? `; ${number(skipped)} came too fast to be shown` : "";
    say(state, `live, ${number(rows.childElementCount)} shown${passed}`);
  }

  function stop() {
    tail?.abort();
    tail = null;
    tailButton.setAttribute("aria-pressed", "false");
  }

  async function toggleTail() {
    if (tail) {
      stop();
      return said(0);
    }
    if (jumped || !next) await newest();
    tail = new AbortController();
    [fresh, skipped] = [[], 0];
    more.hidden = true;
    tailButton.setAttribute("aria-pressed", "true");
    const mine = tail;
    view.signal.addEventListener("abort", () => mine.abort());
    follow(path, next, mine.signal, {
      state: (text) => {
        say(state, text);
        if (text.startsWith("ended") && tail === mine) stop();
      },
      event: (event) => {
        if (!fresh.length) setTimeout(draw, 100); // at most ten times a second, however fast they come
        fresh.push(event);
        if (event.id) next = Number(event.id) + 1;
        if (fresh.length > SHOWN) skipped += fresh.splice(0, fresh.length - SHOWN).length;
      },
    });
  }

  const place = el("section", { "aria-label": "Messages" });
  const where = el("input", { size: "14", placeholder: "17, -100, -10m", "aria-keyshortcuts": "/", autocomplete: "off" });
  const when = el("input", { type: "datetime-local", step: "1" });
  const tailButton = button("Live tail", doing(line, toggleTail), { "aria-pressed": "false", "aria-keyshortcuts": "t" });
  more.addEventListener("click", doing(line, () => (jumped ? newer() : older())));
  const go = doing(line, () => jump(where.value.trim() || "first"));
  const goTime = doing(line, () => when.value && jump(`@${Math.floor(new Date(when.value).getTime() / 1000)}`));
  place.append(el("h2", { text: "Messages" }),
    el("div", { class: "bar" },
      button(`Newest ${NEWEST}`, doing(line, newest), { "aria-keyshortcuts": "n" }), tailButton,
      el("form", { onsubmit: go }, el("div", { class: "bar" }, field("From", where), el("button", { text: "Jump" }))),
      el("form", { onsubmit: goTime }, el("div", { class: "bar" }, field("At", when), el("button", { text: "Jump to time" })))),
    state, line, rows, more);
  more.hidden = true;
  view.keys.n = doing(line, newest);
  view.keys.t = doing(line, toggleTail);
  view.keys["/"] = () => where.focus();
  return { place, newest };
}

const submits = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
};

function publishForm(path, view) {
  const line = alertLine();
  const body = el("textarea", { rows: "3", "aria-label": "Body", onkeydown: submits });
  const inputs = Object.fromEntries(["delay", "ttl", "priority", "id"].map((key) =>
    [key, el("input", { size: "7", autocomplete: "off", placeholder: { delay: "30s", ttl: "1h", priority: "5" }[key] ?? "" })]));
  const single = el("input", { type: "checkbox" });
  const headers = el("textarea", { rows: "2", placeholder: "name: value", "aria-label": "Headers, one a line" });
  const publish = doing(line, async () => {
    const query = new URLSearchParams({ wait: "10s" });
    for (const [key, input] of Object.entries(inputs)) if (input.value.trim()) query.set(key, input.value.trim());
    if (single.checked) query.set("single", "yes");
    for (const header of headers.value.split("\n").filter((text) => text.trim())) {
      const colon = header.indexOf(":");
      if (colon < 1) throw new Problem(0, `header ${JSON.stringify(header)} (expected name: value)`);
      query.set(`h-${header.slice(0, colon).trim()}`, header.slice(colon + 1).trim());
    }
    const answer = (await (await ask("POST", `${path}?${query}`, { body: body.value })).text()).trim();
    notice(answer === "discarded" ? "discarded: the stream is full" : `published as ${answer}`);
    body.value = "";
    body.focus();
  });
  const node = el("details", { class: "section stack" }, el("summary", { text: "Publish", "aria-keyshortcuts": "p" }),
    el("form", { onsubmit: publish }, body,
      el("div", { class: "bar" }, Object.entries(inputs).map(([key, input]) => field(key, input)),
        el("label", {}, single, "single: one reader only")),
      el("label", { class: "quiet" }, "Headers", headers), line,
      el("div", { class: "bar" }, el("button", { text: "Publish" }))));
  view.keys.p = () => { node.open = true; body.focus(); };
  return node;
}

// ---------------------------------------------------------------- views: consumer

async function showConsumer(names, view) {
  const path = pathOf(names);
  const group = names.slice(0, -2);
  const name = names.at(-1);
  const { signal, line } = view;
  const settings = await readSettings(group, signal);
  const head = el("dl", { class: "figures" });
  const rows = el("ol", { class: "messages", "aria-label": "What waits, the oldest first" });
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
    section("What waits", hint, button("Read again", doing(line, backlog)), rows),
    onOpen("Open files", () => whoTable(pathOf(group, true), signal, name)),
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

async function showDead(names, view) {
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
    return { stream, node: messageRow(message, { source: text, tools: drop }) };
  };

  async function load(since = null) {
    let found = [];
    try {
      const answer = await ask("GET", `${path}?since=${since ?? "first"}&count=${NEWEST}&format=json`, { signal });
      found = lines(await answer.text()).filter((message) => !message.lost);
      next = answer.headers.get("Mqfs-Next");
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 404) throw error; // it is made with the first letter
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

// ---------------------------------------------------------------- the page

let current = new AbortController();
let keys = {};

function namesOf(hash) {
  try {
    return hash.replace(/^#?\/?/, "").replace(/\/$/, "").split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return [];
  }
}

function drawPath(names, slash) {
  const parts = [link([], true, "mqfs", { "aria-label": "mqfs: the top group" })];
  names.forEach((name, i) => {
    const last = i === names.length - 1;
    parts.push(el("span", { text: "/", "aria-hidden": "true" }));
    if (name === ".consumers") parts.push(el("span", { text: name }));
    else parts.push(link(names.slice(0, i + 1), !last || slash, name, { "aria-current": last ? "page" : null }));
  });
  $("path").replaceChildren(...parts);
}

async function show() {
  const names = namesOf(location.hash);
  const last = names.at(-1);
  const isConsumer = names.at(-2) === ".consumers";
  const slash = !names.length || location.hash.endsWith("/");
  const within = isConsumer ? names.slice(0, -2) : slash ? names : names.slice(0, -1);
  current.abort();
  current = new AbortController();
  const place = el("div");
  const view = { signal: current.signal, line: alertLine(), place, keys: {}, again: show };
  keys = view.keys;
  keys.u = () => (location.hash = pathOf(slash ? names.slice(0, -1) : within, true));
  const changed = within.join("/") !== here.join("/");
  here = within;
  for (let i = 1; i < here.length; i++) opened.add(pathOf(here.slice(0, i), true));
  if (changed) drawTree();
  drawPath(names, slash);
  document.title = visible(names.length ? names.join("/") : "/") + " – mqfs";
  $("content").replaceChildren(place);
  const what = isConsumer ? showConsumer : slash ? showGroup : last === ".dead" ? showDead : showStream;
  try {
    await what(names, view);
  } catch (error) {
    if (view.signal.aborted || error.name === "AbortError") return;
    if (!view.line.isConnected) place.append(el("h1", { text: last ?? "/" }), view.line);
    say(view.line, inWords(error));
  }
}

const themes = ["auto", "light", "dark"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  say($("theme"), `Theme: ${theme}`);
}

$("theme").onclick = () => setTheme(themes[(themes.indexOf(localStorage.getItem("theme")) + 1) % 3]);
$("token").onclick = async () => {
  if (await askToken("Requests act as the token's user. The token is kept until this tab is closed.")) {
    drawTree();
    show();
  }
};
$("help").onclick = () => $("keys").showModal();
$("keys-on").onchange = () => localStorage.setItem("keys", $("keys-on").checked ? "on" : "off");
$("keys-on").checked = localStorage.getItem("keys") !== "off";
$("skip").onclick = (event) => {
  event.preventDefault(); // the part behind # is the path
  $("content").focus();
};
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (typing || event.ctrlKey || event.altKey || event.metaKey || !$("keys-on").checked) return;
  const act = event.key === "?" ? $("help").onclick : keys[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
addEventListener("hashchange", () => {
  ctlOpen = false;
  show();
  $("content").focus();
});

setTheme(localStorage.getItem("theme") ?? "auto");
if (matchMedia("(max-width: 760px)").matches) $("groups").open = false;
show();
drawTree();
poll(new AbortController().signal, alertLine(), async () => {
  if ($("groups").open && samples.size) await drawTree();
});
