import { $, answer, explain, isReady, onState, speed, system } from "/page/api.js";

let running = null;

export function start(model) {
  $("run").addEventListener("submit", (event) => {
    event.preventDefault();
    run(model());
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(model());
  });
  $("compare").addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  $("cancel").addEventListener("click", () => running?.abort());
  onState(show);
}

const show = () => {
  $("go").disabled = !isReady() || running !== null;
  $("cancel").hidden = running === null;
};

async function run(model) {
  const prompt = $("prompt").value;
  if (!prompt.trim() || running || !isReady()) return;
  const abort = (running = new AbortController());
  show();
  verdict("");
  for (const id of ["off", "on"]) side(id, "–", "");
  try {
    const off = await one(model, prompt, "off", abort.signal);
    const on = await one(model, prompt, "on", abort.signal);
    judge(off, on);
  } catch (error) {
    verdict(abort.signal.aborted ? "Stopped." : explain(error), abort.signal.aborted ? "" : "different");
  } finally {
    running = null;
    show();
  }
}

async function one(model, prompt, id, signal) {
  const before = system() ? [{ role: "system", content: system() }] : [];
  // A salt of its own: what one run leaves in caches is not the other's.
  const fields = { speculation: { mode: id === "off" ? "off" : $("forced").checked ? "forced" : "auto" }, cache_salt: crypto.getRandomValues(new Uint32Array(4)).join("-") };
  const text = $(id).querySelector("pre");
  const started = performance.now();
  let shown = 0;
  const add = (part, count) => {
    text.textContent += part;
    text.scrollTop = text.scrollHeight;
    const now = performance.now();
    if (now - shown > 100) {
      shown = now;
      side(id, `${count} tokens, ${(count / ((now - started) / 1000)).toFixed(1)} tokens/s so far`);
    }
  };
  text.classList.add("waiting");
  try {
    const { ids, statistics } = await answer(model, [...before, { role: "user", content: prompt }], fields, add, signal);
    const rate = speed(ids, statistics);
    side(id, `${rate.toFixed(1)} tokens/s, ${ids.length} tokens in ${statistics.rounds} rounds, τ\u00a0${statistics.mean_acceptance_length.toFixed(2)}`);
    return { ids, rate, drafts: statistics.draft_tokens };
  } finally {
    text.classList.remove("waiting");
  }
}

function judge(off, on) {
  const length = Math.max(off.ids.length, on.ids.length);
  let at = 0;
  while (at < length && off.ids[at] === on.ids[at]) at += 1;
  const planned = on.drafts ? "" : " Nothing was drafted: at this load it did not seem to pay.";
  const ratio = `${(on.rate / off.rate).toFixed(2)} times as fast with speculation.${planned}`;
  if (at === length) verdict(`Identical: ${length} of ${length} tokens. ${ratio}`, "same");
  else verdict(`Different from token ${at + 1} on. ${ratio}`, "different");
}

function side(id, figures, text) {
  $(id).querySelector(".figures").textContent = figures;
  if (text !== undefined) $(id).querySelector("pre").textContent = text;
}

function verdict(text, kind = "") {
  $("verdict").textContent = text;
  $("verdict").className = kind;
}
