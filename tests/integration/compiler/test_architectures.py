"""Every architecture and every head from a tiny random checkpoint: exported, verified, run.

As measured on two cores: 4 s a case, 82 s in all. Each graph is of opset 23, whose one `Attention`
operator per layer the exporter writes for those that `sdpa` says; the others bring an attention of
their own and are exported all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata, read_metadata, select_tasks
from build_artifacts.checkpoints.models import load_model
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import CPU_INT8, DynamicInt8, ExportRecipe
from build_artifacts.search.preparation import TorchReferenceEngine
from build_artifacts.search.probes import tokenize_texts
from build_artifacts.steps.export import export
from build_artifacts.steps.quantize import quantize
from build_artifacts.steps.rewrite import rewrite
from deployments.artifacts.manifest import EngineOptions, Gate, ModelSource
from deployments.artifacts.types import Device, ModelHead, TaskName
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.tuning.parity import ParityResult, ReferenceOutputs, compare_outputs, run_probes
from tests.support.builders import ENCODER_HEADS, POSITIONS, tiny_checkpoint, write_json

SDPA = ExportRecipe(dtype="float32", opset=23)
PLAIN = ExportRecipe(dtype="float32", opset=18)
EXACT = Gate(cosine_mean=0.99999, cosine_worst=0.9999, top1_agreement=1.0)
# Largest difference to torch, of answers that reach 10 to 100: fp32 sums in another order.
TOLERANCE = 2e-4
# Two tokens, as only special tokens are; a few; as many as the model reads, and one pair.
TEXTS = (" ", "the lovely [MASK] at night", "[MASK] bad film " * POSITIONS, ("a [MASK]", "it was"))


@dataclass(frozen=True)
class Case:
    model_type: str
    head: ModelHead
    tasks: tuple[TaskName, ...]
    labels: tuple[str, ...] = ()
    pooling: str = "mean"
    sdpa: bool = True
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.model_type}-{self.head}"


EMBED = (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY)
CLASSIFY = (TaskName.TEXT_CLASSIFICATION,)
TAG = (TaskName.TOKEN_CLASSIFICATION,)
ANSWER = (TaskName.QUESTION_ANSWERING,)
FILL = (TaskName.FILL_MASK,)
THREE = ("NO", "PERHAPS", "YES")
CASES = (
    Case("bert", ModelHead.VECTOR, EMBED, pooling="lasttoken"),
    Case("bert", ModelHead.SPAN, ANSWER),
    Case("distilbert", ModelHead.LABELS, CLASSIFY, labels=THREE),
    Case("roberta", ModelHead.TOKENS, TAG, labels=THREE),
    Case("xlm-roberta", ModelHead.LABELS, (*CLASSIFY, TaskName.TEXT_RANKING), labels=("SCORE",)),
    Case("albert", ModelHead.SPAN, ANSWER),
    Case("electra", ModelHead.TOKENS, TAG, labels=THREE),
    Case("deberta-v2", ModelHead.LABELS, CLASSIFY, labels=THREE, sdpa=False),
    Case("mpnet", ModelHead.VECTOR, EMBED, sdpa=False),
    Case("mobilebert", ModelHead.MASKS, FILL),
    Case("modernbert", ModelHead.MASKS, FILL, layers=2),
    Case("nomic_bert", ModelHead.VECTOR, EMBED, pooling="cls"),
    Case("qwen3", ModelHead.VECTOR, EMBED, pooling="lasttoken"),  # a decoder that embeds
    Case("big_bird", ModelHead.LABELS, CLASSIFY, labels=THREE, sdpa=False),
)


@dataclass(frozen=True)
class Subject:
    """A checkpoint at work: what it says of itself, and what torch answers."""

    source: Path
    metadata: CheckpointMetadata
    reference: ReferenceOutputs

    @classmethod
    def of(cls, case: Case, directory: Path) -> Subject:
        source = tiny_checkpoint(
            directory / "model",
            model_type=case.model_type,
            head=case.head,
            labels=case.labels,
            pooling=case.pooling,
            layers=case.layers,
        )
        checkpoint = Checkpoint(source, ModelSource(ref="here", revision="1"), "local/model")
        metadata = read_metadata(checkpoint, select_tasks(checkpoint, None, None))
        items = tokenize_texts(source, metadata.max_tokens, TEXTS)
        original = TorchReferenceEngine(
            load_model(source, head=metadata.head, dtype="float32"), metadata
        )
        return cls(source, metadata, ReferenceOutputs(items, tuple(run_probes(original, items, 1))))

    def export(self, recipe: ExportRecipe, graph: Path) -> Path:
        model = load_model(self.source, head=self.metadata.head, dtype=recipe.dtype)
        return export(model, self.metadata, recipe, graph)

    def engine(self, graph: Path) -> EncoderEngine:
        spec = GraphSpec(
            path=graph,
            device=Device.CPU,
            precision="fp32",
            engine="onnxruntime",
            options=EngineOptions(),
            head=self.metadata.head,
            mask_token=self.metadata.mask_token,
        )
        return open_engine(spec, EncoderSettings())

    def verdict(self, graph: Path) -> ParityResult:
        """Alone and in company, after every answer was compared digit by digit."""
        engine, items = self.engine(graph), self.reference.items
        alone, company = run_probes(engine, items, 1), run_probes(engine, items, len(items))
        for given in (alone, company):
            for mine, theirs in zip(given, self.reference.outputs, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)
        return compare_outputs(self.reference, alone, company, EXACT, self.metadata.head)


def operators(graph: Path) -> list[str]:
    return [node.op_type for node in onnx.load(graph).graph.node]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_exported_graph_answers_like_torch_and_survives_int8(case: Case, tmp_path: Path) -> None:
    subject = Subject.of(case, tmp_path)
    metadata = subject.metadata
    assert (metadata.tasks, metadata.max_tokens, metadata.labels) == (
        case.tasks,
        longest(case),
        case.labels,
    )
    graph = subject.export(SDPA, tmp_path / "graph.onnx")
    assert [path.name for path in tmp_path.glob("graph*")] == ["graph.onnx"]
    assert operators(graph).count("Attention") == case.layers * case.sdpa
    verdict = subject.verdict(graph)
    assert verdict.passed, verdict.reasons

    lean = tmp_path / "lean.onnx"
    assert CPU_INT8.rewrites is not None
    assert rewrite(graph, CPU_INT8.rewrites, lean) > 0 or not case.sdpa
    assert subject.verdict(lean).passed

    quantised = tmp_path / "int8.onnx"
    quantize(lean, DynamicInt8(), quantised, items=())
    assert "MatMulInteger" in operators(quantised)
    rounded = run_probes(subject.engine(quantised), subject.reference.items, 1)
    # A tiny random model is no measure of accuracy; that it still tells texts apart is asked.
    lenient = Gate(cosine_mean=0.8, cosine_worst=-1, top1_agreement=0)
    judged = compare_outputs(subject.reference, rounded, rounded, lenient, metadata.head)
    assert judged.passed, judged.reasons


def longest(case: Case) -> int:
    return POSITIONS - {"roberta": 1, "xlm-roberta": 1, "mpnet": 2}.get(case.model_type, 0)


@pytest.mark.parametrize(
    "case",
    [
        Case("nomic_bert", ModelHead.TOKENS, TAG, labels=THREE),
        Case("mpnet", ModelHead.MASKS, FILL),
    ],
    ids=str,
)
def test_a_graph_without_the_attention_operator_answers_alike(case: Case, tmp_path: Path) -> None:
    subject = Subject.of(case, tmp_path)
    graph = subject.export(PLAIN, tmp_path / "graph.onnx")
    assert "Attention" not in operators(graph)
    assert subject.verdict(graph).passed


def test_every_head_is_built_for_two_architectures_at_least() -> None:
    for head in ENCODER_HEADS:
        assert len({case.model_type for case in CASES if case.head is head}) >= 2, head


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Path]:
    """A model that fills masks, and its graph."""
    directory = tmp_path_factory.mktemp("filler")
    subject = Subject.of(Case("bert", ModelHead.MASKS, FILL), directory)
    return subject, subject.export(SDPA, directory / "graph.onnx")


def test_only_the_mask_rows_meet_the_vocabulary(filler: tuple[Subject, Path]) -> None:
    subject, graph = filler
    model = onnx.load(graph)
    masks, width = shape(model.graph.output[0])
    assert width == subject.metadata.output_width
    assert ("mask_positions", [masks]) in [(v.name, shape(v)) for v in model.graph.input]
    batch_and_tokens = set(shape(model.graph.input[0]))
    wide = [shape(v) for v in model.graph.value_info if width in shape(v)]
    assert [1, masks, width] in wide
    assert not any(batch_and_tokens & set(dimensions) for dimensions in wide)


def shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_a_text_without_a_mask_has_an_empty_answer_and_takes_none_from_its_neighbour(
    filler: tuple[Subject, Path],
) -> None:
    subject, graph = filler
    engine = subject.engine(graph)
    without, with_one = subject.reference.items[:2]
    width = subject.metadata.output_width
    assert [a.shape for a in run_probes(engine, [without, without], 2)] == [(0, width)] * 2
    empty, answer = run_probes(engine, [without, with_one], 2)
    assert empty.shape == (0, width)
    np.testing.assert_allclose(answer, subject.reference.outputs[1], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("longformer", {}, "`longformer` cannot be exported: its global"),
        ("big_bird", {"attention_type": "block_sparse"}, "`big_bird` cannot be exported: its"),
    ],
)
def test_an_architecture_that_cannot_be_traced_is_refused_by_name(
    model_type: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", {"model_type": model_type, **changes})
    checkpoint = Checkpoint(tmp_path, ModelSource(ref="here", revision="1"), "local/model")
    with pytest.raises(UnsupportedModel, match=said):
        read_metadata(checkpoint, FILL)
