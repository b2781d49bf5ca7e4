// Building nodes, and formatting of numbers. Text becomes text nodes only, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Build an element. Properties that start with `on` are listeners. False ones are omitted. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue; // `hidden: false`
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return node;
}

/** Set the share, 0 to 1, that a bar fills. The style sheet turns it into a width. */
export function fillBar(node, share) {
  node.style.setProperty("--share", String(Math.min(1, Math.max(0, share || 0))));
  return node;
}

export function bar(share, kind = "") {
  return fillBar(el("span", { class: `bar ${kind}`, "aria-hidden": "true" }), share);
}

let announced = 0;

/** Let screen readers read a text, also if it equals the previous text. */
export function announce(text) {
  announced += 1;
  document.querySelector("#announcer").textContent = text + (announced % 2 ? "" : "\u00a0");
}

export function milliseconds(ms) {
  if (!Number.isFinite(ms)) return "–";
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

export function bytes(count) {
  if (!Number.isFinite(count)) return "–";
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, count)) / 3));
  const scaled = count / 1000 ** power;
  return `${scaled >= 100 || !power ? scaled.toFixed(0) : scaled.toFixed(1)} ${["B", "kB", "MB", "GB"][power]}`;
}

export function decimal(value, digits = 3) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

export function percent(share, digits = 1) {
  return Number.isFinite(share) ? `${(share * 100).toFixed(digits)} %` : "–";
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Split by code points, because offsets of the server count code points, not UTF-16 units. */
export function characters(text) {
  return Array.from(text);
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
