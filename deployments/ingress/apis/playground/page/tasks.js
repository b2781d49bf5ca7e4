// Table of the tasks: form fields, request body, rendering of an answer, difference of two answers.
// A task that is missing here gets a form for JSON.

import * as answers from "./answers.js";
import { decimal, percent } from "./dom.js";
import { cosine } from "./plots.js";
import * as samples from "./samples.js";

const text = { name: "text", label: "Text", kind: "text" };

/** `python` is the call with huggingface_hub; null if it has no method for the task. */
export const TASKS = {
  "question-answering": {
    name: "Question answering",
    about: "Finds the answer to a question inside a text.",
    action: "Ask",
    samples: samples.QUESTIONS,
    fields: [
      { name: "question", label: "Question", kind: "line" },
      { name: "context", label: "Text with the answer", kind: "text", rows: 8 },
      { name: "top_k", label: "Answers", kind: "number", min: 1, max: 20, option: true },
      { name: "handle_impossible_answer", label: "Allow “no answer”", kind: "check", option: true },
    ],
    body: ({ question, context, ...parameters }) => ({ inputs: { question, context }, parameters }),
    python: ({ question, context, ...rest }) => ["question_answering", { question, context, ...rest }],
    render: answers.answerSpan,
    difference: (a, b) => spanDifference([a].flat()[0], [b].flat()[0]),
  },
  "text-classification": {
    name: "Text classification",
    about: "Sorts a text into one of the labels that the model has learned.",
    action: "Classify",
    samples: samples.FILMS,
    fields: [{ ...text, rows: 4 }, { name: "top_k", label: "Labels", kind: "number", min: 1, option: true }],
    body: ({ text: inputs, ...parameters }) => ({ inputs, parameters }),
    python: ({ text: inputs, ...rest }) => ["text_classification", { text: inputs, ...rest }],
    render: answers.labels,
    difference: (a, b) => labelDifference([a].flat(2), [b].flat(2)),
  },
  "zero-shot-classification": {
    name: "Zero-shot classification",
    about: "Sorts a text into labels of your own, without training.",
    action: "Classify",
    samples: samples.TOPICS,
    fields: [
      { ...text, rows: 4 },
      { name: "labels", label: "Labels", kind: "lines", hint: "one per line" },
      { name: "multi_label", label: "Several may be true", kind: "check", option: true },
    ],
    body: ({ text: inputs, labels, ...rest }) => ({ inputs, parameters: { candidate_labels: labels, ...rest } }),
    python: ({ text: inputs, labels, ...rest }) => [
      "zero_shot_classification",
      { text: inputs, candidate_labels: labels, ...rest },
    ],
    render: answers.labels,
    difference: labelDifference,
  },
  "token-classification": {
    name: "Entities",
    about: "Finds names of people, places and organizations in a text.",
    action: "Find",
    samples: samples.ENTITIES,
    fields: [
      { ...text, rows: 6 },
      {
        name: "aggregation_strategy",
        label: "Join tokens",
        kind: "select",
        choices: ["simple", "first", "average", "max", "none"],
        option: true,
      },
    ],
    body: ({ text: inputs, aggregation_strategy: strategy }) => ({
      inputs,
      parameters: { aggregation_strategy: strategy ?? "simple" },
    }),
    python: ({ text: inputs, aggregation_strategy: strategy }) => [
      "token_classification",
      { text: inputs, aggregation_strategy: strategy ?? "simple" },
    ],
    render: answers.entities,
    difference: (a, b) => setDifference(a.map((e) => e.word), b.map((e) => e.word), "entity", "entities"),
  },
  "fill-mask": {
    name: "Fill the mask",
    about: "Proposes words for a gap in a sentence.",
    action: "Fill",
    samples: samples.MASKED,
    fields: [
      { ...text, rows: 3, hint: "with the mask token of the model, such as [MASK]" },
      { name: "top_k", label: "Candidates", kind: "number", min: 1, max: 50, option: true },
    ],
    body: ({ text: inputs, ...parameters }) => ({ inputs, parameters }),
    python: ({ text: inputs, ...rest }) => ["fill_mask", { text: inputs, ...rest }],
    render: answers.masks,
    difference: (a, b) => setDifference(words(a), words(b), "candidate", "candidates"),
  },
  "sentence-similarity": {
    name: "Similarity",
    about: "Compares the meaning of one sentence with that of others.",
    action: "Compare",
    samples: samples.SENTENCES,
    fields: [
      { name: "source", label: "Sentence", kind: "line" },
      { name: "sentences", label: "Others", kind: "lines", hint: "one per line", rows: 6 },
    ],
    body: ({ source, sentences }) => ({ inputs: { source_sentence: source, sentences } }),
    python: ({ source, sentences }) => ["sentence_similarity", { sentence: source, other_sentences: sentences }],
    render: answers.similarities,
    difference: scoresDifference,
  },
  "text-ranking": {
    name: "Reranking",
    about: "Orders texts by how well they answer a query.",
    action: "Rank",
    samples: samples.RANKED,
    fields: [
      { name: "query", label: "Query", kind: "line" },
      { name: "texts", label: "Texts", kind: "lines", hint: "one per line", rows: 6 },
    ],
    body: ({ query, texts }) => ({ inputs: { query, texts } }),
    python: null,
    render: answers.ranking,
    difference: (a, b) => {
      const order = (value) => [...value].sort((x, y) => y.score - x.score).map((row) => row.index + 1);
      const [left, right] = [order(a).join(" "), order(b).join(" ")];
      return left === right ? "Same order" : `Order ${left} against ${right}`;
    },
  },
  "feature-extraction": {
    name: "Embeddings",
    about: "Turns texts into vectors; similar meanings are near each other.",
    action: "Embed",
    wide: true,
    samples: samples.TEXTS,
    fields: [
      { name: "texts", label: "Texts", kind: "lines", hint: "one per line", rows: 9 },
      { name: "dimensions", label: "Dimensions", kind: "number", min: 1, option: true },
    ],
    body: ({ texts: inputs, ...parameters }) => ({ inputs, parameters }),
    python: ({ texts: inputs, ...rest }) => ["feature_extraction", { text: inputs, ...rest }],
    openai: ({ texts: input, ...rest }) => ["embeddings.create", { input, ...rest }],
    render: answers.vectors,
    difference: (a, b) => {
      if (a[0].length !== b[0].length) return `Vectors of ${a[0].length} and ${b[0].length} numbers`;
      const cosines = a.map((row, i) => cosine(row, b[i]));
      return `Cosine between both: lowest ${decimal(Math.min(...cosines), 4)}`;
    },
  },
  "token-embeddings": {
    name: "Token embeddings",
    about: "One vector per token of a text.",
    action: "Embed",
    samples: samples.PASSAGES.slice(-1).map(({ title, text: texts }) => ({ title, texts })),
    fields: [{ name: "texts", label: "Texts", kind: "lines", hint: "one per line" }],
    body: ({ texts: inputs }) => ({ inputs }),
    python: null,
    render: answers.tokenVectors,
    difference: (a, b) => `${a.flat().length} and ${b.flat().length} tokens`,
  },
  "sparse-embeddings": {
    name: "Sparse embeddings",
    about: "Weighs the tokens of the vocabulary for a text, for search by words and their relatives.",
    action: "Embed",
    samples: samples.PASSAGES.slice(-1).map(({ title, text: texts }) => ({ title, texts })),
    fields: [{ name: "texts", label: "Texts", kind: "lines", hint: "one per line" }],
    body: ({ texts: inputs }) => ({ inputs }),
    python: null,
    render: answers.sparseVectors,
    difference: (a, b) => `${countWeights(a)} and ${countWeights(b)} weights`,
  },
  summarization: generating("Summary", "Shortens a text to its main points.", "Summarize", "summarization"),
  translation: {
    ...generating("Translation", "Translates a text.", "Translate", "translation"),
    languages: true,
  },
  "text2text-generation": generating("Text to text", "Rewrites a text as the model was trained.", "Rewrite", null),
};

/** Modes of generative models, by OpenAI's API. generation.js has their form fields. */
export const CHATS = {
  chat: {
    name: "Chat",
    about: "Talks with a model, token by token.",
    action: "Send",
    samples: samples.CHATS,
  },
  completion: {
    name: "Completion",
    about: "Continues a text, token by token.",
    action: "Continue",
    samples: samples.OPENINGS,
  },
};

export function taskNames(model) {
  return (model.tasks ?? []).flatMap((task) => (task === "text-generation" ? Object.keys(CHATS) : [task]));
}

export function describe(task) {
  return TASKS[task] ?? CHATS[task] ?? unknownTask(task);
}

function unknownTask(name) {
  return {
    name,
    about: "This page has no form for the task: write the body as JSON.",
    action: "Run",
    samples: [{ title: "Empty", json: '{"inputs": ""}' }],
    fields: [{ name: "json", label: "Body", kind: "text", rows: 8 }],
    body: ({ json }) => JSON.parse(json),
    python: null,
    render: answers.json,
    difference: (a, b) => (JSON.stringify(a) === JSON.stringify(b) ? "Equal" : "Different"),
  };
}

function generating(name, about, action, method) {
  return {
    name,
    about,
    action,
    samples: samples.PASSAGES,
    fields: [
      { ...text, rows: 8 },
      { name: "max_new_tokens", label: "Longest answer, tokens", kind: "number", min: 1, option: true },
      { name: "num_beams", label: "Beams", kind: "number", min: 1, max: 8, option: true },
    ],
    body: ({ text: inputs, ...parameters }) => ({ inputs, parameters }),
    python:
      method &&
      (({ text: inputs, src_lang, tgt_lang, ...rest }) => [
        method,
        {
          text: inputs,
          ...(src_lang && { src_lang, tgt_lang }),
          ...(Object.keys(rest).length > 0 && { generate_parameters: rest }),
        },
      ]),
    render: answers.generatedText,
    difference: (a, b) => (JSON.stringify(a) === JSON.stringify(b) ? "Same text" : "Different texts"),
  };
}

function spanDifference(a, b) {
  const delta = `confidence ${percent(a.score)} and ${percent(b.score)}`;
  return a.answer === b.answer ? `Same answer, ${delta}` : `“${a.answer}” against “${b.answer}”, ${delta}`;
}

function labelDifference(a, b) {
  const largest = Math.max(
    ...a.map((row) => Math.abs(row.score - (b.find((other) => other.label === row.label)?.score ?? 0))),
  );
  const same = a[0].label === b[0].label;
  return `${same ? "Same best label" : `${a[0].label} against ${b[0].label}`}; scores differ by ${percent(largest, 2)} at most`;
}

function scoresDifference(a, b) {
  return `Scores differ by ${decimal(Math.max(...a.map((score, i) => Math.abs(score - b[i]))), 4)} at most`;
}

function setDifference(a, b, one, many) {
  const only = [...a.filter((word) => !b.includes(word)), ...b.filter((word) => !a.includes(word))];
  return only.length ? `${only.length} ${only.length === 1 ? one : many} in one answer only` : `Same ${many}`;
}

function words(value) {
  return [value].flat(2).map((row) => row.token_str);
}

function countWeights(vectors) {
  return vectors.reduce((sum, { indices }) => sum + indices.length, 0);
}
