// The playground: a task, a form, one or two models, their answers, the request as code.

import { key } from "./api.js";
import { CodePanel } from "./code.js";
import { factList } from "./cost.js";
import { announce, el, milliseconds } from "./dom.js";
import { Form } from "./form.js";
import { FIELDS, buildRequest } from "./generation.js";
import { labeled } from "./picker.js";
import { ChatSide, TaskSide } from "./side.js";
import { CHATS, describe, taskNames } from "./tasks.js";

export class Playground {
  constructor(models, name) {
    this.name = name;
    this.task = describe(name);
    this.isChat = name in CHATS;
    this.running = null;
    this.unanswered = ""; // message that a chat puts back if it gets no answer
    const changed = () => this.showCode();
    this.sides = ["A", "B"].map((letter) =>
      this.isChat ? new ChatSide(letter, name, changed) : new TaskSide(letter, this.task, changed),
    );
    this.form = new Form(this.task, this.isChat ? FIELDS[name] : this.task.fields, {
      onrun: () => this.run(),
      onstop: () => this.stop(),
      onchange: changed,
      entersRun: name === "chat",
    });
    this.code = new CodePanel();
    this.differences = el("div", { class: "differences", hidden: true });
    this.node = this.build();
    this.offer(models);
    this.setCompared(false);
  }

  /** Offer the models that can do the task. Input, answers and chosen models stay. */
  offer(models) {
    const able = models.filter((model) => taskNames(model).includes(this.name));
    this.sides.forEach((side, i) => side.picker.offer(able, i));
    this.showCode();
  }

  build() {
    this.cacheBox = el("input", { type: "checkbox", id: "use-cache", checked: true, onchange: () => this.showCode() });
    this.cacheLabel = el("label", { class: "check", for: "use-cache" }, this.cacheBox, el("span", {}, "Use the cache"));
    this.compareBox = el("input", {
      type: "checkbox",
      id: "compare",
      role: "switch",
      onchange: () => this.setCompared(this.compareBox.checked),
    });
    const clear = el("button", { type: "button", class: "quiet", onclick: () => this.clear() }, "New conversation");
    this.pickers = el("div", { class: "pickers" }, this.sides.map((side) => side.picker.node));
    this.layout = el(
      "div",
      { class: `layout ${this.task.wide ? "wide-answer" : ""}` },
      this.form.node,
      this.sides.map((side) => side.node),
      this.differences,
      this.code.node,
    );
    return el(
      "div",
      { class: "playground", onkeydown: (event) => event.key === "Escape" && this.stop() },
      el(
        "header",
        { class: "view-head" },
        el("div", {}, el("h1", { tabindex: "-1" }, this.task.name), el("p", {}, this.task.about)),
        el(
          "div",
          { class: "switches" },
          el("label", { class: "check", for: "compare" }, this.compareBox, el("span", {}, "Compare two")),
          !this.isChat && this.cacheLabel,
          this.name === "chat" && clear,
        ),
      ),
      el("div", { class: "card toolbar" }, this.pickers),
      this.layout,
    );
  }

  get shownSides() {
    return this.compareBox.checked ? this.sides : this.sides.slice(0, 1);
  }

  setCompared(compared) {
    this.cacheLabel.hidden = compared;
    this.sides[1].node.hidden = !compared;
    this.sides[1].picker.node.hidden = !compared;
    this.layout.classList.toggle("compared", compared);
    this.pickers.classList.toggle("compared", compared);
    this.differences.hidden = true;
    this.sides.forEach((side) => side.setCompared(compared));
    if (compared) this.sides[1].picker.chooseLanguages(this.sides[0].picker.languages);
    this.showCode();
  }

  buildFor(side, values) {
    // A comparison shows times, so no side may answer from the cache.
    const usesCache = this.cacheBox.checked && !this.compareBox.checked;
    if (!this.isChat) return side.build(this.name, values, usesCache);
    return buildRequest(this.name, values, side.history, side.picker.reference, side.picker.headers);
  }

  showCode() {
    try {
      this.code.show(this.buildFor(this.sides[0], this.form.readDraft()), Boolean(key.get()));
    } catch {
      // The user is still typing a value that is not valid yet. Keep the previous code.
    }
  }

  /** Run the sides one after the other, so that they do not slow down each other. */
  async run() {
    const values = this.tryRead();
    if (values === null) return;
    this.running = new AbortController();
    this.form.setRunning(true);
    this.differences.hidden = true;
    const message = this.form.fields[0].control;
    const isChat = this.name === "chat";
    this.unanswered = message.value;
    if (isChat) message.value = "";
    // Build all requests first: the user may choose other models meanwhile.
    const runs = this.shownSides.map((side) => ({ side, label: side.picker.label, built: this.buildFor(side, values) }));
    const answers = [];
    for (const { side, built } of runs) {
      if (this.running.signal.aborted) break;
      answers.push(await side.run(built, values, this.running.signal));
    }
    this.running = null;
    this.form.setRunning(false);
    if (isChat && !answers.some(Boolean)) message.value ||= this.unanswered; // for another try
    if (answers.length === 2 && answers.every(Boolean)) this.showDifferences(runs.map(({ label }) => label), answers);
  }

  tryRead() {
    try {
      const values = this.form.read();
      this.buildFor(this.sides[0], values); // raises for invalid JSON
      return values;
    } catch (error) {
      this.sides[0].cost.replaceChildren(el("p", { class: "problem" }, error.message));
      announce(error.message);
      return null;
    }
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.unanswered = ""; // the stopped run does not put its message back
    this.sides.forEach((side) => side.clear());
    this.differences.hidden = true;
    this.showCode();
  }

  showDifferences([left, right], [a, b]) {
    const [first, second] = [a, b].map((answer) => answer.cost.elapsed);
    const ratio = Math.max(first, second) / Math.min(first, second);
    const faster = first < second ? left : right;
    const content = this.isChat
      ? a.value === b.value ? "Same text" : "Different texts"
      : this.task.difference(a.value, b.value);
    this.differences.replaceChildren(
      el("h2", {}, "Difference"),
      factList([
        ["A", `${left}: ${milliseconds(first)}`],
        ["B", `${right}: ${milliseconds(second)}`],
        ["Faster", ratio < 1.05 ? "equal within 5 %" : `${faster}, ${ratio.toFixed(1)} times`, "good"],
        ["Answers", content],
      ]),
    );
    this.differences.hidden = false;
    announce(`Difference: ${content}`);
  }
}
