// Controls that choose the model, the version and the hardware of a request.

import { el } from "./dom.js";
import { describeVersion, versionsOf } from "./versions.js";

const LANGUAGES = [["src_lang", "From"], ["tgt_lang", "To"]]; // [parameter, label]
const DIGITS = 6; // shown digits of a version whose description is next to it

let pickers = 0;

export class Picker {
  /** `onchange` is called after each change by the user. */
  constructor(name, onchange, { choosesLanguages = false } = {}) {
    pickers += 1;
    this.id = `picker${pickers}`;
    this.onchange = onchange;
    const changed = () => {
      this.showVersions();
      this.showLanguages();
      onchange();
    };
    this.model = el("select", { id: `${this.id}-model`, onchange: changed });
    const changedVersion = () => {
      this.showHardware();
      onchange();
    };
    this.version = el("select", { id: `${this.id}-version`, onchange: changedVersion });
    this.versionField = labeled("Version", this.version);
    this.wanted = {}; // languages that the user has chosen
    const changedLanguages = () => {
      this.wanted = this.languages;
      onchange();
    };
    this.languageFields = (choosesLanguages ? LANGUAGES : []).map(([parameter, label]) => {
      const select = el("select", { id: `${this.id}-${parameter}`, onchange: changedLanguages });
      return { parameter, select, node: labeled(label, select) };
    });
    this.hardware = el("div", { class: "segmented", role: "radiogroup", "aria-label": "Hardware" });
    this.node = el(
      "div",
      { class: "picker", role: "group", "aria-label": name },
      labeled("Model", this.model),
      this.versionField,
      this.languageFields.map(({ node }) => node),
      el("div", { class: "field" }, el("span", { class: "label", "aria-hidden": "true" }, "Hardware"), this.hardware),
    );
  }

  /**
   * Offer `models`. Keep the chosen model, with its version, hardware and languages, if it is among
   * them. Choose model `preferred` if it is not.
   */
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
    this.showVersions(kept ? this.versions : []);
    this.showLanguages();
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

  /** Offer the versions of the chosen model. Until the server has listed them, offer `known`. */
  showVersions(known = []) {
    const shown = this.chosen;
    this.offerVersions(known);
    versionsOf(shown).then((versions) => this.chosen === shown && this.offerVersions(versions));
  }

  /** Offer `versions` besides the default version. Keep the chosen one if it is among them. */
  offerVersions(versions) {
    const kept = versions.some((one) => one.version === this.version.value) ? this.version.value : "";
    this.versions = versions;
    this.version.replaceChildren(
      el("option", { value: "" }, `${nameVersion(this.chosen)} (default)`),
      ...versions.map((one) => el("option", { value: one.version }, nameVersion(one))),
    );
    this.version.value = kept;
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

  /** Parameters for the languages; none if the chosen model has no language codes. */
  get languages() {
    const chosen = this.languageFields.map(({ parameter, select }) => [parameter, select.value]);
    return Object.fromEntries(chosen.filter(([, code]) => code));
  }

  /** Offer the languages of the chosen model. Choose the wanted ones if it knows both. */
  showLanguages() {
    const codes = this.chosen.languages ?? [];
    this.languageFields.forEach(({ select, node }, i) => {
      select.replaceChildren(...codes.map((code) => el("option", { value: code, selected: code === codes[i] }, code)));
      node.hidden = codes.length === 0;
    });
    this.chooseLanguages(this.wanted);
  }

  /** Choose `languages` in this model, and in models chosen later, if the model knows both. */
  chooseLanguages(languages) {
    const codes = this.chosen.languages ?? [];
    this.wanted = languages;
    if (!this.languageFields.every(({ parameter }) => codes.includes(languages[parameter]))) return;
    this.languageFields.forEach(({ parameter, select }) => (select.value = languages[parameter]));
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
