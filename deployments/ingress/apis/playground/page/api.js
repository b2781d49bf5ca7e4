// Requests to the server: keys, errors, times and streams.

/** Address of the server, without a slash at the end. It includes the route prefix. */
export const ROOT = new URL(".", document.baseURI).href.replace(/\/+$/, "");

const KEY = "hundredfold.key"; // in sessionStorage, which ends with the tab

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, body, headers) {
    super(messageOf(body) || `The server answered with status ${status}.`);
    this.status = status;
    this.field = body?.field ?? body?.error?.param ?? null;
    this.retryAfter = headers?.get("retry-after") ?? null;
  }
}

function messageOf(body) {
  const error = body?.error ?? body?.message;
  if (Array.isArray(error)) return error.join(" ");
  return typeof error === "object" && error ? error.message : error;
}

export class Unreachable extends Error {}

/** Await what comes from the network. Raises Unreachable for a lost connection, or AbortError. */
function receive(promise) {
  return promise.catch((error) => {
    throw error.name === "AbortError" ? error : new Unreachable(error.message);
  });
}

/** Send a request. Raises ApiError, Unreachable, or AbortError. */
async function send(path, { body, method, headers, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const init = {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers: sent,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  };
  const response = await receive(fetch(ROOT + path, init));
  if (!response.ok) {
    throw new ApiError(response.status, await response.json().catch(() => null), response.headers);
  }
  return response;
}

/** Return the value of a JSON answer, and its cost, which `readCost` reads from the headers. */
export async function request(path, options = {}) {
  const startedAt = performance.now();
  const response = await send(path, options);
  const value = JSON.parse(await receive(response.text()));
  return { value, cost: readCost(response.headers, elapsedOf(response.url, startedAt)) };
}

/** Milliseconds of the last request. The browser's network timing excludes delays by scripts. */
function elapsedOf(url, startedAt) {
  const elapsed = performance.now() - startedAt;
  const entry = performance.getEntriesByName(url).at(-1);
  performance.clearResourceTimings(); // the browser keeps 250 entries and ignores later ones
  return entry?.startTime >= startedAt && entry.responseEnd ? entry.responseEnd - entry.startTime : elapsed;
}

export async function get(path, signal) {
  return (await request(path, { signal })).value;
}

const MAX_LISTED = 200;

/** The models of the configuration, then the first further ones of the store. */
export async function listModels() {
  return (await get(`/v1/models?limit=${MAX_LISTED}`)).data;
}

/** Milliseconds of each phase, from `server-timing` and the clock of the browser. */
function readCost(headers, elapsed) {
  const server = {};
  for (const part of (headers.get("server-timing") ?? "").split(",")) {
    const match = /^\s*(\w+);dur=([\d.]+)/.exec(part);
    if (match) server[match[1]] = Number(match[2]);
  }
  const tokens = headers.get("x-compute-tokens");
  return {
    elapsed,
    phases: phasesOf(server, elapsed),
    cache: headers.get("x-cache"),
    compute: headers.get("x-compute-type"),
    fallback: headers.get("x-compute-fallback"),
    warning: headers.get("x-hf-warning"),
    version: headers.get("x-sha"),
    tokens: tokens === null ? null : Number(tokens),
  };
}

/** Split `elapsed` into phases. `wait` is the remaining time of the server. */
export function phasesOf(server, elapsed) {
  const known = {
    queue: server.queue ?? 0,
    tokenize: server.tokenization ?? 0,
    compute: server.forward ?? 0,
    prefill: server.prefill ?? 0,
    decode: server.decode ?? 0,
  };
  const explained = Object.values(known).reduce((sum, ms) => sum + ms, 0);
  const total = Math.max(server.total ?? explained, explained);
  const wait = total - explained;
  return { ...known, wait, network: Math.max(0, elapsed - total) };
}

/** Yield the headers of a stream, then its JSON events until `[DONE]`. */
export async function* stream(path, options) {
  const response = await send(path, options);
  yield { headers: response.headers };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    for (;;) {
      const { value, done } = await receive(reader.read());
      if (done) return;
      const events = (buffered + value).split("\n\n");
      buffered = events.pop();
      for (const event of events) {
        if (!event.startsWith("data:")) continue; // a comment that keeps the connection open
        const data = event.slice(5).trim();
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(parsed.error.code ?? 500, parsed, null);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return one or two sentences: what went wrong, and what the user can do. */
export function explain(error) {
  if (error instanceof Unreachable) return "The server cannot be reached. Is it running?";
  if (!(error instanceof ApiError)) {
    console.error(error);
    return `The page failed: ${error.message}`;
  }
  if (error.status === 401) return "This server wants an API key. Enter yours with the key button.";
  if (error.status === 403) return `The key does not permit this: ${error.message}`;
  if (error.status === 429 && error.retryAfter) {
    return `${error.message} Try again in ${error.retryAfter} s.`;
  }
  return error.message;
}
