// Live status: requests, latency, replicas. Reads /stats every two seconds while it is visible.

import { explain, get } from "./api.js";
import { bar, decimal, el, milliseconds, percent } from "./dom.js";
import { Sparkline } from "./plots.js";

const PERIOD_MS = 2000;
const KEPT = 90; // values per line, which cover three minutes

// [name, function that reads the value from /stats, function that formats the value]
const FIGURES = [
  ["Requests/s", (stats) => stats.requests_per_s, (value) => decimal(value, 1)],
  ["Latency p50", (stats) => stats.latency_ms.p50, milliseconds],
  ["Latency p99", (stats) => stats.latency_ms.p99, milliseconds],
  ["Queue p99", (stats) => stats.queue_ms.p99, milliseconds],
  ["Tokens/s", (stats) => stats.tokens_per_s, (value) => decimal(value, 0)],
  ["In flight", (stats) => stats.in_flight.texts + stats.in_flight.generations, (value) => decimal(value, 0)],
  ["Cache hits", (stats) => stats.cache_hit_ratio, (value) => percent(value, 0)],
  ["Failed", (stats) => stats.failed_ratio, percent],
];

export class StatusView {
  constructor() {
    this.figures = FIGURES.map(([name, read, write]) => ({ name, read, write, values: [], value: el("dd", {}, "–"), line: new Sparkline(name) }));
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.deployments = el("tbody");
    this.models = el("tbody");
    this.about = el("p", { class: "note" }, "Loading …");
    this.node = el(
      "div",
      {},
      el("header", { class: "view-head" }, el("h1", { tabindex: "-1" }, "Status"), this.about),
      this.problem,
      el(
        "dl",
        { class: "tiles" },
        this.figures.map(({ name, value, line }) => el("div", { class: "card tile" }, el("dt", {}, name), value, line.node)),
      ),
      section("Deployments", ["Deployment", "Replicas", "Starting", "Wanted", "Limits", "Busy", "Queued work"], this.deployments),
      section("Models", ["Model", "Requests/s", "p50", "p90", "p99", "Failed", "Tokens/s"], this.models),
    );
    this.refresh();
  }

  /** Each reading of /stats has the current models, so a new list changes nothing. */
  offer() {}

  close() {
    clearTimeout(this.timer);
    this.closed = true;
  }

  async refresh() {
    try {
      if (!document.hidden) this.show(await get("/stats"));
      this.problem.hidden = true;
    } catch (error) {
      this.problem.textContent = explain(error);
      this.problem.hidden = false;
    }
    if (!this.closed) this.timer = setTimeout(() => this.refresh(), PERIOD_MS);
  }

  show(stats) {
    for (const figure of this.figures) {
      const value = figure.read(stats);
      figure.value.textContent = value === null ? "–" : figure.write(value);
      figure.values = [...figure.values.slice(1 - KEPT), value ?? 0];
      figure.line.draw(figure.values);
    }
    const scope = stats.ingress_replicas > 1 ? `, seen by one of ${stats.ingress_replicas} ingress replicas` : "";
    this.about.textContent = `The last ${Math.round(stats.window_s)} seconds${scope}.`;
    this.deployments.replaceChildren(...Object.entries(stats.deployments).map(deploymentRow));
    this.models.replaceChildren(...stats.models.map(modelRow));
  }
}

function deploymentRow([name, { running, starting, scaling, busy_ratio: busy, queued_s: queued }]) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, name),
    el("td", {}, String(running)),
    el("td", {}, starting ? String(starting) : "–"),
    el("td", {}, scaling ? String(scaling.target) : "–"),
    el("td", {}, describeLimits(scaling)),
    el("td", {}, busy === null ? "–" : [percent(busy, 0), bar(busy)]),
    el("td", {}, queued === null ? "–" : milliseconds(queued * 1000)),
  );
}

function describeLimits(scaling) {
  if (!scaling) return "–";
  return scaling.min === scaling.max ? "fixed" : `${scaling.min} to ${scaling.max}`;
}

function modelRow({ id, requests_per_s: rate, latency_ms: latency, failed_ratio: failed, tokens_per_s: tokens }) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, id),
    [decimal(rate, 1), milliseconds(latency.p50 ?? NaN), milliseconds(latency.p90 ?? NaN), milliseconds(latency.p99 ?? NaN), percent(failed), decimal(tokens, 0)].map((text) => el("td", {}, text)),
  );
}

function section(title, heads, rows) {
  return el(
    "section",
    { class: "card" },
    el("h2", {}, title),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      el("table", { class: "figures" }, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), rows),
    ),
  );
}
