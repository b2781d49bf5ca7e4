// Functions that render the answer of a task as DOM nodes.

import { bar, characters, decimal, el, percent, plural } from "./dom.js";
import { MAX_MAP_POINTS, MAX_MATRIX_TEXTS, similarityMatrix, vectorMap } from "./plots.js";

const HUES = 8;
const MAX_TOKEN_MAPS = 8;
const MAX_WEIGHTS = 20;

/** A list of rows with label, bar and score. If `ranked`, the first row is marked as the best. */
export function scoreList(rows, { top = Infinity, digits = 1, name = "Scores", ranked = true } = {}) {
  const shown = rows.slice(0, top);
  const largest = Math.max(...rows.map((row) => Math.abs(row.score)), 1e-9);
  return el(
    "ol",
    { class: "scores", "aria-label": name },
    shown.map((row, i) =>
      el(
        "li",
        { class: i || !ranked ? "" : "best" },
        el("span", { class: "score-label" }, row.label),
        el("span", { class: "score-value" }, row.text ?? percent(row.score, digits)),
        bar(row.share ?? row.score / Math.max(1, largest)),
      ),
    ),
  );
}

function note(...content) {
  return el("p", { class: "note" }, ...content);
}

export function labels(value) {
  const rows = Array.isArray(value[0]) ? value[0] : value;
  return scoreList(rows, { top: 12, name: "Labels" });
}

export function answerSpan(value, { context }) {
  const spans = Array.isArray(value) ? value : [value];
  const [best, ...others] = spans;
  if (!best.answer) {
    return el("div", {}, el("p", { class: "headline" }, "No answer in this text"), note(`Score ${percent(best.score)}`));
  }
  return el(
    "div",
    {},
    el("p", { class: "headline" }, best.answer),
    scoreList([{ label: "Confidence", score: best.score }], { name: "Confidence" }),
    el("p", { class: "passage", "aria-label": "Context with the answer marked" }, mark(context, best)),
    others.length > 0 && [
      note("Other answers"),
      scoreList(others.map((span) => ({ label: span.answer, score: span.score })), { name: "Other answers" }),
    ],
  );
}

/** The context with `span` marked. Positions count code points. */
export function mark(context, span) {
  const letters = characters(context);
  const cut = (from, to) => letters.slice(from, to).join("");
  return [cut(0, span.start), el("mark", {}, cut(span.start, span.end)), cut(span.end)];
}

export function entities(value, { text }) {
  const found = Array.isArray(value[0]) ? value[0] : value;
  const letters = characters(text);
  const hues = new Map();
  const hue = (name) => {
    const kind = name.replace(/^[BI]-/, "");
    if (!hues.has(kind)) hues.set(kind, hues.size % HUES);
    return `hue${hues.get(kind)}`;
  };
  const parts = [];
  let position = 0;
  for (const entity of [...found].sort((a, b) => a.start - b.start)) {
    if (entity.start < position) continue; // overlaps the previous entity
    const label = entity.entity_group ?? entity.entity;
    parts.push(letters.slice(position, entity.start).join(""));
    parts.push(
      el(
        "span",
        { class: `entity ${hue(label)}`, title: percent(entity.score) },
        letters.slice(entity.start, entity.end).join(""),
        el("small", {}, label),
      ),
    );
    position = entity.end;
  }
  parts.push(letters.slice(position).join(""));
  const rows = found.map((entity) => ({
    label: `${entity.word} · ${entity.entity_group ?? entity.entity}`,
    score: entity.score,
  }));
  return el(
    "div",
    {},
    el("p", { class: "passage entities" }, parts),
    found.length ? scoreList(rows, { top: 20, name: "Entities" }) : note("No entity found."),
  );
}

export function masks(value) {
  const groups = Array.isArray(value[0]) ? value : [value];
  return el(
    "div",
    {},
    groups.map((group, i) => [
      groups.length > 1 && note(`Mask ${i + 1}`),
      scoreList(
        group.map((row) => ({ label: row.token_str, score: row.score })),
        { name: "Candidates for the mask" },
      ),
      group[0] && el("p", { class: "passage" }, group[0].sequence),
    ]),
  );
}

export function similarities(value, { sentences }) {
  const rows = value.map((score, i) => ({ label: sentences[i], score, text: decimal(score) }));
  return scoreList(rows.sort((a, b) => b.score - a.score), { name: "Similarity, highest first" });
}

export function ranking(value, { texts }) {
  const sorted = [...value].sort((a, b) => b.score - a.score);
  const scores = sorted.map((row) => row.score);
  const [low, high] = [Math.min(...scores, 0), Math.max(...scores, 1e-9)];
  const rows = sorted.map((row) => ({
    label: `${texts[row.index]}`,
    score: row.score,
    text: decimal(row.score),
    share: (row.score - low) / (high - low || 1),
  }));
  return scoreList(rows, { name: "Most relevant first" });
}

export function vectors(value, { texts }) {
  if (value.length < 2) {
    return el("div", {}, note(`One vector of ${value[0].length} numbers. Add a second text for a map.`), numbers(value[0]));
  }
  return el(
    "div",
    {},
    note(`${plural(value.length, "vector")} of ${value[0].length} numbers. Near points have similar meanings.`),
    value.length > MAX_MATRIX_TEXTS && note(describeLimits(value.length)),
    vectorMap(value, texts),
    similarityMatrix(value, texts),
  );
}

function describeLimits(count) {
  const matrix = `the matrix the first ${MAX_MATRIX_TEXTS}.`;
  return count > MAX_MAP_POINTS
    ? `The map shows the first ${MAX_MAP_POINTS} texts, ${matrix}`
    : `The map shows all texts, ${matrix}`;
}

function numbers(row) {
  return el("p", { class: "passage mono" }, row.slice(0, 24).map((v) => v.toFixed(4)).join("  "), " …");
}

export function tokenVectors(value, { texts }) {
  return el(
    "div",
    {},
    value.length > MAX_TOKEN_MAPS && note(`Maps are drawn for the first ${MAX_TOKEN_MAPS} texts.`),
    value.map((rows, i) => [
      note(`“${texts[i]}”: ${plural(rows.length, "token")}, each a vector of ${rows[0].length} numbers.`),
      i < MAX_TOKEN_MAPS && rows.length > 1 && tokenMap(rows),
    ]),
  );
}

export function sparseVectors(value, { texts }) {
  return el(
    "div",
    {},
    value.map(({ indices, values }, i) => [
      note(`“${texts[i]}”: ${plural(indices.length, "token")} of the vocabulary have a weight.`),
      scoreList(
        indices
          .map((id, at) => ({ label: `token ${id}`, score: values[at], text: decimal(values[at]) }))
          .sort((a, b) => b.score - a.score),
        { top: MAX_WEIGHTS, name: "Weights, highest first" },
      ),
    ]),
  );
}

function tokenMap(rows) {
  const map = vectorMap(rows, rows.map((_, i) => `token ${i + 1}`));
  return rows.length > MAX_MAP_POINTS ? [note(`The map shows the first ${MAX_MAP_POINTS} tokens.`), map] : map;
}

export function generatedText(value) {
  const rows = Array.isArray(value) ? value.flat() : [value];
  return el(
    "div",
    {},
    rows.map((row) =>
      el("p", { class: "passage large" }, row.summary_text ?? row.translation_text ?? row.generated_text ?? ""),
    ),
  );
}

export function json(value) {
  const text = JSON.stringify(value, null, 2);
  return el(
    "pre",
    { class: "code", tabindex: "0" },
    text.length > 20_000 ? `${text.slice(0, 20_000)}\n… ${text.length} characters in all` : text,
  );
}
