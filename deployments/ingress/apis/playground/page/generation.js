// Streamed requests to generative models, in the format of OpenAI's API.

import { phasesOf, stream } from "./api.js";
import { SCHEMA } from "./samples.js";

const SAMPLING = [
  { name: "max_tokens", label: "Tokens, at most", kind: "number", min: 1, placeholder: "256", option: true },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: "any", placeholder: "model's", option: true },
  { name: "top_p", label: "Top p", kind: "number", min: 0, max: 1, step: "any", placeholder: "model's", option: true },
  { name: "top_k", label: "Top k", kind: "number", min: 0, placeholder: "model's", option: true },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, max: 10, step: "any", placeholder: "model's", option: true },
  { name: "seed", label: "Seed", kind: "number", placeholder: "random", option: true },
  { name: "stop", label: "Stop strings", kind: "lines", rows: 2, hint: "one per line", option: true },
  { name: "schema", label: "JSON schema of the answer", kind: "text", rows: 4, option: true, placeholder: SCHEMA },
];

export const FIELDS = {
  chat: [
    { name: "text", label: "Message", kind: "text", rows: 4 },
    { name: "system", label: "System prompt", kind: "text", rows: 2, option: true, placeholder: "You answer briefly." },
    ...SAMPLING,
  ],
  completion: [{ name: "text", label: "Text to continue", kind: "text", rows: 6 }, ...SAMPLING],
};

const DEFAULT_MAX_TOKENS = 256;

// Options of the server that are no arguments of the Python clients.
const EXTRA = {
  chat: ["top_k", "repetition_penalty"],
  completion: ["top_k", "repetition_penalty", "response_format"],
};

/** Build the request for the next message. `history` has the earlier messages. */
export function buildRequest(mode, { text, system, schema, ...sampling }, history, reference, headers) {
  const format = schema && {
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: parseSchema(schema) } },
  };
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...history,
    { role: "user", content: text },
  ];
  const isChat = mode === "chat";
  const prompt = isChat ? { messages } : { prompt: text };
  const options = { max_tokens: DEFAULT_MAX_TOKENS, ...sampling, ...format };
  const given = { ...prompt, ...toArguments(mode, options), stream: true };
  return {
    path: isChat ? "/v1/chat/completions" : "/v1/completions",
    body: { model: reference, ...prompt, ...options, stream: true, stream_options: { include_usage: true } },
    headers,
    stream: true,
    address: `/models/${reference}/v1`,
    // `text_generation` of huggingface_hub calls another API, which ignores the sampling defaults of
    // the model and returns stop strings.
    method: isChat ? ["chat_completion", given] : null,
    openaiCall: [isChat ? "chat.completions.create" : "completions.create", { model: reference, ...given }],
  };
}

function parseSchema(schema) {
  try {
    return JSON.parse(schema);
  } catch (error) {
    throw new Error(`The JSON schema is not valid JSON: ${error.message}`);
  }
}

/** Arguments of the Python clients. `extra_body` has the options that they do not know. */
function toArguments(mode, options) {
  const { known, extra = [] } = Object.groupBy(Object.entries(options), ([name]) =>
    EXTRA[mode].includes(name) ? "extra" : "known",
  );
  return { ...Object.fromEntries(known), ...(extra.length && { extra_body: Object.fromEntries(extra) }) };
}

/**
 * Run a request. Call `ontext` with each piece of text, and `onreasoning` with each piece of the
 * reasoning before it. Returns {text, reason, cost}.
 */
export async function generate(request, signal, ontext, onreasoning) {
  const startedAt = performance.now();
  const seen = { text: "", pieces: 0, firstAt: null, lastAt: startedAt, usage: null, timings: null };
  const result = { reason: null, headers: null };
  try {
    const events = stream(request.path, {
      body: request.body,
      headers: { ...request.headers, "x-wait-for-model": "true" },
      signal,
    });
    for await (const event of events) {
      if (event.headers) result.headers = event.headers;
      else read(event, seen, result, ontext, onreasoning);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    result.reason = "stopped";
  }
  return { text: seen.text, reason: result.reason, cost: costOf(seen, result.headers, startedAt) };
}

function read(event, seen, result, ontext, onreasoning) {
  if (event.usage) {
    seen.usage = event.usage;
    seen.timings = event.timings;
  }
  seen.version = event.system_fingerprint;
  const choice = event.choices[0];
  if (!choice) return;
  const reasoning = choice.delta?.reasoning_content ?? "";
  const piece = choice.delta?.content ?? choice.text ?? "";
  if (reasoning || piece) {
    seen.lastAt = performance.now();
    seen.firstAt ??= seen.lastAt;
    seen.pieces += 1;
  }
  if (reasoning) onreasoning(reasoning);
  if (piece) {
    seen.text += piece;
    ontext(piece);
  }
  result.reason = choice.finish_reason ?? result.reason;
}

function costOf(seen, headers, startedAt) {
  const elapsed = performance.now() - startedAt;
  const tokens = seen.usage?.completion_tokens ?? seen.pieces;
  const writing = (seen.lastAt - (seen.firstAt ?? seen.lastAt)) / 1000;
  const { tokenize_ms: tokenization, queue_ms: queue, prefill_ms: prefill, decode_ms: decode } = seen.timings ?? {};
  const cached = seen.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const phases = seen.timings
    ? phasesOf({ tokenization, queue, prefill, decode }, elapsed)
    : phasesOf({ prefill: (seen.firstAt ?? startedAt) - startedAt, decode: writing * 1000 }, elapsed);
  return {
    elapsed,
    phases,
    cache: seen.usage && (cached ? `${cached} of ${seen.usage.prompt_tokens} prompt tokens` : "no prompt token"),
    compute: headers?.get("x-compute-type") ?? null,
    fallback: headers?.get("x-compute-fallback") ?? null,
    warning: null,
    version: seen.version,
    tokens,
    rate: tokens > 1 && writing > 0 ? (tokens - 1) / writing : null,
    firstToken: seen.firstAt && seen.firstAt - startedAt,
  };
}
