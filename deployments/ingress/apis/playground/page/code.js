// The same request for a shell and for two clients in Python. Keys never appear: only $KEY.

import { ROOT } from "./api.js";
import { announce, el } from "./dom.js";

/** Format a value as a Python literal. */
function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

function call(name, given) {
  const lines = Object.entries(given).map(([key, value]) => `    ${key}=${python(value)},\n`);
  return `${name}(\n${lines.join("")})`;
}

function curl({ path, body, headers, stream }, hasKey) {
  const given = Object.entries(headers).map(([name, value]) => ` \\\n  -H '${name}: ${value}'`);
  const auth = hasKey ? ` \\\n  -H "authorization: Bearer $KEY"` : "";
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${stream ? "-N " : ""}${ROOT}${encodeURI(path)}${auth}${given.join("")} \\\n  -d '${json}'`;
}

function hub({ address, method, openaiCall, headers }, hasKey) {
  if (!method) return `# huggingface_hub has no method for this request; use ${openaiCall ? "openai" : "curl"}.`;
  const [name, given] = method;
  const auth = hasKey ? ', token=os.environ["KEY"]' : "";
  const extra = Object.keys(headers).length ? `, headers=${python(headers)}` : "";
  const loop = given.stream && CHAT_LOOP;
  return (
    `${hasKey ? "import os\n\n" : ""}from huggingface_hub import InferenceClient\n\n` +
    `client = InferenceClient(${python(ROOT + address)}${auth}${extra})\n` +
    `answer = ${call(`client.${name}`, given)}\n${loop || "print(answer)"}`
  );
}

function openai({ openaiCall, headers }, hasKey) {
  if (!openaiCall) return "# OpenAI's API has no such task; use curl or huggingface_hub.";
  const [name, given] = openaiCall;
  const auth = hasKey ? 'os.environ["KEY"]' : '"-"';
  const extra = Object.keys(headers).length ? `, default_headers=${python(headers)}` : "";
  const loop = given.stream && (name.startsWith("chat") ? CHAT_LOOP : COMPLETION_LOOP);
  return (
    `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url=${python(`${ROOT}/v1`)}, api_key=${auth}${extra})\n` +
    `answer = ${call(`client.${name}`, given)}\n${loop || "print(answer)"}`
  );
}

const CHAT_LOOP =
  "for chunk in answer:\n    if chunk.choices:\n" +
  '        print(chunk.choices[0].delta.content or "", end="", flush=True)';
const COMPLETION_LOOP =
  'for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].text, end="", flush=True)';

const LANGUAGES = { curl: ["curl", curl], hub: ["huggingface_hub", hub], openai: ["openai", openai] };

/** Tabs with the code of a request. `show` takes {path, body, headers, address, method, openaiCall}. */
export class CodePanel {
  constructor() {
    this.language = "curl";
    this.code = el("code");
    this.tabs = Object.entries(LANGUAGES).map(([id, [name]]) =>
      el(
        "button",
        {
          type: "button",
          role: "tab",
          id: `code-tab-${id}`,
          "aria-controls": "code-panel",
          onclick: () => this.select(id),
          onkeydown: (event) => this.move(event),
        },
        name,
      ),
    );
    this.node = el(
      "section",
      { class: "card code-card", "aria-labelledby": "code-title" },
      el(
        "div",
        { class: "card-head" },
        el("h2", { id: "code-title" }, "The same request as code"),
        el("button", { type: "button", class: "chip", onclick: () => this.copy() }, "Copy"),
        el("div", { role: "tablist", "aria-label": "Client", class: "tabs" }, this.tabs),
      ),
      el(
        "pre",
        { class: "code", id: "code-panel", role: "tabpanel", tabindex: "0", "aria-labelledby": "code-tab-curl" },
        this.code,
      ),
    );
    this.select("curl");
  }

  show(request, hasKey) {
    this.request = request;
    this.hasKey = hasKey;
    this.code.textContent = LANGUAGES[this.language][1](request, hasKey);
  }

  select(language) {
    this.language = language;
    for (const tab of this.tabs) {
      const chosen = tab.id === `code-tab-${language}`;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
    this.node.querySelector("#code-panel").setAttribute("aria-labelledby", `code-tab-${language}`);
    if (this.request) this.show(this.request, this.hasKey);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const names = Object.keys(LANGUAGES);
    const next = (names.indexOf(this.language) + step + names.length) % names.length;
    this.select(names[next]);
    this.tabs[next].focus();
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.code.textContent);
      announce("Copied");
    } catch {
      getSelection().selectAllChildren(this.code); // the clipboard needs a page with TLS
      announce("Selected: copy with the keyboard");
    }
  }
}
