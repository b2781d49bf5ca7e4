// View of all models: state, size, replicas that have loaded the model, and report.

import { scoreList } from "./answers.js";
import { explain, get } from "./api.js";
import { announce, bytes, decimal, el, milliseconds, plural } from "./dom.js";
import {
  describeMemory,
  describeVersions,
  findOffered,
  memoryTools,
  pullForm,
  readMemory,
} from "./management.js";
import { lineChart } from "./plots.js";
import { describe, taskNames } from "./tasks.js";

export class ModelsView {
  /** `onchange` is called after a model was pulled, and loads the list again. */
  constructor(models, onchange) {
    this.onchange = onchange;
    this.tools = el("div");
    this.list = el("div", { class: "model-list" });
    this.node = el(
      "div",
      {},
      el("header", { class: "view-head" }, el("h1", { tabindex: "-1" }, "Models"), el("p", {}, "What this server can run, and what each model went through to become fast.")),
      this.tools,
      this.list,
    );
    this.offer(models);
  }

  /** List `models`. The form for pulls stays, with the progress of a build. */
  offer(models) {
    this.cards = models.map((model) => new ModelCard(model));
    this.list.replaceChildren(...this.cards.map((card) => card.node));
    this.showManagement();
  }

  /** Show the form for pulls if it is offered. A form that is shown stays, with its input. */
  showPull(isOffered) {
    if (!isOffered) this.tools.replaceChildren();
    else if (!this.pull?.isConnected) this.tools.replaceChildren((this.pull ??= pullForm(this.onchange)));
  }

  /** Add the tools of operators to the list, which is already shown. */
  async showManagement() {
    try {
      const offered = await findOffered();
      const memory = offered.has("memory") ? await readMemory() : new Map();
      if (!memory) {
        this.tools.replaceChildren(el("p", { class: "note" }, "Your key uses models. To pull, load and unload them it needs the scope admin."));
        return;
      }
      this.showPull(offered.has("pull"));
      this.cards.forEach((card) => card.showTools({ offered, memory, refresh: () => this.showManagement() }));
    } catch (error) {
      this.tools.replaceChildren(el("p", { class: "problem" }, explain(error)));
    }
  }
}

class ModelCard {
  constructor(model) {
    this.model = model;
    this.tools = el("span", { class: "samples" });
    this.memory = el("dd", {}, "–");
    this.memoryProperty = el("div", { hidden: true }, el("dt", {}, "In memory"), this.memory);
    this.versions = unfolding("Versions", async () => [describeVersions(await get(`/models/${model.id}/versions`))]);
    this.versions.hidden = true;
    const head = el(
      "div",
      { class: "card-head" },
      el("h2", {}, model.id),
      el("span", { class: `state ${model.state}` }, model.state),
      this.tools,
    );
    const content = model.state === "refused" ? [el("p", { class: "problem" }, model.reason)] : this.facts();
    this.node = el("article", { class: "card model" }, head, content);
  }

  facts() {
    const { model } = this;
    return [
      el(
        "p",
        { class: "tasks-of" },
        taskNames(model).map((name) => el("a", { class: "chip", href: `#/play/${name}` }, describe(name).name)),
      ),
      el(
        "dl",
        { class: "properties" },
        property("Version", model.version),
        property("Size", bytes(model.size_bytes)),
        property("Longest input", `${model.max_tokens.toLocaleString("en")} tokens`),
        Object.entries(model.devices).map(([device, facts]) => property(device.toUpperCase(), placeOf(facts))),
        this.memoryProperty,
        property("Source", model.source.ref, "wide"),
      ),
      this.versions,
      unfolding("Report", async () => describeReport(await get(`/models/${model.id}/report`))),
    ];
  }

  showTools({ offered, memory, refresh }) {
    if (this.model.state === "refused") return;
    this.versions.hidden = !offered.has("versions");
    // Later calls keep the buttons: a request of one may run, or a problem be shown beside it.
    if (!this.tools.hasChildNodes()) this.tools.append(...memoryTools(this.model, { offered, refresh }));
    this.memoryProperty.hidden = !offered.has("memory");
    this.memory.textContent = describeMemory(memory.get(this.model.id));
  }
}

/** A `details` element that shows the nodes of `load()` when it is opened. After a failure, the next opening loads again. */
function unfolding(title, load) {
  const place = el("div");
  let loading = null;
  const show = async () => {
    place.replaceChildren(el("p", { class: "note" }, "Loading …"));
    try {
      place.replaceChildren(...(await load()));
    } catch (error) {
      loading = null;
      place.replaceChildren(el("p", { class: "problem" }, explain(error)));
      announce(explain(error));
    }
  };
  const ontoggle = (event) => {
    if (event.target.open) loading ??= show();
  };
  return el("details", { ontoggle }, el("summary", {}, title), place);
}

function property(name, value, kind) {
  return el("div", { class: kind }, el("dt", {}, name), el("dd", {}, value));
}

function placeOf({ compute_type: compute, available, replicas, size_bytes: size }) {
  const where = replicas ? plural(replicas, "replica") : available ? "no replica yet" : "no such hardware here";
  return `${compute}, ${bytes(size)}, ${where}`;
}

function describeReport({ id, scores, candidates, stages, generation }) {
  const metrics = Object.keys({ ...scores, ...candidates[0]?.scores });
  const parts = [
    table(
      "Graphs that passed the accuracy gate",
      ["Graph", "Hardware", "Precision", "Size", "Cosine to fp32", ...metrics],
      candidates.map((candidate) => [
        candidate.name,
        candidate.device,
        candidate.precision,
        bytes(candidate.size_bytes),
        decimal(candidate.parity.cosine_mean, 5),
        ...metrics.map((metric) => metricCell(candidate.scores[metric], scores[metric])),
      ]),
    ),
  ];
  if (stages) parts.push(...stageParts(stages));
  else if (!generation) {
    const command = el("code", {}, `hundredfold models report ${id}`);
    parts.push(el("p", { class: "note" }, "No stage table yet: size, latency and metric from PyTorch to the served graph. To measure it, run ", command, " on this host; the report then shows it."));
  }
  if (generation) parts.push(generationTable(generation));
  return parts;
}

function metricCell(value, reference) {
  if (value === undefined) return "–";
  return reference === undefined ? decimal(value) : `${decimal(value)} (fp32 ${decimal(reference)})`;
}

function stageParts({ stages, metric, measured_at: measuredAt }) {
  const lengths = [...new Set(stages.flatMap((stage) => stage.latencies.map((one) => one.tokens)))].sort((a, b) => a - b);
  const rows = stages.map((stage) => [
    stage.name,
    stage.what,
    bytes(stage.size_bytes),
    metric && stage.scores[metric] !== undefined ? decimal(stage.scores[metric]) : "–",
    ...lengths.map((tokens) => milliseconds(stage.latencies.find((one) => one.tokens === tokens)?.mean_ms)),
    stage.speedup ? `${stage.speedup.toFixed(1)} ×` : "–",
  ]);
  return [
    table(
      `Stages, measured ${measuredAt.slice(0, 10)}; mean of sequential passes by tokens`,
      ["Stage", "What", "Size", metric ?? "Metric", ...lengths.map((tokens) => `${tokens}`), "Speed-up"],
      rows,
    ),
    el(
      "div",
      { class: "charts" },
      barChart("Size", stages.map((stage) => [stage.name, stage.size_bytes, bytes(stage.size_bytes)])),
      metric && barChart(metric, stages.map((stage) => [stage.name, stage.scores[metric], decimal(stage.scores[metric])])),
    ),
    lineChart(
      stages.map((stage) => ({ name: stage.name, points: stage.latencies.map((one) => [one.tokens, one.mean_ms]) })),
      { xLabel: "tokens", yLabel: "ms", label: "Latency of each stage by tokens; the table has the same figures" },
    ),
  ];
}

/** A chart with a bar per row [name, value, text]. Rows without a value are omitted. */
function barChart(title, rows) {
  const known = rows.filter(([, value]) => Number.isFinite(value));
  const largest = Math.max(...known.map(([, value]) => value));
  const bars = known.map(([label, value, text]) => ({ label, text, share: value / largest }));
  return el("section", {}, el("h3", {}, title), scoreList(bars, { name: `${title} of each stage`, ranked: false }));
}

function generationTable({ host, threads, throughput }) {
  return table(
    `Generation on ${host}, ${threads} threads`,
    ["Graph", "Tokens/s, one request", "Tokens/s, eight requests", "Prompt tokens/s"],
    Object.entries(throughput).map(([name, { single, batched, prefill }]) => [
      name,
      ...[single, batched, prefill].map((rate) => decimal(rate, 0)),
    ]),
  );
}

function table(caption, heads, rows) {
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      { class: "figures" },
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map(([head, ...cells]) => el("tr", {}, el("th", { scope: "row" }, head), cells.map((cell) => el("td", {}, cell))))),
    ),
  );
}
