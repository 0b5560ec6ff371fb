// Requests to the routes of mqfs-http(5), with tokens, polling, rates and event streams.

import { $, SAMPLES, button, clock, el, notice, pathOf, perSecond, say, spark, visible } from "./elements.js";

const POLL_MS = 2000;

// ---------------------------------------------------------------- requests

/** A refused request: the status of the answer, and its error text. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

let asking; // a promise while the dialog for a token is open

export function askToken(text) {
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

/** Send a request, and return the answer. Throws Problem for a refusal, and the errors of fetch. */
export async function ask(method, path, { body, headers = {}, signal, accept = "application/json" } = {}) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const given = { Accept: accept, ...headers };
    if (token) given.Authorization = `Bearer ${token}`;
    let answer;
    try {
      // With a token no other credentials are sent, and after a refusal this page asks for another, not the browser.
      const credentials = token ? "omit" : "same-origin";
      answer = await fetch(path, { method, body, headers: given, signal, credentials, cache: "no-store" });
    } catch (error) {
      if (error.name !== "AbortError") connected(false);
      throw error;
    }
    connected(true);
    const date = Date.parse(answer.headers.get("Date"));
    if (date) clock.ahead = Math.abs(date - Date.now()) < 2000 ? 0 : (date - Date.now()) / 1000;
    if (answer.ok) return answer;
    if (answer.status === 401) {
      if (sessionStorage.getItem("token") !== token) continue; // another request has asked meanwhile
      if (await askToken("The server does not know this token. Enter another one.")) continue;
    }
    throw new Problem(answer.status, await problemText(answer));
  }
}

async function problemText(answer) {
  const text = await answer.text();
  if (!text) return answer.status === 404 ? "no such stream or group" : `status ${answer.status}`; // HEAD has no text
  if (answer.headers.get("Content-Type")?.startsWith("application/problem+json")) return JSON.parse(text).detail;
  return text.trim();
}

export const get = async (path, signal) => (await ask("GET", path, { signal })).json();
export const getText = async (path, signal) => (await ask("GET", path, { signal, accept: "text/plain" })).text();
export const getLines = async (path, signal) => lines(await (await ask("GET", path, { signal })).text());
export const lines = (text) => text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
export const command = (group, ...words) => ask("POST", pathOf(group, true) + "ctl", { body: words.join("\n") + "\n" });

function connected(yes) {
  const text = yes ? "connected" : "reconnecting";
  if ($("connection").textContent !== text) say($("connection"), text);
}

export function inWords(error) {
  if (!(error instanceof Problem)) return "the server does not answer";
  return error.status === 403 ? `${error.message} (the button Token changes the user)` : error.message;
}

/** Return a listener that runs an action and shows its error in `line`. It clears earlier errors and notices first. */
export const doing = (line, action) => async (event) => {
  event?.preventDefault();
  say(line, "");
  notice("");
  try {
    await action(event);
  } catch (error) {
    if (error.name !== "AbortError") say(line, inWords(error));
  }
};

/** Call an action repeatedly, for at most a twentieth of the time. `line` shows its error until it succeeds again. */
export async function poll(signal, line, action) {
  let shown = ""; // the error that this poll has shown; errors of other actions stay
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

/** Wait until the server answers again. */
export async function answers(signal) {
  while (!signal.aborted) {
    await sleep(POLL_MS, signal);
    try {
      return await ask("HEAD", "/", { signal });
    } catch (error) {
      if (error instanceof Problem) return;
    }
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

export const samples = new Map(); // path -> { at, count, rates }

/** Record a counter, and return its rates per second, the newest last. */
export function rates(key, count) {
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

export const withSpark = (found) => el("span", {}, spark(found), " ", perSecond(found.at(-1)));

// ---------------------------------------------------------------- event streams

/** Yield the events of an answer: { id, event, data }. */
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

/** Follow a stream from a sequence on until it ends or the signal aborts, and reconnect as often as needed. */
export async function follow(path, next, signal, on) {
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
