"""Record what transformers answers with the trained demo models, in float32.

    python -m tests.end_to_end.reference_answers

`test_real_models.py` compares these answers with the answers of the served int8 graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.demo import find_demo_model
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.steps.dequantize_onnx import dequantize_onnx
from build_artifacts.steps.merge import merge
from build_artifacts.steps.resolve import resolve
from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel
from tests.support.served_models import MINILM_NLI, MINILM_RERANK, RAMPART

RECORD = Path(__file__).with_name("real_model_answers.json")
LETTERS = (
    "My name is Maria Castillo and I live at 42 Cedar Road, Denver, Colorado 80202.",
    "Ask Farid Walker or Elena Kim in Boise before Monday.",
)
DESCRIPTIONS = (
    "Two boys in red shirts are kicking a ball on a wet field.",
    "An old man is reading a newspaper in a cafe.",
)
CLAIMS = ("Children are playing a sport.", "Somebody is swimming.", "A person reads.")
QUERIES = ("Where is the river?", "Who reads a newspaper?")
PASSAGES = (*DESCRIPTIONS, "The river crosses the city from south to north.")


def main() -> None:
    answers = {
        "entities": _open(RAMPART, TaskName.TOKEN_CLASSIFICATION, find_entities),
        "claims": _open(MINILM_NLI, TaskName.ZERO_SHOT_CLASSIFICATION, score_claims),
        "scores": _open(MINILM_RERANK, TaskName.TEXT_RANKING, score_passages),
    }
    RECORD.write_text(json.dumps(answers, indent=1, default=float) + "\n")


def find_entities(model: ParityModel) -> Any:
    """Return the entities of each letter: {"entity_group", "score", "word", "start", "end"}."""
    return model.pipeline()(list(LETTERS), aggregation_strategy="simple")


def score_claims(model: ParityModel) -> list[dict[str, float]]:
    """Return the score of each claim, for each description."""
    options = {"candidate_labels": list(CLAIMS), "multi_label": True, "hypothesis_template": "{}"}
    answers = model.pipeline()(list(DESCRIPTIONS), **options)
    return [dict(zip(each["labels"], each["scores"], strict=True)) for each in answers]


def score_passages(model: ParityModel) -> list[list[float]]:
    """Return the score of each passage, for each query."""
    import torch

    tokenizer, network = model.tokenizer(), model.model()
    scores = []
    for query in QUERIES:
        pairs = tokenizer(
            [query] * len(PASSAGES), list(PASSAGES), padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            scores.append(network(**pairs).logits.sigmoid().flatten().tolist())
    return scores


def _open(model_id: str, task: TaskName, compute: Any) -> Any:
    """Prepare a demo model as a build does: dequantize it, merge its adapter. Apply `compute`."""
    model = find_demo_model(model_id)
    with TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "scratch").mkdir()
        (root / "checkpoint").mkdir()
        checkpoint = resolve(model.ref, root / "scratch", HuggingFaceHub())
        if checkpoint.packed is not None:
            dequantize_onnx(checkpoint, root / "checkpoint")
        if model.adapter is not None:
            merge(checkpoint, read_adapter(model.adapter), root / "checkpoint")
        return compute(ParityModel(root, task))


if __name__ == "__main__":
    main()
