// Controls that choose the model, the version and the hardware of a request.

import { el } from "./dom.js";
import { describeVersion, versionsOf } from "./versions.js";

const DIGITS = 6; // shown digits of a version whose description is next to it

let pickers = 0;

export class Picker {
  /** `onchange` is called after each change by the user. */
  constructor(name, onchange) {
    pickers += 1;
    this.id = `picker${pickers}`;
    this.onchange = onchange;
    const changed = () => {
      this.showVersions();
      onchange();
    };
    this.model = el("select", { id: `${this.id}-model`, onchange: changed });
    const changedVersion = () => {
      this.showHardware();
      onchange();
    };
    this.version = el("select", { id: `${this.id}-version`, onchange: changedVersion });
    this.versionField = labeled("Version", this.version);
    this.hardware = el("div", { class: "segmented", role: "radiogroup", "aria-label": "Hardware" });
    this.node = el(
      "div",
      { class: "picker", role: "group", "aria-label": name },
      labeled("Model", this.model),
      this.versionField,
      el("div", { class: "field" }, el("span", { class: "label", "aria-hidden": "true" }, "Hardware"), this.hardware),
    );
  }

  /** Offer `models`. Keep the chosen model if it is among them, else choose model `preferred`. */
  offer(models, preferred = 0) {
    const chosen = this.model.value;
    this.models = models;
    this.model.replaceChildren(
      ...models.map((model) =>
        el("option", { value: model.id }, model.state === "ready" ? model.id : `${model.id} (${model.state})`),
      ),
    );
    const kept = models.some((model) => model.id === chosen);
    this.model.value = kept ? chosen : models[Math.min(preferred, models.length - 1)].id;
    this.showVersions();
  }

  get chosen() {
    return this.models.find((model) => model.id === this.model.value);
  }

  /** The model name for requests. It has the version unless the default version is chosen. */
  get reference() {
    const { id } = this.chosen;
    return this.version.value ? `${id}@${this.version.value}` : id;
  }

  get device() {
    return this.hardware.querySelector("input:checked")?.value ?? "";
  }

  get headers() {
    return this.device ? { "x-hardware": this.device } : {};
  }

  get label() {
    const version = this.version.value && describeVersion(this.chosenVersion);
    return [this.chosen.id.replace(/^.*\//, ""), version, this.device].filter(Boolean).join(" · ");
  }

  get chosenVersion() {
    return this.versions.find((one) => one.version === this.version.value) ?? this.chosen;
  }

  showVersions() {
    const shown = this.chosen;
    this.offerVersions([]);
    versionsOf(shown).then((versions) => this.chosen === shown && this.offerVersions(versions));
  }

  /** Offer `versions` besides the default version. */
  offerVersions(versions) {
    this.versions = versions;
    this.version.replaceChildren(
      el("option", { value: "" }, `${nameVersion(this.chosen)} (default)`),
      ...versions.map((one) => el("option", { value: one.version }, nameVersion(one))),
    );
    this.versionField.hidden = versions.length === 0;
    this.showHardware();
  }

  /** Offer the hardware of the chosen version. Keep the chosen hardware if it is available. */
  showHardware() {
    const { devices } = this.chosenVersion;
    const kept = devices[this.device]?.available ? this.device : "";
    const choices = [["", "Auto", true], ...Object.entries(devices).map(deviceChoice)];
    this.hardware.replaceChildren(...choices.map((choice) => this.radio(kept, ...choice)));
  }

  radio(kept, value, name, available, title) {
    return el(
      "label",
      { title },
      el("input", {
        type: "radio",
        name: `${this.id}-hardware`,
        value,
        checked: value === kept,
        disabled: !available,
        onchange: () => this.onchange(),
      }),
      el("span", {}, name),
    );
  }
}

function nameVersion(facts) {
  return `${describeVersion(facts)} · ${facts.version.slice(0, DIGITS)}`;
}

function deviceChoice([device, { compute_type: compute, available }]) {
  const name = compute.replace("-", " ").replace(/^[a-z]+/, (word) => word.toUpperCase());
  return [device, name, available, available ? `Compute with ${compute}` : `This cluster has no ${device}`];
}

export function labeled(label, control, hint) {
  return el(
    "div",
    { class: "field" },
    el("label", { for: control.id }, label, hint && el("small", {}, ` ${hint}`)),
    control,
  );
}
