"""Evaluation of candidates and the reference model on labeled data, with the metrics of a task.

`load_evaluation` reads a file into an Evaluation: the items for an engine and the scoring of its
outputs. Files are UTF-8; empty lines are ignored. If the table states no file format for a task, a
file that ends in .jsonl, .ndjson or .json holds one JSON object per line. Any other file then holds
tab-separated columns without quoting; a header line is optional, and columns with unknown names are
ignored. `text_pair` is optional.

    task                  columns or keys                         metrics; the gate uses the first
    feature-extraction    sentence1, sentence2, score             spearman of the similarity
    sentence-similarity   the same                                the same
    sparse-embeddings     the same                                the same
    text-classification   text, label (text_pair)                 accuracy, macro_f1
      several labels      text, labels (a,b or a JSON list)       micro_f1, macro_f1
      regression          text, score (text_pair)                 spearman, pearson
    text-ranking          JSON lines: query, documents, relevant  mrr, ndcg@10
    token-classification  JSON lines: tokens, tags                entity_f1, token_accuracy
    question-answering    SQuAD 1.1 or 2.0, one JSON file         f1, exact_match
    fill-mask             plain text, one sentence a line         perplexity

Labels and tags are names or ids of the model's own labels; `relevant` holds indices into
`documents`. Correlations are -1 to 1. Perplexity is at least 1, and lower is better. All other
metrics are 0 to 1.
"""

from build_artifacts.evaluation.base import EvaluatedModel, Evaluation, ExampleSampling, Output
from build_artifacts.evaluation.files import BadEvaluationData
from build_artifacts.evaluation.loading import ALL_EXAMPLES, digest_data, load_evaluation
from build_artifacts.evaluation.runner import score_engine

__all__ = [
    "ALL_EXAMPLES",
    "BadEvaluationData",
    "EvaluatedModel",
    "Evaluation",
    "ExampleSampling",
    "Output",
    "digest_data",
    "load_evaluation",
    "score_engine",
]
