// A form that is built from a list of fields.

import { el } from "./dom.js";
import { labeled } from "./picker.js";

export class Form {
  /**
   * The button and Ctrl+Enter call `onrun`. With `entersRun`, Enter in a text also calls it.
   * During a run only the button works. It then calls `onstop`.
   */
  constructor(task, fields, { onrun, onstop, onchange, entersRun = false }) {
    this.action = task.action;
    this.isRunning = false;
    this.fields = fields.map((field) => ({ ...field, control: this.build(field) }));
    const shown = this.fields.filter((field) => !field.option);
    const folded = this.fields.filter((field) => field.option);
    const run = () => this.isRunning || onrun();
    const stop = (event) => {
      if (!this.isRunning) return;
      event.preventDefault(); // when the run ends at once, this click must not submit the form
      onstop();
    };
    this.run = el("button", { class: "primary", onclick: stop });
    this.options = el("details", { class: "options", open: entersRun && innerWidth > 860 }, el("summary", {}, "Options"), el("div", { class: "grid" }, folded.map(place)));
    // A browser cannot show what is invalid in a closed element.
    this.options.addEventListener("invalid", () => (this.options.open = true), { capture: true });
    this.node = el(
      "form",
      {
        class: "card form",
        "aria-label": `${task.name}: input`,
        autocomplete: "off",
        oninput: () => onchange(),
        onkeydown: (event) => {
          const inText = entersRun && event.target.name === "text" && !event.shiftKey;
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey || inText) && !event.isComposing) {
            event.preventDefault();
            event.currentTarget.requestSubmit(); // as the button does, with validation
          }
        },
        onsubmit: (event) => {
          event.preventDefault();
          run();
        },
      },
      el(
        "div",
        { class: "card-head" },
        el("h2", {}, "Input"),
        el(
          "div",
          { class: "samples", role: "group", "aria-label": "Examples" },
          task.samples.map((sample) =>
            el("button", { type: "button", class: "chip", onclick: () => (this.fill(sample), onchange()) }, sample.title),
          ),
        ),
      ),
      shown.map((field) => place(field)),
      el(
        "div",
        { class: "actions" },
        this.run,
        el("span", { class: "hint keys" }, entersRun ? "Enter sends, Shift+Enter starts a line" : "Ctrl+Enter"),
      ),
      folded.length > 0 && this.options,
    );
    this.fill(task.samples[0]);
    this.setRunning(false);
  }

  build({ name, kind, rows, choices, min, max, step, placeholder }) {
    const common = { id: `field-${name}`, name, placeholder };
    if (kind === "text" || kind === "lines") return el("textarea", { ...common, rows: rows ?? 5 });
    if (kind === "select") {
      return el("select", common, choices.map((choice) => el("option", { value: choice }, choice)));
    }
    if (kind === "check") return el("input", { ...common, type: "checkbox" });
    if (kind === "number") return el("input", { ...common, type: "number", min, max, step: step ?? 1 });
    return el("input", { ...common, type: "text" });
  }

  fill(sample) {
    for (const { name, control } of this.fields) {
      if (typeof sample[name] === "string") control.value = sample[name];
    }
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    this.run.textContent = isRunning ? "Stop" : this.action;
    this.run.type = isRunning ? "button" : "submit"; // Enter in a line presses a submit button
  }

  /**
   * Return the values without empty ones. Raises Error with the label of a field that is empty but
   * must not be. That field gets the focus.
   */
  read() {
    const values = {};
    for (const field of this.fields) {
      const value = valueOf(field);
      if (value !== undefined) values[field.name] = value;
      else if (!field.option) {
        field.control.focus();
        throw new Error(`“${field.label}” is empty.`);
      }
    }
    return values;
  }

  /** Return the values while the user fills in the form: fields that must not be empty may be. */
  readDraft() {
    const empty = ({ kind, option }) => (option ? undefined : kind === "lines" ? [] : "");
    const values = this.fields.map((field) => [field.name, valueOf(field) ?? empty(field)]);
    return Object.fromEntries(values.filter(([, value]) => value !== undefined));
  }
}

function valueOf({ kind, control }) {
  if (kind === "check") return control.checked || undefined;
  const text = control.value.trim();
  if (text === "") return undefined;
  if (kind === "text") return control.value; // a model reads the white space at the ends too
  if (kind === "number") return Number(text);
  return kind === "lines" ? text.split("\n").map((line) => line.trim()).filter(Boolean) : text;
}

function place({ label, hint, kind, control }) {
  if (kind !== "check") return labeled(label, control, hint);
  return el("label", { class: "check" }, control, el("span", {}, label));
}
