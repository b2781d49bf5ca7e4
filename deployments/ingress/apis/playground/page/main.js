// Entry point of the page: list of models, selection of the view by address, API key, color scheme.

import { ApiError, explain, key, listModels } from "./api.js";
import { DemoView } from "./demo.js";
import { announce, el } from "./dom.js";
import { ModelsView } from "./models.js";
import { Playground } from "./playground.js";
import { StatusView } from "./status.js";
import { describe, taskNames } from "./tasks.js";
import { forgetVersions } from "./versions.js";

// Tasks in the order of the navigation; others follow by name.
const ORDER = ["question-answering", "chat", "text-classification", "feature-extraction", "sentence-similarity", "text-ranking"];
const RETRY_MS = 3000;
const content = document.querySelector("#content");
const state = { models: null, view: null, playgrounds: new Map(), loads: 0, retry: null, problem: null };

async function start() {
  prepareTheme();
  prepareKeyDialog();
  prepareSkipLink();
  addEventListener("hashchange", () => {
    show(true);
    refreshModels();
  });
  addEventListener("visibilitychange", () => document.hidden || refreshModels());
  await loadModels();
}

/** Load the list of models and show the view. Without a connection, try again later. */
async function loadModels() {
  clearTimeout(state.retry);
  state.loads += 1;
  const load = state.loads;
  const isLatest = () => load === state.loads;
  try {
    const models = await listModels();
    if (isLatest()) offer(models);
  } catch (error) {
    if (isLatest()) showProblem(error);
  }
}

/** Offer models that came or went meanwhile. After an error, keep the list. */
async function refreshModels() {
  if (!state.models) return; // `loadModels` runs, or tries again later
  const { loads } = state;
  const models = await listModels().catch(() => null);
  const isOutdated = loads !== state.loads;
  if (models && !isOutdated && JSON.stringify(models) !== JSON.stringify(state.models)) offer(models);
}

/** Give a new list of models to the views. The open view stays, with its input and the focus. */
function offer(models) {
  state.models = models;
  forgetVersions();
  const tasks = listTasks();
  for (const [task, playground] of state.playgrounds) {
    if (tasks.includes(task)) playground.offer(models);
    else drop(task, playground);
  }
  const named = location.hash.split("/")[2];
  const isNew = state.shown?.view === "play" && named !== state.shown.task && tasks.includes(named);
  if (!state.view?.offer || isNew) {
    show(false);
    return;
  }
  if (!(state.view instanceof Playground)) state.view.offer(models);
  if (!state.view.node.isConnected) content.replaceChildren(state.view.node); // after a problem
  markCurrent(tasks);
}

/** Remove the playground of a task that no model can do any more. */
function drop(task, playground) {
  playground.stop();
  state.playgrounds.delete(task);
  if (state.view === playground) state.view = null;
}

function showProblem(error) {
  const isAnswer = error instanceof ApiError;
  const refused = isAnswer && [401, 403].includes(error.status);
  if (!refused) state.retry = setTimeout(loadModels, RETRY_MS);
  const text = explain(error);
  // A retry that fails in the same way takes no focus, and is not announced again.
  if (state.problem?.text === text && state.problem.node.isConnected) return;
  const title = refused ? "A key is needed" : isAnswer ? "No list of models" : "No connection";
  const node = el(
    "section",
    { class: "card empty" },
    el("h1", { tabindex: "-1" }, title),
    el("p", {}, text),
    refused
      ? el("button", { type: "button", class: "primary", onclick: openKeyDialog }, "Enter the key")
      : el("button", { type: "button", class: "primary", onclick: loadModels }, "Try again"),
  );
  state.problem = { text, node };
  content.replaceChildren(node);
  announce(text);
}

function usable() {
  return state.models.filter((model) => model.state !== "refused");
}

function listTasks() {
  const names = [...new Set(usable().flatMap(taskNames))];
  const rank = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  return names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

/** Show the view of the address: #/play/TASK, #/demo, #/models or #/status. */
function show(moveFocus) {
  if (!state.models) return;
  const [, name, argument] = location.hash.split("/");
  const tasks = listTasks();
  const view = ["demo", "models", "status"].includes(name) ? name : "play";
  const task = tasks.includes(argument) ? argument : tasks[0];
  state.view?.close?.();
  state.view = buildView(view, task);
  content.replaceChildren(state.view.node);
  const heading = state.view.node.querySelector("h1");
  document.title = `${heading.textContent} – Hundredfold`;
  state.shown = { view, task };
  markCurrent(tasks);
  if (moveFocus) heading.focus({ preventScroll: true });
}

function buildView(view, task) {
  if (view === "models") return new ModelsView(state.models, loadModels);
  if (view === "status") return new StatusView();
  if (view === "demo") return new DemoView(state.models);
  if (!task) return noModels();
  // Keep the input and the answers of a task while another task is shown.
  if (!state.playgrounds.has(task)) state.playgrounds.set(task, new Playground(state.models, task));
  return state.playgrounds.get(task);
}

function noModels() {
  return {
    node: el(
      "section",
      { class: "card empty" },
      el("h1", { tabindex: "-1" }, "No model yet"),
      el("p", {}, "Build one with ", el("code", {}, "hundredfold build BAAI/bge-small-en-v1.5"), ", then load this page again."),
    ),
  };
}

function markCurrent(tasks) {
  const { view, task } = state.shown;
  for (const link of document.querySelectorAll(".views a")) {
    const current = link.getAttribute("href") === `#/${view}`;
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const rail = document.querySelector("#tasks");
  rail.hidden = view !== "play" || tasks.length === 0;
  rail.replaceChildren(
    ...tasks.map((name) =>
      el("a", { href: `#/play/${name}`, "aria-current": name === task ? "page" : null }, describe(name).name),
    ),
  );
}

function openKeyDialog() {
  document.querySelector("#key-input").value = key.get();
  document.querySelector("#key-dialog").showModal();
}

function prepareKeyDialog() {
  const dialog = document.querySelector("#key-dialog");
  document.querySelector("#key-button").addEventListener("click", openKeyDialog);
  dialog.addEventListener("close", () => {
    if (!["save", "forget"].includes(dialog.returnValue)) return;
    key.set(dialog.returnValue === "save" ? document.querySelector("#key-input").value.trim() : "");
    document.querySelector("#key-input").value = "";
    dialog.returnValue = "";
    announce(key.get() ? "Key saved for this tab" : "Key forgotten");
    loadModels();
  });
}

/** The address names the view, so the link to the content must not change the address. */
function prepareSkipLink() {
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    content.focus();
  });
}

function prepareTheme() {
  const button = document.querySelector("#theme-button");
  const root = document.documentElement;
  const names = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };
  const current = () => root.dataset.theme ?? "auto";
  const label = () => {
    button.textContent = names[current()];
    button.setAttribute("aria-label", `Color scheme: ${current()}`);
  };
  button.addEventListener("click", () => {
    const next = { auto: "light", light: "dark", dark: "auto" }[current()];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    localStorage.setItem("theme", next);
    label();
  });
  label();
}

start();
