// Messages: rows, lists, a live tail, and the form that publishes.

import { alertLine, button, el, field, notice, number, pathOf, say, size, time } from "./elements.js";
import { Problem, ask, doing, follow, lines } from "./requests.js";
import { submits } from "./controls.js";

export const NEWEST = 50; // messages of one request
const SHOWN = 500; // messages on the page, at most, while a stream is followed
const HEX_BYTES = 16384; // of a body, shown as hex
const PREVIEW = 200; // characters of a body in a row

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

/** Show a whole body: as text, as hex, and indented if it is JSON. */
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

/** Return a message as a row that opens. `source`: a text below it. `tools` makes further content when it opens. */
export function messageRow(message, { source = "", tools } = {}) {
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

/** Return the list of a stream's messages, newest first: the newest ones, those from a position on, or a live tail. */
export function messageList(names, view, isView) {
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
    for (const sequence of known) { // in the order in which they were shown
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
        if (!fresh.length) setTimeout(draw, 100); // at most ten times a second, at any rate of messages
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
  const published = () => (tail || jumped ? null : newest());
  return { place, newest, published };
}

/** Return the form that publishes to a stream and then calls `published`; without that, it asks for a stream's name. */
export function publishForm(names, view, published = null) {
  const isGroup = !published;
  const line = alertLine();
  const stream = el("input", { required: isGroup, autocomplete: "off", spellcheck: "false" });
  const body = el("textarea", { rows: "3", "aria-label": "Body", onkeydown: submits });
  const inputs = Object.fromEntries(["delay", "ttl", "priority", "id", "key", "every", "cron", "expect"].map((key) =>
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
    const path = pathOf(isGroup ? [...names, stream.value] : names);
    const { sequence, retained } = await (await ask("POST", `${path}?${query}`, { body: body.value })).json();
    const kept = retained ? "" : ", not kept: replay is off and there is no reader";
    notice(sequence === null ? "discarded: the stream is full" : `published as ${sequence}${kept}`);
    body.value = "";
    body.focus();
    await published?.();
  });
  const node = el("details", { class: "section stack" }, el("summary", { text: "Publish", "aria-keyshortcuts": "p" }),
    el("form", { onsubmit: publish }, isGroup && el("div", { class: "bar" }, field("To stream", stream)), body,
      el("div", { class: "bar" }, Object.entries(inputs).map(([key, input]) => field(key, input)),
        el("label", {}, single, "single: one reader only")),
      el("label", { class: "quiet" }, "Headers", headers), line,
      el("div", { class: "bar" }, el("button", { text: "Publish" }))));
  view.keys.p = () => { node.open = true; (isGroup ? stream : body).focus(); };
  return node;
}
