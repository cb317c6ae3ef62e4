import { $, answer, el, explain, hasTemplate, isReady, onState, speed, system } from "/page/api.js";

let messages = [];
let running = null;

export function start(model) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(model());
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask(model());
    }
  });
  $("chat").addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    $("messages").replaceChildren();
    $("question").focus();
  });
  onState(show);
}

const show = () => {
  $("send").disabled = !isReady() || running !== null;
  $("stop").hidden = running === null;
};

async function ask(model) {
  const text = $("question").value;
  if (!text.trim() || running || !isReady()) return;
  $("question").value = "";
  const abort = (running = new AbortController());
  show();
  $("messages").querySelector(".empty")?.remove();
  bubble("user").textContent = text;
  const place = bubble("assistant");
  const said = el("span", { className: "waiting" });
  const figures = el("span", { className: "figures" });
  place.append(said, figures);
  const asked = [...messages, { role: "user", content: text }];
  const before = system() && !messages.length ? [{ role: "system", content: system() }] : [];
  try {
    if (!(await hasTemplate(model))) place.classList.add("plain");
    const mode = $("speculation").checked ? "auto" : "off";
    const add = (part) => {
      const log = $("messages");
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      said.textContent += part;
      if (atEnd) log.scrollTop = log.scrollHeight;
    };
    const { ids, statistics: one } = await answer(model, [...before, ...asked], { speculation: { mode } }, add, abort.signal);
    figures.textContent =
      `${ids.length} tokens, ${speed(ids, one).toFixed(1)} tokens/s, τ\u00a0${one.mean_acceptance_length.toFixed(2)}, ` +
      `first token after ${one.ttft_ms.toFixed(0)} ms`;
    messages = [...before, ...asked, { role: "assistant", content: said.textContent }];
  } catch (error) {
    figures.textContent = abort.signal.aborted ? "stopped" : explain(error);
    figures.classList.toggle("error", !abort.signal.aborted);
    if (abort.signal.aborted) messages = [...before, ...asked, { role: "assistant", content: said.textContent }];
    else $("question").value ||= text;
  } finally {
    said.classList.remove("waiting");
    $("messages").scrollTop = $("messages").scrollHeight;
    running = null;
    show();
  }
}

function bubble(role) {
  const name = role === "user" ? "You" : "Model";
  const one = el("div", { className: `message ${role}`, attributes: { "aria-label": name, role: "group" } });
  $("messages").append(one);
  return one;
}
