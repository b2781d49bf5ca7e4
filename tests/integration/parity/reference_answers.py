"""Record the answers of transformers' question-answering pipeline to a tiny seeded checkpoint.

transformers 5 has no such pipeline. Install version 4.57 in a separate directory:

    pip install --no-deps --target DIR transformers==4.57.1 \\
        tokenizers==0.22.1 huggingface_hub==0.36.0
    python -m tests.integration.parity.reference_answers DIR
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel
from tests.support.parity_texts import varied_texts

RECORD = Path(__file__).parent / "data" / "question_answering.json"
WEIGHTS = "model.safetensors"
SHORT, LONG = 200, 40  # number of questions with a context of one window, and of several windows
# Answers whose scores differ by less are not recorded, because rounding may swap them.
MIN_LEAD = 1e-4
# (n, parameters): every n-th short question runs with these parameters.
SHORT_RUNS: tuple[tuple[int, Mapping[str, Any]], ...] = (
    (1, {}),
    (2, {"top_k": 4}),
    (4, {"align_to_words": False, "top_k": 3}),
    (4, {"handle_impossible_answer": True, "top_k": 2}),
    (5, {"max_answer_len": 1}),
    (5, {"max_answer_len": 60, "top_k": 2}),
)
LONG_RUNS: tuple[Mapping[str, Any], ...] = (
    {"doc_stride": 16},
    {"doc_stride": 0, "top_k": 3},
    {"doc_stride": 7, "max_seq_len": 40, "handle_impossible_answer": True, "top_k": 3},
    {"doc_stride": 10, "max_seq_len": 50, "align_to_words": False, "top_k": 2},
)


def main(installed: Path) -> None:
    """Write RECORD with the answers of transformers, installed in the directory `installed`."""
    with TemporaryDirectory() as scratch:
        models = ParityModel.make(Path(scratch), TaskName.QUESTION_ANSWERING)
        questions = make_questions(models.checkpoint, SHORT, seed=2)
        questions += make_questions(models.checkpoint, LONG, seed=7, tokens=(80, 300))
        questions_file = Path(scratch) / "questions.json"
        questions_file.write_text(json.dumps({"questions": questions, "runs": _runs()}))
        path = os.pathsep.join((str(installed), os.getcwd()))
        command = [sys.executable, __file__, str(models.checkpoint), str(questions_file)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        record = json.loads(questions_file.read_bytes())
        record["weights"] = file_sha256(models.checkpoint / WEIGHTS)
    RECORD.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


def make_questions(
    tokenizer: Path, count: int, *, seed: int, tokens: tuple[int, int] = (12, 51)
) -> list[dict[str, str]]:
    """Make questions of up to 10 tokens, with contexts of `tokens[0]` to `tokens[1]` tokens."""
    min_tokens, max_tokens = tokens
    questions = varied_texts(tokenizer, count, min_tokens=2, max_tokens=10, seed=seed)
    contexts = varied_texts(
        tokenizer, count, min_tokens=min_tokens, max_tokens=max_tokens, seed=seed + 1
    )
    return [
        {"question": question, "context": context}
        for question, context in zip(questions, contexts, strict=True)
    ]


def _runs() -> list[dict[str, Any]]:
    short = [
        {"parameters": parameters, "selected": list(range(0, SHORT, step))}
        for step, parameters in SHORT_RUNS
    ]
    selected = list(range(SHORT, SHORT + LONG))
    return short + [{"parameters": parameters, "selected": selected} for parameters in LONG_RUNS]


def add_answers(checkpoint: str, path: Path) -> None:
    """Add the answers with a clear lead, as [score, start, end], to the file of questions."""
    import transformers

    pipeline = transformers.pipeline("question-answering", model=checkpoint, device="cpu")
    pipeline.tokenizer.model_max_length = pipeline.model.config.max_position_embeddings
    # The pipeline needs these tokens for the null answer. Real checkpoints define them.
    pipeline.tokenizer.add_special_tokens({"cls_token": "[CLS]", "unk_token": "[UNK]"})
    record = json.loads(path.read_bytes())
    for run in record["runs"]:
        answers = {
            i: _clear_answers(pipeline, record["questions"][i], run["parameters"])
            for i in run.pop("selected")
        }
        run["answers"] = {i: found for i, found in answers.items() if found}
    record["transformers"] = transformers.__version__
    path.write_text(json.dumps(record))


def _clear_answers(
    pipeline: Any, question: Mapping[str, str], parameters: Mapping[str, Any]
) -> list[list[float]]:
    """Return the best answers in order, or [] if one leads the next by MIN_LEAD or less."""
    count = parameters.get("top_k", 1)
    found, more = (
        _list_spans(pipeline(**question, **{**parameters, "top_k": top_k}))
        for top_k in (count, count + 1)
    )
    is_clear = all(
        first[0] - second[0] > MIN_LEAD
        for ranking in (found, more)
        for first, second in pairwise(ranking)
    )
    return found if is_clear else []


def _list_spans(answers: Any) -> list[list[float]]:
    many = answers if isinstance(answers, list) else [answers]
    # Spans with the score 0 lie outside the context.
    return [[round(a["score"], 7), a["start"], a["end"]] for a in many if a["score"] > 0]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        add_answers(sys.argv[1], Path(sys.argv[2]))
