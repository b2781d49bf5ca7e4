"""The generators of labeled data reproduce the files in the package."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

from build_artifacts import training
from build_artifacts.training import entities, gate_data

DATA = Path(training.__file__).parents[1] / "data"


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_entities_are_reproduced_with_a_tag_per_word() -> None:
    records = read("entities.jsonl")
    generated = entities.generate(random.Random(entities._SEED))
    assert list(islice(generated, len(records))) == records
    assert all(len(record["tokens"]) == len(record["tags"]) for record in records)


def test_claims_are_reproduced_with_equal_shares_of_labels() -> None:
    records = read("claims.jsonl")
    generated = gate_data.generate_claims(random.Random(gate_data._SEED))
    assert list(islice(generated, len(records))) == records
    labels = [record["label"] for record in records]
    shares = {labels.count(label) for label in ("entailment", "neutral", "contradiction")}
    assert shares == {len(records) // 3}


def test_ranked_sentences_are_reproduced_and_hold_the_answer() -> None:
    records = read("sentences.jsonl")
    assert list(gate_data.list_ranked_sentences(DATA / "questions.json")) == records
    assert all(record["relevant"][0] < len(record["documents"]) for record in records)
