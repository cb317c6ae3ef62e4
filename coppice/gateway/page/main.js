import { $, call, explain, onState, watchServer } from "/page/api.js";
import * as chat from "/page/chat.js";
import * as compare from "/page/compare.js";
import * as live from "/page/live.js";

const VIEWS = ["chat", "compare", "live"];
let model = "";

function open(view, focuses = false) {
  for (const one of VIEWS) {
    const tab = $(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === view));
    tab.tabIndex = one === view ? 0 : -1;
    $(one).hidden = one !== view;
  }
  if (focuses) $(`tab-${view}`).focus();
  if (location.hash.slice(1) !== view) history.replaceState(null, "", `#${view}`);
  live.show(view === "live");
}

function tabs() {
  for (const [place, view] of VIEWS.entries()) {
    $(`tab-${view}`).addEventListener("click", () => open(view));
    $(`tab-${view}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) open(VIEWS[(place + step + VIEWS.length) % VIEWS.length], true);
      else if (event.key === "Home") open(VIEWS[0], true);
      else if (event.key === "End") open(VIEWS.at(-1), true);
    });
  }
  addEventListener("hashchange", () => VIEWS.includes(location.hash.slice(1)) && open(location.hash.slice(1)));
  open(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
}

function settings() {
  const toggle = $("settings-toggle");
  toggle.addEventListener("click", () => {
    const isOpen = $("settings").hidden;
    $("settings").hidden = !isOpen;
    toggle.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) $("settings").querySelector("input").focus();
  });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").elements.token.addEventListener("change", () => {
    learn();
    live.restart();
  });
}

async function learn() {
  try {
    [{ id: model }] = (await call("/v1/models")).data;
    $("model").textContent = model;
    $("model").classList.remove("error");
  } catch (error) {
    $("model").textContent = explain(error);
    $("model").classList.add("error");
  }
}

tabs();
settings();
chat.start(() => model);
compare.start(() => model);
live.start();
onState((state) => state === "ready" && learn());
watchServer();
