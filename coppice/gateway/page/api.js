// Calls of the gateway, and whether it is there.

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `status ${status}`);
    this.status = status;
    this.code = error.code;
    this.param = error.param;
  }
}

export class GoneError extends Error {}

export const $ = (id) => document.getElementById(id);

/** A new element with properties, attributes among `attributes`, and children. */
export function el(tag, { attributes = {}, ...properties } = {}, ...children) {
  const one = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  one.append(...children);
  return one;
}

const form = () => $("settings").elements;
export const settings = () => ({
  max_tokens: Math.max(1, Math.trunc(Number(form().max_tokens.value)) || 128),
  temperature: Number(form().temperature.value) || 0,
  seed: Math.max(0, Math.trunc(Number(form().seed.value)) || 0),
});
export const system = () => form().system.value.trim();
export const token = () => form().token.value.trim();

async function send(path, body, signal) {
  const headers = token() ? { authorization: `Bearer ${token()}` } : {};
  if (body) headers["content-type"] = "application/json";
  const options = { headers, signal, cache: "no-store" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    tellGone();
    throw new GoneError("The server does not answer.");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, told.error || {});
}

export const call = async (path, body, signal) => (await send(path, body, signal)).json();

/** The events of a stream, as objects, until its end. */
export async function* events(path, body, signal) {
  const reader = (await send(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        tellGone();
        throw new GoneError("The connection to the server is lost.");
      }
      if (part.done) throw new GoneError("The connection to the server is lost.");
      const pieces = (rest + part.value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        if (!piece.startsWith("data: ")) continue;
        if (piece === "data: [DONE]") return;
        const event = JSON.parse(piece.slice(6));
        if (event.error) throw new ApiError(503, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Whether the server is there: "connecting", "ready", "waiting" (no model behind it now) or "gone".
let state = "connecting";
const WORDS = { connecting: "connecting", ready: "ready", waiting: "the model is not available", gone: "server gone" };
const listeners = [];
export const onState = (listener) => listeners.push(listener);
export const isReady = () => state === "ready";

function become(next) {
  if (next === state) return;
  state = next;
  $("state").className = next;
  $("state").querySelector(".text").textContent = WORDS[next];
  $("gone").hidden = next !== "gone";
  $("gone").textContent = next === "gone" ? `The server at ${location.host} does not answer. Trying again…` : "";
  for (const listener of listeners) listener(next);
}

export const tellGone = () => become("gone");

export async function watchServer() {
  for (;;) {
    try {
      const answer = await fetch("/ready", { cache: "no-store", signal: AbortSignal.timeout(4000) });
      become(answer.ok ? "ready" : "waiting");
    } catch {
      become("gone");
    }
    await new Promise((wake) => setTimeout(wake, state === "ready" ? 3000 : 1000));
  }
}

/** Whether the model has a chat template; one without completes text. */
let chats = null;
export async function hasTemplate(model) {
  if (chats === null) {
    try {
      await call("/tokenize", { model, messages: [{ role: "user", content: "" }] });
      chats = true;
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 400) throw error;
      chats = false;
    }
  }
  return chats;
}

/** An answer to messages or, of a model without a template, the text after the last one; calls `show` with its text.
 *  Returns its statistics, token ids and whether it was stopped. */
export async function answer(model, messages, fields, show, signal) {
  const chat = await hasTemplate(model);
  const input = chat ? { messages } : { prompt: messages.at(-1).content };
  const body = { model, ...input, ...settings(), ...fields, stream: true, return_token_ids: true };
  const ids = [];
  let statistics = null;
  let thinks = false;
  for await (const event of events(chat ? "/v1/chat/completions" : "/v1/completions", body, signal)) {
    for (const choice of event.choices) {
      ids.push(...(choice.token_ids || []));
      let text = choice.text;
      if (chat) {
        // With its tags, as templates expect it in an earlier answer.
        const { reasoning_content: thought = "", content = "" } = choice.delta;
        const opens = thought && !thinks;
        const closes = content && (thought || thinks);
        text = (opens ? "<think>" : "") + thought + (closes ? "</think>\n\n" : "") + content;
        thinks = (thought || thinks) && !content;
      }
      show(text, ids.length);
      statistics = choice.coppice || statistics;
    }
  }
  return { ids, statistics };
}

/** Tokens per second of an answer, from its arrival at the server to its end, without the wait for a place. */
export const speed = (ids, one) => ids.length / Math.max(1e-9, (one.total_ms - one.queue_ms) / 1000);

export const explain = (error) =>
  error instanceof ApiError && error.status === 401 ? "This server wants a bearer token: see Settings." : error.message;
