// Plots as SVG or tables: map of vectors, similarity matrix, line charts.

import { characters, decimal, el, svg } from "./dom.js";

export const MAX_MAP_POINTS = 200;
export const MAX_MATRIX_TEXTS = 40;
const NAMED = 18; // number of characters of a text in a label

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i += 1) sum += a[i] * b[i];
  return sum;
}

export function cosine(a, b) {
  return dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);
}

/** The two principal components of the rows: one [x, y] per row, by power iteration. */
export function project(rows) {
  const width = rows[0].length;
  const mean = Array.from({ length: width }, (_, i) => rows.reduce((s, r) => s + r[i], 0) / rows.length);
  const centered = rows.map((row) => row.map((value, i) => value - mean[i]));
  const gram = centered.map((a) => centered.map((b) => dot(a, b)));
  const axes = [];
  for (let axis = 0; axis < 2; axis += 1) {
    // Start vector that is no eigenvector and the same in every run.
    let vector = gram.map((_, i) => Math.cos(1 + 2 * i + axis));
    let size = 0;
    for (let step = 0; step < 100; step += 1) {
      let next = gram.map((row) => dot(row, vector));
      for (const other of axes) {
        const share = dot(next, other.vector);
        next = next.map((value, i) => value - share * other.vector[i]);
      }
      size = Math.sqrt(dot(next, next));
      if (size < 1e-12) break;
      vector = next.map((value) => value / size);
    }
    axes.push({ vector, scale: Math.sqrt(size) });
  }
  return rows.map((_, i) => axes.map(({ vector, scale }) => vector[i] * scale));
}

export function shorten(text, limit = NAMED) {
  const letters = characters(text);
  return letters.length > limit ? `${letters.slice(0, limit - 1).join("")}…` : text;
}

/** Return the heights of labels. A label that would cover the label above it moves down. */
function spread(placed) {
  const heights = placed.map(([, y]) => y);
  const order = heights.map((_, i) => i).sort((a, b) => heights[a] - heights[b]);
  order.forEach((i, rank) => {
    for (const above of order.slice(0, rank)) {
      const near = Math.abs(placed[above][0] - placed[i][0]) < 150;
      if (near && heights[i] - heights[above] < 12) heights[i] = heights[above] + 12;
    }
  });
  return heights;
}

/**
 * A map with a point for each of the first MAX_MAP_POINTS texts. Texts with similar vectors are
 * close to each other.
 */
export function vectorMap(rows, texts) {
  const points = project(rows.slice(0, MAX_MAP_POINTS));
  const reach = Math.max(...points.flat().map(Math.abs)) || 1;
  const placed = points.map(([x, y]) => [260 + (x / reach) * 190, 150 - (y / reach) * 125]);
  const heights = spread(placed);
  const dots = placed.map(([x, y], i) => {
    const leftward = x > 330;
    return svg(
      "g",
      {},
      svg("circle", { cx: x, cy: y, r: 5, class: "point" }),
      svg(
        "text",
        { x: leftward ? x - 9 : x + 9, y: heights[i] + 4, "text-anchor": leftward ? "end" : "start" },
        `${i + 1} ${shorten(texts[i], 24)}`,
      ),
      svg("title", {}, texts[i]),
    );
  });
  return svg(
    "svg",
    {
      viewBox: "0 0 520 300",
      class: "map",
      role: "img",
      "aria-label": `Map of ${points.length} texts by their two principal components.`,
    },
    svg("line", { x1: 20, x2: 500, y1: 150, y2: 150, class: "axis" }),
    svg("line", { x1: 260, x2: 260, y1: 10, y2: 290, class: "axis" }),
    dots,
  );
}

/** A table of the cosines between the first MAX_MATRIX_TEXTS texts, shaded by value. */
export function similarityMatrix(allRows, texts) {
  const rows = allRows.slice(0, MAX_MATRIX_TEXTS);
  const numbers = rows.map((_, i) => i + 1);
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Similarity matrix" },
    el(
      "table",
      { class: "matrix" },
      el("caption", {}, "Cosine similarity"),
      el("thead", {}, el("tr", {}, el("td"), numbers.map((n) => el("th", { scope: "col" }, String(n))))),
      el(
        "tbody",
        {},
        rows.map((a, i) =>
          el(
            "tr",
            {},
            el("th", { scope: "row", title: texts[i] }, `${i + 1} ${shorten(texts[i], rows.length > 5 ? 13 : 22)}`),
            rows.map((b) => {
              const value = cosine(a, b);
              const cell = el("td", {}, decimal(value, 2));
              cell.style.setProperty("--share", String(Math.max(0, value)));
              return cell;
            }),
          ),
        ),
      ),
    ),
  );
}

/** Lines over a common x axis: [{name, points: [[x, y], …]}]. Lines differ in color and marker. */
export function lineChart(series, { xLabel, yLabel, label }) {
  const xs = series.flatMap((line) => line.points.map(([x]) => x));
  const ys = series.flatMap((line) => line.points.map(([, y]) => y));
  const [low, high, top] = [Math.min(...xs), Math.max(...xs), Math.max(...ys) * 1.1 || 1];
  const place = ([x, y]) => [
    50 + ((Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low) || 1)) * 380,
    210 - (y / top) * 190,
  ];
  const ticks = [...new Set(xs)].sort((a, b) => a - b);
  return svg(
    "svg",
    { viewBox: "0 0 620 260", class: "chart", role: "img", "aria-label": label },
    [0, 0.5, 1].map((share) => {
      const [, y] = place([low, share * top]);
      return [
        svg("line", { x1: 50, x2: 430, y1: y, y2: y, class: "axis" }),
        svg("text", { x: 44, y: y + 4, "text-anchor": "end" }, (share * top).toPrecision(2)),
      ];
    }),
    ticks.map((x) => svg("text", { x: place([x, 0])[0], y: 228, "text-anchor": "middle" }, String(x))),
    svg("text", { x: 240, y: 250, "text-anchor": "middle" }, xLabel),
    svg("text", { x: 50, y: 12 }, yLabel),
    series.map((line, i) => {
      const placed = line.points.map(place);
      return [
        svg("polyline", { points: placed.map((p) => p.join(",")).join(" "), class: `line hue${i % 8}` }),
        placed.map(([x, y]) => marker(i, x, y)),
        marker(i, 450, 24 + i * 22),
        svg("text", { x: 462, y: 28 + i * 22 }, shorten(line.name, 24)),
      ];
    }),
  );
}

function marker(index, x, y) {
  const style = { class: `marker hue${index % 8}` };
  if (index % 3 === 0) return svg("circle", { cx: x, cy: y, r: 4, ...style });
  if (index % 3 === 1) return svg("rect", { x: x - 4, y: y - 4, width: 8, height: 8, ...style });
  return svg("path", { d: `M${x} ${y - 5}L${x + 5} ${y + 4}H${x - 5}Z`, ...style });
}

/** A line without axes through the last values of a figure. A value of null leaves a gap. */
export class Sparkline {
  constructor(label) {
    this.line = svg("polyline", { class: "line hue0" });
    this.node = svg(
      "svg",
      { viewBox: "0 0 120 32", class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("title", {}, label),
      this.line,
    );
  }

  draw(values) {
    const top = Math.max(...values, 1e-9);
    const step = 120 / Math.max(1, values.length - 1);
    const points = values.map((value, i) => `${(i * step).toFixed(1)},${(30 - (value / top) * 28).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
  }
}
