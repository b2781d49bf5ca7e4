"""Record what the last question-answering pipeline answers on a tiny seeded checkpoint.

transformers 5 has no such pipeline, so the tests cannot ask it. 4.57 goes beside the environment:

    pip install --no-deps --target DIR transformers==4.57.1 \\
        tokenizers==0.22.1 huggingface_hub==0.36.0
    python -m tests.integration.parity.record_question_answering DIR
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
SHORT, LONG = 200, 40  # questions whose context fits into one window, and others
# Answers nearer to each other may change places with the order of sums: they are not recorded.
CLEAR = 1e-4
# Of the short ones every n-th is asked with these parameters; windows are for the long ones.
FOR_SHORT: tuple[tuple[int, Mapping[str, Any]], ...] = (
    (1, {}),
    (2, {"top_k": 4}),
    (4, {"align_to_words": False, "top_k": 3}),
    (4, {"handle_impossible_answer": True, "top_k": 2}),
    (5, {"max_answer_len": 1}),
    (5, {"max_answer_len": 60, "top_k": 2}),
)
FOR_LONG: tuple[Mapping[str, Any], ...] = (
    {"doc_stride": 16},
    {"doc_stride": 0, "top_k": 3},
    {"doc_stride": 7, "max_seq_len": 40, "handle_impossible_answer": True, "top_k": 3},
    {"doc_stride": 10, "max_seq_len": 50, "align_to_words": False, "top_k": 2},
)


def main(installed: Path) -> None:
    """Write RECORD with the answers of the transformers that is installed in that directory."""
    with TemporaryDirectory() as scratch:
        twins = ParityModel.make(Path(scratch), TaskName.QUESTION_ANSWERING)
        questions = questions_for(twins.checkpoint, SHORT, seed=2)
        questions += questions_for(twins.checkpoint, LONG, seed=7, tokens=(80, 300))
        asked = Path(scratch) / "asked.json"
        asked.write_text(json.dumps({"questions": questions, "runs": _runs()}))
        path = os.pathsep.join((str(installed), os.getcwd()))
        command = [sys.executable, __file__, str(twins.checkpoint), str(asked)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        record = json.loads(asked.read_bytes())
        record["weights"] = file_sha256(twins.checkpoint / WEIGHTS)
    RECORD.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


def questions_for(
    tokenizer: Path, count: int, *, seed: int, tokens: tuple[int, int] = (12, 51)
) -> list[dict[str, str]]:
    """`count` questions of up to 10 tokens, their contexts of `tokens` at least and at most."""
    least, most = tokens
    asked = varied_texts(tokenizer, count, least_tokens=2, most_tokens=10, seed=seed)
    contexts = varied_texts(tokenizer, count, least_tokens=least, most_tokens=most, seed=seed + 1)
    return [
        {"question": question, "context": context}
        for question, context in zip(asked, contexts, strict=True)
    ]


def _runs() -> list[dict[str, Any]]:
    short = [
        {"parameters": parameters, "chosen": list(range(0, SHORT, step))}
        for step, parameters in FOR_SHORT
    ]
    chosen = list(range(SHORT, SHORT + LONG))
    return short + [{"parameters": parameters, "chosen": chosen} for parameters in FOR_LONG]


def answer(checkpoint: str, path: Path) -> None:
    """Put the clear answers, as [score, start, end], beside the questions in the file."""
    import transformers

    pipeline = transformers.pipeline("question-answering", model=checkpoint, device="cpu")
    pipeline.tokenizer.model_max_length = pipeline.model.config.max_position_embeddings
    # What files of real checkpoints say, and the pipeline needs for the null answer.
    pipeline.tokenizer.add_special_tokens({"cls_token": "[CLS]", "unk_token": "[UNK]"})
    record = json.loads(path.read_bytes())
    for run in record["runs"]:
        answers = {
            i: _clear_answers(pipeline, record["questions"][i], run["parameters"])
            for i in run.pop("chosen")
        }
        run["answers"] = {i: found for i, found in answers.items() if found}
    record["transformers"] = transformers.__version__
    path.write_text(json.dumps(record))


def _clear_answers(
    pipeline: Any, asked: Mapping[str, str], parameters: Mapping[str, Any]
) -> list[list[float]]:
    """Best first; none where two of them, or the last and the one after it, are too near."""
    count = parameters.get("top_k", 1)
    found, more = (
        _told(pipeline(**asked, **{**parameters, "top_k": most})) for most in (count, count + 1)
    )
    is_clear = all(
        first[0] - second[0] > CLEAR
        for ranking in (found, more)
        for first, second in pairwise(ranking)
    )
    return found if is_clear else []


def _told(answers: Any) -> list[list[float]]:
    many = answers if isinstance(answers, list) else [answers]
    # The pipeline fills up with spans that begin at no token of the context, of score 0.
    return [[round(a["score"], 7), a["start"], a["end"]] for a in many if a["score"] > 0]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        answer(sys.argv[1], Path(sys.argv[2]))
