// Parts that several views share: confirmations, settings, sections that load when they are opened.

import { $, age, alertLine, button, el, notice, pathOf, refresh, say, table, time, visible } from "./elements.js";
import { Problem, doing, getLines, getText } from "./requests.js";

// ---------------------------------------------------------------- destructive actions

/** Ask for confirmation by typing a name. Resolves to whether it was typed. */
export function confirmed(title, text, name) {
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

/** Return a button for an irreversible action: it asks for confirmation, and is disabled in a protected group. */
export function dangerous(state, line, title, text, name, action, done) {
  const act = doing(line, async () => {
    if (!(await confirmed(title, text, name))) return;
    await action();
    notice(done);
  });
  const made = button(title, act, { class: "danger", disabled: state.protect });
  return state.protect ? el("span", {}, made, el("span", { class: "quiet", text: " protected" })) : made;
}

const isProtected = (ctl) => /^protect on$/m.test(ctl);
export const setting = (ctl, name) => ctl.match(new RegExp(`^${name} (.*)$`, "m"))?.[1] ?? "";
const unquote = (word) => (word.startsWith("'") ? word.slice(1, -1).replaceAll("''", "'") : word);

/** Read the settings that views depend on. Where the user may not read them, `ctl` is null and `why` the refusal. */
export async function readSettings(group, signal) {
  try {
    const ctl = await getText(pathOf(group, true) + "ctl", signal);
    return { ctl, protect: isProtected(ctl), dead: unquote(setting(ctl, "dead") || "dead") };
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return { ctl: null, why: error, protect: false, dead: "dead" };
  }
}

// ---------------------------------------------------------------- sections

export const submits = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
};

/** Return a section whose content is requested when it is opened. */
export function onOpen(title, make) {
  const inside = el("div");
  const line = alertLine();
  const load = doing(line, async () => refresh(inside, await make()));
  const node = el("details", { class: "section", ontoggle: () => node.open && load() }, el("summary", { text: title }),
    line, inside, el("div", { class: "bar" }, button("Read again", load)));
  return node;
}

export async function errorsTable(path, signal) {
  const rows = (await getLines(path + ".errors", signal)).reverse();
  if (!rows.length) return el("p", { class: "quiet", text: "none" });
  return table("newest first", [["time"], ["file"], ["refusal", "long"], ["user", "number wide"], ["process", "number wide"]],
    rows.map((row) => [time(row.time), row.file, row.text, String(row.uid), String(row.pid ?? "")]));
}

export async function whoTable(path, signal, file = null) {
  const rows = (await getLines(path + ".who", signal)).filter((row) => file === null || row.file === file);
  if (!rows.length) return el("p", { class: "quiet", text: "none" });
  return table("", [["file"], ["mode"], ["from", "long"], ["user", "number"], ["process", "number wide"], ["for", "number"]],
    rows.map((row) => [row.file, row.mode, row.where ?? "", String(row.uid), String(row.pid ?? ""), age(row.since)]));
}
