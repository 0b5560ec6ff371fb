// Elements, and values as text. Content that other users wrote becomes a text node, never markup.

export const SAMPLES = 30; // of a sparkline

// ---------------------------------------------------------------- elements

export const $ = (id) => document.getElementById(id);

const READ_ALOUD = ["aria-label", "title", "placeholder"];
const HIDDEN = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/** Return a text with escapes for invisible characters, and for those that reverse the text around them. */
export const visible = (text) => String(text).replace(HIDDEN, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
export const say = (node, text) => { node.textContent = visible(text); };

/** Make an element. `on…` are listeners, `text` is its text; all others are attributes. */
export function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") say(node, value);
    else if (value == null) continue;
    else if (READ_ALOUD.includes(name)) node.setAttribute(name, visible(value));
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false) node.setAttribute(name, value);
  }
  const there = children.flat().filter((child) => child != null && child !== false);
  node.append(...there.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

export const button = (text, onclick, more = {}) => el("button", { type: "button", text, onclick, ...more });
export const link = (names, slash, text, more = {}) => el("a", { href: "#" + pathOf(names, slash), text, ...more });
export const section = (title, ...children) => el("section", { "aria-label": title }, el("h2", { text: title }), ...children);
export const field = (text, input) => el("label", {}, text + " ", input);
export const alertLine = () => el("p", { class: "error", role: "alert" });

export function spark(found) {
  const values = [...Array(SAMPLES - found.length).fill(0), ...found];
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  const line = document.createElementNS(ns, "polyline");
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, i) => `${(i * 64) / (SAMPLES - 1)},${(15 - (14 * value) / most).toFixed(1)}`);
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 64 16");
  svg.setAttribute("aria-hidden", "true"); // the rate follows as text
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

/** The terms of the page, explained in the help and in the tooltips of figures and columns. */
export const WORDS = {
  "ack": "A worker says that a message is done.",
  "blocked writers": "Writers that wait for room, under full block.",
  "claimed": "Delivered to a worker, not acked yet.",
  "consumer": "A named position in a stream, a view or a group, shared by its workers.",
  "dead letters": "Messages set aside after their last retry. Retry sends them back.",
  "delayed": "Published with delay or at, and not due yet.",
  "deliver": "all: each reader gets every message. one: each message goes to one reader.",
  "fell behind": "Times that a reader lost messages, because depth or ttl removed them first.",
  "kept": "What the stream holds, in bytes. replay, depth and ttl decide it.",
  "next sequence": "The number of the next message. It grows by one a message, across all streams of the group.",
  "over": "The stream or view that the consumer reads.",
  "refused writes": "Writes that were refused, with their reasons below.",
  "replay": "What a new reader gets of the past: off, last, key (the newest of each key) or all.",
  "waiting": "Messages that no worker has yet: the lag of the consumer.",
};

/** Return figures for rows of [term, value]; a value may be nodes. */
export const figures = (rows) =>
  rows.filter(Boolean).map(([what, value]) =>
    el("div", {}, el("dt", { text: what, title: WORDS[what] }), el("dd", {}, value)));

/** Return a table. `columns`: [title, class]; rows are lists of cells. */
export function table(caption, columns, rows) {
  const cell = (tag, content, kind, more) => el(tag, { class: kind, ...more }, content);
  return el("table", {},
    el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, columns.map(([text, kind]) => cell("th", text, kind, { scope: "col", title: WORDS[text] })))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((one, i) => cell("td", one, columns[i][1]))))));
}

/** Replace the nodes in a place. The focus moves to the new node with the link or text of the focused one. */
export function refresh(place, ...nodes) {
  const held = place.contains(document.activeElement) ? document.activeElement : null;
  const key = held?.getAttribute("href") ?? held?.textContent;
  place.replaceChildren(...nodes.flat());
  if (!held) return;
  for (const node of place.querySelectorAll(held.tagName)) {
    if ((node.getAttribute("href") ?? node.textContent) === key) return node.focus();
  }
}

let noticeTimer;
export function notice(text) {
  say($("notice"), text);
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => say($("notice"), ""), 6000);
}

// ---------------------------------------------------------------- values as text

export const number = (value) => (value == null ? "–" : Number(value).toLocaleString("en"));

export function size(value) {
  if (value == null) return "–";
  let unit = 0;
  for (; value >= 1024 && unit < 4; unit++) value /= 1024;
  return `${unit ? value.toFixed(value < 10 ? 1 : 0) : value} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export const perSecond = (value) => (value == null ? "–" : `${value < 10 ? +value.toFixed(1) : number(Math.round(value))}/s`);

export function time(seconds) {
  const date = new Date(seconds * 1000);
  const pad = (value, width = 2) => String(value).padStart(width, "0");
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  const clock = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return el("time", { datetime: date.toISOString(), text: `${day} ${clock}.${pad(date.getMilliseconds(), 3)}` });
}

export const clock = { ahead: 0 }; // seconds by which the server's clock is ahead of ours; 0: less than 2 s apart
export function age(seconds) {
  if (seconds == null) return "–";
  let left = Math.max(0, Math.round(Date.now() / 1000 + clock.ahead - seconds));
  const words = [];
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    if (left >= length || (unit === "s" && !words.length)) words.push(`${Math.floor(left / length)} ${unit}`);
    left %= length;
  }
  return words.slice(0, 2).join(" ");
}

/** Quote a word of a command line as in rc(1), where it needs that. */
export const quote = (word) => (/^[^\s'#]+$/.test(word) ? word : `'${word.replaceAll("'", "''")}'`);
export const pathOf = (names, slash) => "/" + names.map(encodeURIComponent).join("/") + (slash && names.length ? "/" : "");
