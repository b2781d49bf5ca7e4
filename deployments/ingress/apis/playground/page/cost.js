// Panel with the time of each phase of an answer, and other facts from its headers.

import { el, fillBar, milliseconds } from "./dom.js";

const PHASES = [
  ["queue", "Queue", "until an engine thread or a KV slot was free"],
  ["tokenize", "Tokenize", "text to token ids"],
  ["wait", "Wait", "HTTP, micro-batch and hops inside the server"],
  ["compute", "Compute", "the forward pass"],
  ["prefill", "Prefill", "reading the prompt"],
  ["decode", "Decode", "writing the tokens"],
  ["network", "Network", "between this browser and the server"],
];

/** A bar of phases with their names and times. Phases of zero are omitted, except `network`. */
export function costPanel(cost, facts) {
  const shown = PHASES.filter(([name]) => cost.phases[name] > 0 || name === "network");
  const total = shown.reduce((sum, [name]) => sum + cost.phases[name], 0) || 1;
  const segments = shown.map(([name]) => fillBar(el("span", { class: `segment ${name}` }), cost.phases[name] / total));
  return el(
    "div",
    { class: "cost" },
    el("p", { class: "total" }, el("strong", {}, milliseconds(cost.elapsed)), " from the request to the answer"),
    el("div", { class: "segments", "aria-hidden": "true" }, segments),
    el(
      "dl",
      { class: "phases" },
      shown.map(([name, label, meaning]) =>
        el(
          "div",
          { title: meaning },
          el("dt", { class: name }, label),
          el("dd", {}, milliseconds(cost.phases[name])),
        ),
      ),
    ),
    factList(facts),
  );
}

export function factList(facts) {
  return el(
    "ul",
    { class: "facts" },
    facts.filter(Boolean).map(([name, value, kind]) =>
      el("li", { class: kind ?? "" }, el("span", {}, name), " ", el("b", {}, value)),
    ),
  );
}

/** Facts of an answer: cache, hardware, version, tokens and tokens per second. */
export function factsOf(cost, model) {
  const seconds = cost.elapsed / 1000;
  return [
    cost.cache && ["Cache", cost.cache, /^(hit|\d)/.test(cost.cache) ? "good" : ""],
    cost.compute && cost.compute !== "cache" && ["Hardware", cost.compute],
    cost.fallback && ["Fallback", `${cost.fallback}: no GPU was free`, "warn"],
    ["Version", (cost.version ?? model.version ?? "").slice(0, 12)],
    cost.tokens && ["Tokens", String(cost.tokens)],
    cost.tokens && !cost.rate && cost.cache !== "hit" && ["Tokens/s", Math.round(cost.tokens / seconds).toLocaleString("en")],
    cost.rate && ["Tokens/s", cost.rate.toFixed(1)],
    cost.firstToken && ["First token", milliseconds(cost.firstToken)],
    cost.warning && ["Note", cost.warning.replace("input-truncated; ", ""), "warn"],
  ];
}
