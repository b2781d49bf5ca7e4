"""Labeled data for the accuracy gate of the adapters that this package trains.

    python -m build_artifacts.training.gate_data build_artifacts/data

The program writes `claims.jsonl` from templates made for this purpose, and `sentences.jsonl` from
the questions in `questions.json`. No model is trained on these files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from build_artifacts.evaluation.squad import read_questions

_CLAIMS = 240
_SEED = 11

# A person, and a more general name for the same person.
_PEOPLE = (
    ("A girl", "A child"), ("A violinist", "A musician"), ("A surgeon", "A doctor"),
    ("An old man", "A person"), ("A baker", "Someone"), ("A goalkeeper", "An athlete"),
)  # fmt: skip
# An action, a more general name for it, and an action that cannot happen at the same time.
_ACTIONS = (
    ("is running along", "is moving along", "is asleep beside"),
    ("is painting a picture near", "is making art near", "is swimming far from"),
    ("is eating an apple beside", "is eating fruit beside", "is drinking milk beside"),
    ("is singing loudly at", "is making a sound at", "is completely silent at"),
    ("is repairing a red bicycle by", "is fixing a bike by", "is riding a horse by"),
)
_PLACES = ("the river", "the market", "a school", "the station", "a wide beach", "the harbor")
# Details that a premise neither entails nor contradicts.
_DETAILS = ("because of a bet", "before going to work", "for the third time this week")


def generate_claims(rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield pairs of premise and claim without end, one pair of each label per premise."""
    while True:
        person, kind = rng.choice(_PEOPLE)
        action, same, other = rng.choice(_ACTIONS)
        place = rng.choice(_PLACES)
        premise = f"{person} {action} {place}."
        for label, claims in (
            ("entailment", (f"{kind} {same} {place}.", f"{kind} {action} {place}.")),
            ("contradiction", (f"{person} {other} {place}.", f"Nobody {action} {place}.")),
            ("neutral", (f"{person} {action} {place} {rng.choice(_DETAILS)}.",)),
        ):
            yield {"text": premise, "text_pair": rng.choice(claims), "label": label}


def list_ranked_sentences(questions: Path) -> Iterator[dict[str, Any]]:
    """Yield questions with the sentences of their text and the index of the answer's sentence.

    Yield only questions whose first answer is in exactly one of at least three sentences. Every
    question must have an answer.
    """
    for question in read_questions(questions):
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", question.context)
        relevant = [i for i, each in enumerate(sentences) if question.golds[0] in each]
        if len(relevant) == 1 and len(sentences) > 2:
            yield {"query": question.question, "documents": sentences, "relevant": relevant}


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    claims = generate_claims(random.Random(_SEED))
    _write(directory / "claims.jsonl", (next(claims) for _ in range(_CLAIMS)))
    _write(directory / "sentences.jsonl", list_ranked_sentences(directory / "questions.json"))


if __name__ == "__main__":
    main()
