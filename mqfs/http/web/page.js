// The page of mqfs: a view of the tree for a browser. It uses only the routes of mqfs-http(5).

import { $, WORDS, alertLine, button, el, link, pathOf, refresh, say, size, visible } from "./elements.js";
import { Problem, answers, askToken, get, inWords, poll, rates, samples, withSpark } from "./requests.js";
import { showConsumer, showDead, showGroup, showStream } from "./views.js";

const LISTED = 1000; // groups asked for at once

// ---------------------------------------------------------------- tree

const opened = new Set(["/"]); // paths of the groups that are expanded in the tree
let here = []; // the path of the shown view's group
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
  const view = { signal: current.signal, line: alertLine(), place, keys: {}, again: show, drawTree };
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
    if (error instanceof Problem) return;
    await answers(view.signal);
    if (!view.signal.aborted) show();
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
$("words").append(...Object.entries(WORDS).flatMap(([word, text]) => [el("dt", { text: word }), el("dd", { text })]));
$("keys-on").onchange = () => localStorage.setItem("keys", $("keys-on").checked ? "on" : "off");
$("keys-on").checked = localStorage.getItem("keys") !== "off";
$("skip").onclick = (event) => {
  event.preventDefault(); // the part after # is the path of the view
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
