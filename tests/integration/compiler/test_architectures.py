"""Export, verification and inference of every architecture and head from tiny random checkpoints.

Graphs use opset 23, except those of PLAIN. At opset 23 the exporter writes one `Attention` operator
per layer for cases with `sdpa`; the other models have their own attention. Cases of two layers
share their export with `test_smoothed_int8.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import load_model
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.encoders.probes import tokenize_texts
from build_artifacts.encoders.reference_engine import TorchReferenceEngine
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.presets import CPU_INT8
from build_artifacts.recipes import DynamicInt8, ExportRecipe
from build_artifacts.steps.quantize import quantize
from build_artifacts.steps.rewrite import rewrite
from deployments.artifacts.manifest import EngineOptions, Gate, ModelSource
from deployments.artifacts.types import Device, ModelHead, TaskName
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.tuning.parity import ParityResult, ReferenceOutputs, compare_outputs, run_probes
from tests.support.shared_exports import SharedExports
from tests.support.tiny_encoders import ENCODER_HEADS, POSITIONS, tiny_checkpoint, write_json

SDPA = ExportRecipe(dtype="float32", opset=23)
PLAIN = ExportRecipe(dtype="float32", opset=18)
EXACT = Gate(cosine_mean=0.99999, cosine_worst=0.9999, top1_agreement=1.0)
# Absolute and relative, for outputs of 10 to 100. torch adds fp32 numbers in another order.
TOLERANCE = 2e-4
# Texts with special tokens only, with a few tokens, and of the maximum length; a pair of texts.
TEXTS = (" ", "the lovely [MASK] at night", "[MASK] bad film " * POSITIONS, ("a [MASK]", "it was"))


@dataclass(frozen=True)
class ArchitectureCase:
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
SPARSE = (TaskName.SPARSE_EMBEDDINGS,)
THREE = ("NO", "PERHAPS", "YES")
CASES = (
    ArchitectureCase("bert", ModelHead.VECTOR, EMBED, pooling="weightedmean"),
    ArchitectureCase("electra", ModelHead.VECTOR, EMBED, pooling="max"),
    ArchitectureCase("bert", ModelHead.SPAN, ANSWER),
    ArchitectureCase("distilbert", ModelHead.LABELS, CLASSIFY, labels=THREE, layers=2),
    ArchitectureCase("roberta", ModelHead.TOKENS, TAG, labels=THREE, layers=2),
    ArchitectureCase(
        "xlm-roberta", ModelHead.LABELS, (*CLASSIFY, TaskName.TEXT_RANKING), labels=("SCORE",)
    ),
    ArchitectureCase("albert", ModelHead.SPAN, ANSWER, layers=2),
    ArchitectureCase("electra", ModelHead.TOKENS, TAG, labels=THREE, layers=2),
    ArchitectureCase("deberta-v2", ModelHead.LABELS, CLASSIFY, labels=THREE, sdpa=False),
    ArchitectureCase("mpnet", ModelHead.VECTOR, EMBED, sdpa=False, layers=2),
    ArchitectureCase("mobilebert", ModelHead.MASKS, FILL),
    ArchitectureCase("modernbert", ModelHead.MASKS, FILL, layers=2),
    ArchitectureCase("bert", ModelHead.SPARSE, SPARSE),
    ArchitectureCase("distilbert", ModelHead.SPARSE, SPARSE, layers=2),
    ArchitectureCase("gemma3_text", ModelHead.VECTOR, EMBED, layers=2),
    ArchitectureCase("nomic_bert", ModelHead.VECTOR, EMBED, pooling="cls", layers=2),
    ArchitectureCase(
        "qwen3", ModelHead.VECTOR, EMBED, pooling="lasttoken"
    ),  # a decoder used for embeddings
    ArchitectureCase("qwen3", ModelHead.LABELS, CLASSIFY, labels=THREE, layers=2),
    ArchitectureCase("qwen3", ModelHead.TOKENS, TAG, labels=THREE),
    ArchitectureCase("qwen3", ModelHead.SPAN, ANSWER),
    ArchitectureCase("big_bird", ModelHead.LABELS, CLASSIFY, labels=THREE, sdpa=False),
)


@dataclass(frozen=True)
class LoadedCase:
    """A checkpoint with its metadata and the reference outputs of torch."""

    source: Path
    metadata: CheckpointMetadata
    reference: ReferenceOutputs

    @classmethod
    def of(cls, case: ArchitectureCase, directory: Path) -> LoadedCase:
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

    def export(self, exports: SharedExports, recipe: ExportRecipe, graph: Path) -> Path:
        model = load_model(self.source, head=self.metadata.head, dtype=recipe.dtype)
        return exports(model, self.metadata, recipe, graph)

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

    def check_parity(self, graph: Path) -> ParityResult:
        """Check that single and batched outputs are close to torch. Return their parity."""
        engine, items = self.engine(graph), self.reference.items
        unbatched, batched = run_probes(engine, items, 1), run_probes(engine, items, len(items))
        for outputs in (unbatched, batched):
            for actual, expected in zip(outputs, self.reference.outputs, strict=True):
                np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
        return compare_outputs(self.reference, unbatched, batched, EXACT, self.metadata.head)


def operator_types(graph: Path) -> list[str]:
    return [node.op_type for node in onnx.load(graph).graph.node]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exported_graph_matches_torch_and_quantizes(
    case: ArchitectureCase, shared_exports: SharedExports, tmp_path: Path
) -> None:
    loaded = LoadedCase.of(case, tmp_path)
    metadata = loaded.metadata
    assert (metadata.tasks, metadata.max_tokens, metadata.labels) == (
        case.tasks,
        max_tokens_of(case),
        case.labels,
    )
    graph = loaded.export(shared_exports, SDPA, tmp_path / "graph.onnx")
    assert [path.name for path in tmp_path.glob("graph*")] == ["graph.onnx"]
    assert operator_types(graph).count("Attention") == case.layers * case.sdpa
    parity = loaded.check_parity(graph)
    assert parity.passed, parity.reasons

    rewritten = tmp_path / "lean.onnx"
    assert CPU_INT8.rewrites is not None
    assert rewrite(graph, CPU_INT8.rewrites, rewritten) > 0 or not case.sdpa
    assert loaded.check_parity(rewritten).passed

    quantized = tmp_path / "int8.onnx"
    quantize(rewritten, DynamicInt8(), quantized, items=())
    assert "MatMulInteger" in operator_types(quantized)
    int8_outputs = run_probes(loaded.engine(quantized), loaded.reference.items, 1)
    # Random weights have low int8 accuracy; the limits only reject constant outputs.
    lenient = Gate(cosine_mean=0.8, cosine_worst=-1, top1_agreement=0, logit_correlation=0.8)
    int8_result = compare_outputs(
        loaded.reference, int8_outputs, int8_outputs, lenient, metadata.head
    )
    assert int8_result.passed, int8_result.reasons


def max_tokens_of(case: ArchitectureCase) -> int:
    return POSITIONS - {"roberta": 1, "xlm-roberta": 1, "mpnet": 2}.get(case.model_type, 0)


@pytest.mark.parametrize(
    "case",
    [
        ArchitectureCase("nomic_bert", ModelHead.TOKENS, TAG, labels=THREE),
        ArchitectureCase("mpnet", ModelHead.MASKS, FILL),
    ],
    ids=str,
)
def test_graph_without_attention_operator_matches_torch(
    case: ArchitectureCase, shared_exports: SharedExports, tmp_path: Path
) -> None:
    loaded = LoadedCase.of(case, tmp_path)
    graph = loaded.export(shared_exports, PLAIN, tmp_path / "graph.onnx")
    assert "Attention" not in operator_types(graph)
    assert loaded.check_parity(graph).passed


def test_every_head_has_two_architectures() -> None:
    for head in ENCODER_HEADS:
        assert len({case.model_type for case in CASES if case.head is head}) >= 2, head


@pytest.fixture(scope="module")
def fill_mask_model(
    tmp_path_factory: pytest.TempPathFactory, shared_exports: SharedExports
) -> tuple[LoadedCase, Path]:
    """A fill-mask model and its graph."""
    directory = tmp_path_factory.mktemp("filler")
    loaded = LoadedCase.of(ArchitectureCase("bert", ModelHead.MASKS, FILL), directory)
    return loaded, loaded.export(shared_exports, SDPA, directory / "graph.onnx")


def test_vocabulary_logits_are_computed_for_masks_only(
    fill_mask_model: tuple[LoadedCase, Path],
) -> None:
    loaded, graph = fill_mask_model
    model = onnx.load(graph)
    masks, width = shape(model.graph.output[0])
    assert width == loaded.metadata.output_width
    assert ("mask_positions", [masks]) in [(v.name, shape(v)) for v in model.graph.input]
    batch_and_tokens = set(shape(model.graph.input[0]))
    wide = [shape(v) for v in model.graph.value_info if width in shape(v)]
    assert [1, masks, width] in wide
    assert not any(batch_and_tokens & set(dimensions) for dimensions in wide)


def shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_text_without_mask_has_empty_output(
    fill_mask_model: tuple[LoadedCase, Path],
) -> None:
    loaded, graph = fill_mask_model
    engine = loaded.engine(graph)
    unmasked_item, masked_item = loaded.reference.items[:2]
    width = loaded.metadata.output_width
    assert [a.shape for a in run_probes(engine, [unmasked_item, unmasked_item], 2)] == [
        (0, width)
    ] * 2
    empty, answer = run_probes(engine, [unmasked_item, masked_item], 2)
    assert empty.shape == (0, width)
    np.testing.assert_allclose(answer, loaded.reference.outputs[1], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "poetry"}, "model type `poetry` but Transformers does not recognize"),
        ({"hidden_size": "32"}, "Validation error for field 'hidden_size': TypeError: Field"),
        ({"hidden_act": 5}, "Validation error for field 'hidden_act'"),
        ({"id2label": 3}, "'int' object has no attribute 'items'"),
        ({"num_labels": "x"}, "'str' object cannot be interpreted as an integer"),
    ],
)
def test_invalid_config_is_rejected_in_one_line(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", {"model_type": "bert", **changes})
    match = f"does not support `config.json`: .*{reason}"
    with pytest.raises(UnsupportedModel, match=match) as raised:
        load_config(tmp_path)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("longformer", {}, "`longformer` cannot be exported: its global"),
        ("big_bird", {"attention_type": "block_sparse"}, "`big_bird` cannot be exported: its"),
    ],
)
def test_untraceable_architecture_is_rejected_by_name(
    model_type: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", {"model_type": model_type, **changes})
    checkpoint = Checkpoint(tmp_path, ModelSource(ref="here", revision="1"), "local/model")
    with pytest.raises(UnsupportedModel, match=message):
        read_metadata(checkpoint, FILL)
