"""Architectures by their tiny random selves: what is exported answers like torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoint import Checkpoint
from build_artifacts.facts import EMBEDDING_TASKS, read_facts
from build_artifacts.recipe import CPU_FP32, Gate
from build_artifacts.steps.export import export
from build_artifacts.steps.verify import Reference, encode_probes, torch_rows, verify
from deployments.manifest import Source, TaskName
from tests.builders import POSITIONS, tiny_checkpoint

EXACT = Gate(cosine_mean=0.99999, cosine_worst=0.9999, top1_agreement=1.0)
# As long as the model reads, so that the last position is used.
TEXTS = ("river", "the lovely city at night", "a bad film " * POSITIONS)
CLASSIFY = (TaskName.TEXT_CLASSIFICATION,)


@pytest.mark.parametrize(
    ("model_type", "pooling", "labels"),
    [
        ("distilbert", "cls", ()),
        ("roberta", "mean", ()),
        ("mpnet", "mean", ()),
        ("albert", "mean", ("A", "B", "C")),
        ("electra", "mean", ("SCORE",)),
    ],
)
def test_an_exported_graph_answers_like_torch(
    tmp_path: Path, model_type: str, pooling: str, labels: tuple[str, ...]
) -> None:
    source = tiny_checkpoint(
        tmp_path / model_type, model_type=model_type, pooling=pooling, labels=labels
    )
    checkpoint = Checkpoint(source, Source(ref="here", revision="1"), "local/model")
    facts = read_facts(checkpoint, CLASSIFY if labels else EMBEDDING_TASKS)
    graph = export(source, facts, CPU_FP32.export, tmp_path / "graph.onnx")
    assert [path.name for path in tmp_path.glob("graph*")] == ["graph.onnx"]
    probes = encode_probes(source, facts.max_tokens, TEXTS)
    assert len(probes[-1]) == facts.max_tokens
    reference = Reference(probes, torch_rows(source, facts, probes))
    assert reference.rows.shape == (len(TEXTS), facts.width)
    verdict = verify(graph, CPU_FP32, facts, reference, EXACT)
    assert verdict.passed, verdict.reasons
