// The demo: sends one question to every question-answering model and shows the times.

import { explain, request } from "./api.js";
import { mark } from "./answers.js";
import { announce, bar, bytes, el, fillBar, median, milliseconds, percent } from "./dom.js";
import { Form } from "./form.js";
import { describe } from "./tasks.js";
import { describeGraph, usableDevices, versionsOf } from "./versions.js";

const TASK = "question-answering";
const REPEATS = 5;

export class DemoView {
  constructor(models) {
    this.running = null;
    const task = { ...describe(TASK), action: "Ask them all" };
    this.form = new Form(task, task.fields.filter((field) => !field.option), {
      onrun: () => this.run(),
      onstop: () => this.running.abort(),
      onchange: () => {},
    });
    this.empty = noModels();
    this.single = el("p", { class: "note" }, "One model answers questions here. ", el("code", {}, "hundredfold demo --variants"), " builds two smaller ones and their versions from PyTorch to int8, and this table compares them.");
    this.passage = el("p", { class: "passage" });
    this.rows = el("tbody");
    this.results = el(
      "section",
      { class: "card", "aria-label": "Answers", hidden: true },
      el("h2", {}, "Answers"),
      this.passage,
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Answers and times" },
        el(
          "table",
          { class: "figures" },
          el("caption", {}, `Median of ${REPEATS} requests one after the other, without the cache`),
          el(
            "thead",
            {},
            el("tr", {}, ["Model", "Size", "Answer", "Confidence", "Compute", "In the server", "In all"].map((name) => el("th", { scope: "col", class: name === "Answer" && "wide" }, name))),
          ),
          this.rows,
        ),
      ),
    );
    this.node = el(
      "div",
      {},
      el(
        "header",
        { class: "view-head" },
        el("h1", { tabindex: "-1" }, "One question, every model"),
        el("p", {}, "Ask about a text of your choice. Each model, version and kind of hardware answers in turn, and the table shows what it costs."),
      ),
      this.form.node,
      this.empty,
      this.single,
      this.results,
    );
    this.offer(models);
  }

  /** Use a new list of models from the next run on. */
  offer(models) {
    this.models = models.filter((model) => (model.tasks ?? []).includes(TASK));
    this.form.node.hidden = this.models.length === 0;
    this.empty.hidden = this.models.length > 0;
    this.single.hidden = this.models.length !== 1;
  }

  close() {
    this.running?.abort();
  }

  async run() {
    let values;
    try {
      values = this.form.read();
    } catch (error) {
      announce(error.message);
      return;
    }
    this.running = new AbortController();
    this.form.setRunning(true);
    this.results.hidden = false;
    this.passage.replaceChildren(values.context);
    const variants = (await Promise.all(this.models.map(variantsOf))).flat();
    this.rows.replaceChildren(...variants.map(emptyRow));
    const answered = [];
    for (const [i, variant] of variants.entries()) {
      const row = this.rows.children[i];
      try {
        const result = await measure(variant, values, this.running.signal);
        answered.push(result);
        row.replaceWith(resultRow(variant, result));
      } catch (error) {
        const text = error.name === "AbortError" ? "stopped" : explain(error);
        row.replaceWith(el("tr", {}, heading(variant), el("td", { colspan: 6, class: "problem" }, text)));
      }
    }
    this.running = null;
    this.form.setRunning(false);
    this.summarize(answered, values);
  }

  summarize(answered, { context }) {
    if (!answered.length) return;
    const slowest = Math.max(...answered.map((result) => result.elapsed));
    for (const node of this.rows.querySelectorAll(".bar[data-ms]")) fillBar(node, Number(node.dataset.ms) / slowest);
    const best = answered.reduce((a, b) => (b.span.score > a.span.score ? b : a));
    if (best.span.answer) this.passage.replaceChildren(...mark(context, best.span));
    const fastest = answered.reduce((a, b) => (b.elapsed < a.elapsed ? b : a));
    announce(`${answered.length} answers; the fastest takes ${milliseconds(fastest.elapsed)}`);
  }
}

/** Every version of a model, on every usable device. */
async function variantsOf(model) {
  const versions = [model, ...(await versionsOf(model))];
  return versions.flatMap((facts) =>
    usableDevices(facts).map(([device, { size_bytes: size }]) => ({
      model: model.id,
      reference: facts === model ? model.id : `${model.id}@${facts.version}`,
      name: `${device.toUpperCase()} ${describeGraph(facts, device)}`,
      version: facts.version,
      size,
      headers: { "x-hardware": device, "x-use-cache": "false", "x-wait-for-model": "true" },
    })),
  );
}

async function measure({ reference, headers }, { question, context }, signal) {
  const body = { inputs: { question, context } };
  const answers = [];
  await request(`/models/${reference}/pipeline/${TASK}`, { body, headers, signal }); // warm-up
  for (let i = 0; i < REPEATS; i += 1) {
    answers.push(await request(`/models/${reference}/pipeline/${TASK}`, { body, headers, signal }));
  }
  const middle = (read) => median(answers.map(({ cost }) => read(cost)));
  return {
    span: [answers[0].value].flat()[0],
    compute: middle((cost) => cost.phases.compute),
    server: middle((cost) => cost.elapsed - cost.phases.network),
    elapsed: middle((cost) => cost.elapsed),
  };
}

function heading({ model, name, version }) {
  return el("th", { scope: "row", title: `Version ${version}` }, model, el("small", {}, name));
}

function emptyRow(variant) {
  return el("tr", {}, heading(variant), el("td", { colspan: 6, class: "note" }, "waits"));
}

function resultRow(variant, { span, compute, server, elapsed }) {
  const width = bar(0);
  width.dataset.ms = elapsed;
  return el(
    "tr",
    {},
    heading(variant),
    el("td", {}, bytes(variant.size)),
    el("td", { class: "wide" }, span.answer || "no answer"),
    el("td", {}, percent(span.score)),
    el("td", {}, milliseconds(compute)),
    el("td", {}, milliseconds(server)),
    el("td", {}, milliseconds(elapsed), width),
  );
}

function noModels() {
  return el(
    "section",
    { class: "card empty" },
    el("p", {}, "No model here answers questions. Build one with ", el("code", {}, "hundredfold build MODEL --task question-answering"), "."),
  );
}
