import { $, ApiError, el, events, explain, onState } from "/page/api.js";
import { drawLine } from "/page/charts.js";
import { drawTree, nodesOf, shown, summary } from "/page/tree.js";

const KEPT_ROUNDS = 400;
const SHOWN_ROUNDS = 24;
const MINUTE = 60;
const NUM_COLOURS = 6;
const NOT_ENABLED =
  "The live view is off on this server. Its operator switches it on with WATCH_ROUNDS=on, for example: " +
  "WATCH_ROUNDS=on coppice up --http-port 8000";

let rounds = [];
let loads = [];
let chosen = null;
let missed = 0;
let isPaused = false;
let isShown = false;
let isDirty = false;
let stream = null;
const sources = [];

export function start() {
  $("pause").addEventListener("click", () => pause(!isPaused));
  $("request").addEventListener("change", () => {
    chosen = null;
    pause(false);
  });
  $("rounds").addEventListener("click", (event) => {
    const one = event.target.closest("[role=option]");
    if (one) choose(one.round);
  });
  $("rounds").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    if (!isPaused) pause(true);
    const list = [...$("rounds").children].map((one) => one.round);
    const now = list.indexOf(chosen);
    choose(list[Math.min(list.length - 1, Math.max(0, now + step))]);
  });
  addEventListener("keydown", (event) => {
    if (isShown && event.key === "p" && !event.ctrlKey && !event.metaKey && !/INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) pause(!isPaused);
  });
  addEventListener("resize", () => (isDirty = true));
  $("as-table").addEventListener("toggle", () => (isDirty = true));
  onState((state) => state === "ready" && isShown && !stream && follow());
  setInterval(() => isShown && isDirty && draw(), 200);
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

export function show(wanted) {
  isShown = wanted;
  if (!wanted) return;
  isDirty = true;
  if (!stream) follow();
}

export function restart() {
  stream?.abort();
  stream = null;
  rounds = [];
  loads = [];
  if (isShown) follow();
}

async function follow() {
  const abort = (stream = new AbortController());
  try {
    for await (const event of events("/v1/coppice/rounds", null, abort.signal)) {
      note("");
      if (event.missed_rounds) tellMissed(event.missed_rounds);
      if (event.object === "coppice.round") addRound(event);
      else addLoad(event);
    }
    setTimeout(() => isShown && !stream && follow(), 500);
  } catch (error) {
    if (abort.signal.aborted) return;
    note(error instanceof ApiError && error.code === "not_enabled" ? NOT_ENABLED : explain(error));
    const isFinal = error instanceof ApiError && error.status < 500;
    if (!isFinal) setTimeout(() => isShown && !stream && follow(), 2000);
  } finally {
    if (stream === abort) stream = null;
  }
}

function note(text) {
  $("live-note").hidden = !text;
  if ($("live-note").textContent !== text) $("live-note").textContent = text;
}

function tellMissed(more) {
  missed += more;
  $("missed").textContent = `${plural(missed, "round")} came too fast to be shown`;
}

function addRound(round) {
  rounds.push(round);
  if (rounds.length > KEPT_ROUNDS) rounds.splice(0, rounds.length - KEPT_ROUNDS);
  for (const node of round.nodes) for (const source of node.sources) if (!sources.includes(source)) sources.push(source);
  isDirty = true;
}

function addLoad(load) {
  // Counts of a restarted server begin again.
  if (loads.length && load.generated_tokens < loads.at(-1).generated_tokens) loads = [];
  loads.push(load);
  while (load.time - loads[0].time > MINUTE + 5) loads.shift();
  isDirty = true;
}

const colour = (source) => `s${sources.indexOf(source) % NUM_COLOURS}`;
const selected = () => rounds.filter((one) => !$("request").value || one.request_id === $("request").value);
const current = () => chosen ?? selected().at(-1);

function pause(wanted) {
  // What can be chosen is what is shown; rounds go on coming.
  if (wanted) strip();
  chosen = wanted ? current() : null;
  hold(wanted);
  draw();
}

function hold(wanted) {
  isPaused = wanted;
  $("pause").setAttribute("aria-pressed", String(wanted));
  $("pause").textContent = wanted ? "Go on" : "Pause";
  isDirty = true;
}

function choose(round) {
  if (!round) return;
  hold(true);
  chosen = round;
  draw();
}

function draw() {
  isDirty = false;
  tiles();
  const now = loads.at(-1)?.time ?? 0;
  drawLine($("speed"), changes((one, last) => [one.generated_tokens - last.generated_tokens, one.time - last.time]), now, "tokens per second");
  drawLine($("tau"), changes((one, last) => [one.generated_tokens - last.generated_tokens, one.rounds - last.rounds]), now, "tokens per round");
  requests();
  if (!isPaused) strip();
  else mark();
  tree();
}

/** Ratios of what two counts grew by, over about two seconds each. */
function changes(counts) {
  const points = [];
  for (let at = 1; at < loads.length; at += 1) {
    const [over, under] = counts(loads[at], loads[Math.max(0, at - 4)]);
    points.push([loads[at].time, under > 0 ? over / under : null]);
  }
  return points;
}

function tiles() {
  const load = loads.at(-1);
  if (!load) return;
  const last = loads.at(-5) ?? loads[0];
  const tokens = load.generated_tokens - last.generated_tokens;
  const number = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
  const sum = (name) => load.verifiers.reduce((total, one) => total + one[name], 0);
  const most = (name) => Math.max(0, ...load.verifiers.map((one) => one[name]));
  const told = {
    speed: number(tokens / (load.time - last.time), 1),
    tau: number(tokens / (load.rounds - last.rounds), 2),
    running: load.running,
    waiting: load.waiting,
    budget: load.drafting ? number(load.planned_nodes / load.drafting, 1) : "0",
    price: most("row_price") ? number(most("row_price"), 3) : "–",
    rows: sum("rows"),
    pass: number(most("pass_ms"), 1),
  };
  for (const [name, value] of Object.entries(told)) $(`t-${name}`).textContent = value;
}

function requests() {
  const ids = [...new Set(rounds.map((one) => one.request_id))].slice(-12);
  const list = $("request");
  if (document.activeElement === list) return;
  const value = ids.includes(list.value) ? list.value : "";
  const options = ids.reverse().map((id) => el("option", { value: id, textContent: id.length > 20 ? `${id.slice(0, 19)}…` : id }));
  list.replaceChildren(el("option", { value: "", textContent: "newest" }), ...options);
  list.value = value;
}

function strip() {
  const last = selected().slice(-SHOWN_ROUNDS);
  $("rounds").replaceChildren(
    ...last.map((round, place) => {
      const kept = round.tokens.length;
      const one = el("div", { id: `round-${place}`, className: `k${Math.min(3, Math.max(0, kept - 1))}`, textContent: kept });
      one.setAttribute("role", "option");
      one.setAttribute("aria-label", `${kept} tokens kept`);
      one.round = round;
      return one;
    }),
  );
  mark();
}

function mark() {
  const now = current();
  for (const one of $("rounds").children) {
    const isIt = one.round === now;
    one.setAttribute("aria-selected", String(isIt));
    if (isIt) $("rounds").setAttribute("aria-activedescendant", one.id);
    if (isIt) $("rounds").scrollLeft = one.offsetLeft - $("rounds").offsetLeft - $("rounds").clientWidth / 2;
  }
}

function tree() {
  const round = current();
  if (!round) return;
  const pieces = [
    `${plural(round.tokens.length, "token")} kept: ${round.tokens.map((one) => shown(one.text)).join(" ")}`,
    summary(round),
    `budget ${round.budget}`,
    `pass ${round.pass_ms.toFixed(1)} ms for ${plural(round.pass_rows, "row")}`,
  ];
  if (round.round_ms) pieces.push(`round ${round.round_ms.toFixed(1)} ms`);
  if (round.origin) pieces.push(`draft ${round.origin}`);
  $("round-line").textContent = pieces.join(" · ");
  legend();
  drawTree($("tree"), round, colour);
  if ($("as-table").open) table(round);
}

function legend() {
  const there = [...$("legend").querySelectorAll(".source")].map((one) => one.textContent);
  for (const source of sources)
    if (!there.includes(source)) $("legend").append(el("li", { className: `source ${colour(source)}` }, el("i"), source));
}

function table(round) {
  const cells = (node) => [node.depth, shown(node.text), node.state, node.sources.join(", "), node.probability === null ? "" : node.probability.toFixed(3)];
  const rows = nodesOf(round).nodes.map((node) => el("tr", {}, ...cells(node).map((text) => el("td", { textContent: text }))));
  $("as-table").querySelector("tbody").replaceChildren(...rows);
}
