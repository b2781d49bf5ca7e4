// A side of the playground: a chosen model and its answer. A comparison shows two sides.

import { explain, request } from "./api.js";
import { costPanel, factList, factsOf } from "./cost.js";
import { announce, el, milliseconds } from "./dom.js";
import { json } from "./answers.js";
import { generate } from "./generation.js";
import { Picker } from "./picker.js";

const LONG_WAIT_MS = 4000;

class Side {
  constructor(letter, onchange, choices) {
    this.letter = letter;
    this.picker = new Picker(`Model ${letter}`, onchange, choices);
    this.title = el("h2", {}, "Answer");
    this.clock = el("span", { class: "clock", "aria-hidden": "true" });
    this.output = el("div", { class: "output" });
    this.cost = el("div", { class: "cost-slot" });
    this.raw = el("div");
    this.node = el(
      "section",
      { class: "card answer", "aria-label": `Answer ${letter}` },
      el("div", { class: "card-head" }, this.title, this.clock),
      this.output,
      this.cost,
      this.raw,
    );
  }

  /** Set the title. In a comparison it has the letter of this side. */
  setCompared(compared) {
    this.title.textContent = compared ? `Answer ${this.letter}` : "Answer";
  }

  /** Await `work()` and show the elapsed time. After LONG_WAIT_MS also show a message. */
  async timed(work) {
    const startedAt = performance.now();
    this.hasBegun = false;
    this.node.setAttribute("aria-busy", "true");
    if (this.node.getBoundingClientRect().top > innerHeight - 80) this.node.scrollIntoView();
    const timer = setInterval(() => {
      const ms = performance.now() - startedAt;
      this.clock.textContent = milliseconds(Math.round(ms / 100) * 100);
      if (ms > LONG_WAIT_MS) this.showWaiting();
    }, 100);
    try {
      return await work();
    } finally {
      clearInterval(timer);
      this.clock.textContent = "";
      this.node.removeAttribute("aria-busy");
    }
  }

  /** Called for each word of a stream. After the first one, nothing waits any more. */
  begin() {
    if (this.hasBegun) return;
    this.hasBegun = true;
    this.cost.replaceChildren();
  }

  showWaiting() {
    if (this.hasBegun || this.cost.querySelector(".waiting")) return;
    const text = "Still waiting. A model that starts, or a full queue, takes some seconds.";
    this.cost.replaceChildren(el("p", { class: "note waiting" }, text));
    announce(text);
  }

  showError(error) {
    const text = error.name === "AbortError" ? "Stopped." : explain(error);
    const kind = error.name === "AbortError" ? "note" : "problem";
    this.cost.replaceChildren();
    this.raw.replaceChildren();
    this.output.replaceChildren(el("p", { class: kind }, text));
    announce(text);
  }
}

/** Side for tasks whose answer is one JSON value: all tasks except chat and completion. */
export class TaskSide extends Side {
  constructor(letter, task, onchange) {
    super(letter, onchange, { choosesLanguages: task.languages });
    this.task = task;
    this.output.append(el("p", { class: "note" }, `Press “${task.action}” for an answer.`));
  }

  /** Build the request from the values of the form and the languages of the chosen model. */
  build(name, formValues, useCache) {
    const { reference, chosen, languages } = this.picker;
    const values = { ...formValues, ...languages };
    const own = name === chosen.tasks[0];
    const path = own ? `/models/${reference}` : `/models/${reference}/pipeline/${name}`;
    const body = this.task.body(values);
    if (body.parameters && Object.keys(body.parameters).length === 0) delete body.parameters;
    const headers = { ...this.picker.headers, ...(useCache ? {} : { "x-use-cache": "false" }) };
    const openai = this.task.openai?.(values);
    return {
      path,
      address: path,
      body,
      headers,
      method: this.task.python?.(values),
      openaiCall: openai && [openai[0], { model: reference, ...openai[1] }],
    };
  }

  /** Send a request and show the answer. Returns {value, cost}, or null after an error. */
  async run(built, values, signal) {
    try {
      const headers = { ...built.headers, "x-wait-for-model": "true" };
      const answer = await this.timed(() => request(built.path, { body: built.body, headers, signal }));
      this.output.replaceChildren(this.task.render(answer.value, values));
      this.raw.replaceChildren(el("details", { class: "raw" }, el("summary", {}, "JSON"), json(answer.value)));
      this.cost.replaceChildren(costPanel(answer.cost, factsOf(answer.cost, this.picker.chosen)));
      announce(`Answered in ${milliseconds(answer.cost.elapsed)}`);
      return answer;
    } catch (error) {
      this.showError(error);
      return null;
    }
  }
}

/** Side for streamed answers: a conversation, or a text and its continuation. */
export class ChatSide extends Side {
  constructor(letter, mode, onchange) {
    super(letter, onchange);
    this.mode = mode;
    this.output.classList.add("transcript");
    this.output.setAttribute("role", "log");
    this.output.setAttribute("aria-live", "off"); // announce the end, not pieces of words
    this.output.setAttribute("aria-label", "Conversation");
    this.output.tabIndex = 0;
    this.clear();
  }

  clear() {
    this.history = [];
    this.output.replaceChildren(
      el("p", { class: "note" }, this.mode === "chat" ? "The conversation starts with your message." : "The text appears here."),
    );
    this.cost.replaceChildren();
  }

  /**
   * Send a message and show the streamed text. Returns {value, cost}, or null if there is no answer:
   * after an error, if the side was cleared, or if it was stopped before the first token of its text.
   */
  async run(built, { text }, signal) {
    const { history } = this; // `clear` replaces it
    if (this.mode === "completion" || this.history.length === 0) this.output.replaceChildren();
    const written = document.createTextNode("");
    const answer = el("p", { class: "said by-model" }, this.mode === "completion" && el("span", { class: "given" }, text), written);
    const thought = document.createTextNode("");
    const reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), el("p", {}, thought));
    const said = this.mode === "chat" && el("p", { class: "said by-person" }, text);
    const turn = el("div", { class: "turn" }, said, reasoning, answer);
    this.output.append(turn);
    this.cost.replaceChildren();
    const writer = new PacedWriter(written, this.output);
    const reasoningWriter = new PacedWriter(thought, this.output);
    // The reasoning is open until the text begins, because an answer may end before.
    const onreasoning = (piece) => {
      this.begin();
      if (reasoning.hidden) reasoning.open = true;
      reasoning.hidden = false;
      reasoningWriter.add(piece);
    };
    let hasText = false;
    const ontext = (piece) => {
      this.begin();
      if (!hasText) reasoning.open = false;
      hasText = true;
      writer.add(piece);
    };
    try {
      const result = await this.timed(() => generate(built, signal, ontext, onreasoning));
      if (this.history !== history) return null; // this turn belongs to a cleared conversation
      reasoningWriter.flush();
      writer.flush();
      turn.append(factList(turnFacts(result)));
      this.output.scrollTop = this.output.scrollHeight;
      this.cost.replaceChildren(costPanel(result.cost, factsOf(result.cost, this.picker.chosen)));
      const isStopped = result.reason === "stopped";
      announce(`${isStopped ? "Stopped" : "Answer complete"}: ${result.text}`);
      if (isStopped && !result.text) return null;
      this.history.push({ role: "user", content: text }, { role: "assistant", content: result.text });
      return { value: result.text, cost: result.cost };
    } catch (error) {
      reasoningWriter.flush();
      writer.flush();
      this.cost.replaceChildren();
      turn.append(el("p", { class: "problem" }, explain(error)));
      announce(explain(error));
      return null;
    }
  }
}

function turnFacts({ reason, cost }) {
  const ends = { stop: "complete", length: "token limit", stopped: "stopped" };
  return [
    ["", ends[reason] ?? reason ?? "ended", reason === "stopped" ? "warn" : ""],
    ["", `${cost.tokens} tokens`],
    cost.rate && ["", `${cost.rate.toFixed(1)} tokens/s`],
  ];
}

/** Adds text at most once per frame. Keeps the end in view unless the user has scrolled up. */
class PacedWriter {
  constructor(node, scroller) {
    this.node = node;
    this.scroller = scroller;
    this.waiting = "";
    this.frame = 0;
  }

  add(piece) {
    this.waiting += piece;
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    const follows = scrollHeight - scrollTop - clientHeight < 40;
    this.node.appendData(this.waiting);
    this.waiting = "";
    if (follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
