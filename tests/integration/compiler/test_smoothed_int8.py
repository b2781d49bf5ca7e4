"""Smoothed static int8: matched patterns per family, float equality, batch invariance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from build_artifacts.presets import CPU_INT8, CPU_INT8_DYNAMIC, OPENVINO_INT8
from build_artifacts.recipes import CPU_FP32, BuildRecipe, SmoothedInt8
from build_artifacts.steps.quantize import quantize
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import ModelHead
from deployments.batching.batch_policy import collate
from deployments.engines.graph_io import MASK_POSITIONS, build_feeds
from deployments.host.machine import read_cpu_info
from deployments.messages import TokenizedItem
from deployments.tuning.parity import cosines
from tests.support.engine_programs import write_model
from tests.support.prepared_build import (
    PreparedBuild,
    RecordingRunner,
    matrices,
    op_counts,
    plant_outlier,
)
from tests.support.tiny_encoders import tiny_checkpoint


@dataclass(frozen=True)
class SmoothingCase:
    """An architecture and the numbers of operators in its int8 graph."""

    model_type: str
    head: ModelHead
    static: int  # MatMuls whose input has a constant range
    ranges: int  # quantized activations; several `static` MatMuls may read the same one
    floating: int = 0  # MatMuls that stay float
    blocks: int = 0  # MatMuls whose input has a range per token
    pooling: str = "mean"

    def __str__(self) -> str:
        return self.model_type


# All models have two layers. Query, key and value share one activation. All cases except bert are
# also cases of `test_architectures.py`, so that both test modules share the exports.
CASES = (
    # The MatMul of mean pooling stays float.
    SmoothingCase("bert", ModelHead.VECTOR, static=12, ranges=8, floating=1),
    # The MatMul of the task head stays float.
    SmoothingCase("roberta", ModelHead.TOKENS, static=12, ranges=8, floating=1),
    SmoothingCase("distilbert", ModelHead.LABELS, static=12, ranges=8),
    # electra has one more static MatMul, which projects its embeddings.
    SmoothingCase("electra", ModelHead.TOKENS, static=13, ranges=9, floating=1),
    # mpnet has no fused attention operator, so the MatMuls of its attention stay float.
    SmoothingCase("mpnet", ModelHead.VECTOR, static=12, ranges=8, floating=5),
    # modernbert normalizes before each sublayer and has a gated feed-forward network.
    SmoothingCase("modernbert", ModelHead.MASKS, static=8, ranges=8, floating=2),
    # The gated feed-forward network of nomic_bert has a separate MatMul for its gate.
    SmoothingCase("nomic_bert", ModelHead.VECTOR, static=14, ranges=8, pooling="cls"),
    SmoothingCase(
        "albert", ModelHead.SPAN, static=11, ranges=7, floating=1, blocks=2
    ),  # MatMuls in `blocks` read the output of a GELU variant, which gets no constant range
)


def prepare_case(case: SmoothingCase, directory: Path) -> PreparedBuild:
    labels = ("A", "B", "C") if case.head in (ModelHead.TOKENS, ModelHead.LABELS) else ()
    source = tiny_checkpoint(
        directory / "model",
        model_type=case.model_type,
        head=case.head,
        labels=labels,
        pooling=case.pooling,
    )
    return PreparedBuild.of(source, directory / "work")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_families_have_constant_ranges(case: SmoothingCase, tmp_path: Path) -> None:
    build = prepare_case(case, tmp_path)
    graph = build.graphs.graph(CPU_INT8)
    counts = op_counts(graph)
    assert (
        counts["MatMulIntegerToFloat"],
        counts["QuantizeLinear"],
        counts["MatMul"],
        counts["MatMulNBits"],
    ) == (case.static, case.ranges, case.floating, case.blocks)
    assert not {"DynamicQuantizeLinear", "MatMulInteger"} & counts.keys()
    expected = build.answers(CPU_FP32, build.graphs.graph(CPU_FP32), batch_items=1)
    unbatched = build.answers(CPU_INT8, graph, batch_items=1)
    assert cosines(unbatched, expected).mean() > 0.99
    assert cosines(unbatched, build.answers(CPU_INT8, graph)).min() > 0.99999
    assert cosines(unbatched, build.answers(CPU_INT8, graph, batch_items=64)).min() > 0.99999


@pytest.mark.parametrize(
    ("inputs", "operator"),
    [(("input_ids",), "MatMulNBits"), (("input_ids", MASK_POSITIONS), "MatMul")],
    ids=["sparse encoder", "fill-mask"],
)
def test_head_for_all_tokens_that_shares_the_word_table_gets_int8_weights(
    inputs: tuple[str, ...], operator: str, tmp_path: Path
) -> None:
    node, rng = onnx.helper.make_node, np.random.default_rng(0)
    nodes = [
        node("Gather", ["table", "input_ids"], ["words"]),
        node("LayerNormalization", ["words", "ones"], ["normed"]),
        node("MatMul", ["normed", "layer"], ["product"]),
        node("Add", ["product", "words"], ["hidden"]),
        node("Transpose", ["table"], ["transposed"], perm=[1, 0]),
        node("MatMul", ["hidden", "transposed"], ["output"]),
    ]
    tables = {
        "table": rng.standard_normal((4_096, 256), dtype=np.float32),
        "ones": np.ones(256, np.float32),
        "layer": np.eye(256, dtype=np.float32),
    }
    write_model(tmp_path / "float.onnx", nodes, tables, inputs)
    items = [TokenizedItem(np.array(ids, np.int32), len(ids)) for ids in ([5, 6, 7], [8, 9])]
    quantize(tmp_path / "float.onnx", SmoothedInt8(), tmp_path / "int8.onnx", items=items)
    counts = op_counts(tmp_path / "int8.onnx")
    assert (counts["MatMulIntegerToFloat"], counts["MatMul"] + counts["MatMulNBits"]) == (1, 1)
    assert counts[operator] == 1
    feeds = build_feeds(collate(items[:1]), inputs, None).arrays
    expected, actual = (
        onnxruntime.InferenceSession(tmp_path / name).run(None, feeds)[0].ravel()
        for name in ("float.onnx", "int8.onnx")
    )
    assert np.corrcoef(actual, expected)[0, 1] > 0.99


def test_outlier_neuron_is_copied(prepared_build: PreparedBuild, tmp_path: Path) -> None:
    """Dynamic int8 rounds other neurons away, because the planted one is 1000 times as large."""
    expected = prepared_build.prepared.reference.outputs

    def mean_cosine(graph: Path) -> float:
        return float(cosines(prepared_build.answers(CPU_INT8, graph), expected).mean())

    dynamic = prepared_build.graphs.graph(CPU_INT8_DYNAMIC)
    static = prepared_build.graphs.graph(CPU_INT8)
    assert mean_cosine(static) > mean_cosine(dynamic)


def test_pairs_match_operators(prepared_build: PreparedBuild, tmp_path: Path) -> None:
    graph = tmp_path / "pairs.onnx"
    float_graph = prepared_build.graphs.float_graph(CPU_FP32)
    quantize(float_graph, SmoothedInt8(layout="pairs"), graph, items=prepared_build.items)
    counts = op_counts(graph)
    assert counts["MatMul"] == 13
    assert counts["DequantizeLinear"] == 12 + counts["QuantizeLinear"]
    assert all(not node.domain for node in onnx.load(graph).graph.node)
    outputs = prepared_build.answers(CPU_INT8, graph)
    operators = prepared_build.answers(CPU_INT8, prepared_build.graphs.graph(CPU_INT8))
    # On CPUs whose int8 sums overflow, the layout `pairs` stores seven bits per weight, not eight.
    minimum = 0.998 if read_cpu_info().int8_overflows else 0.9999
    assert cosines(outputs, operators).min() > minimum


@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=str)
def test_openvino_passes_the_gate(case: SmoothingCase, tmp_path: Path) -> None:
    """The gate compares outputs with fp32 torch, and batched with unbatched outputs."""
    pytest.importorskip("openvino", reason="`openvino` is not installed")
    build = prepare_case(case, tmp_path)
    runner = RecordingRunner(tmp_path / "gate")
    accepted = build.accuracy_gate(runner, Gate()).first_accepted(OPENVINO_INT8)
    assert accepted is not None, runner.lines("gate")
    assert accepted.parity.batched_cosine_worst > 0.999
    assert accepted.excluded_nodes == ()


def test_layers_of_neurons_keep_one_width(tmp_path: Path) -> None:
    """The planted neuron is copied. The other layer is padded with as many empty neurons."""
    source = plant_outlier(tiny_checkpoint(tmp_path / "model"), layer=0, factor=30.0)
    build = PreparedBuild.of(source, tmp_path / "work")
    graph = onnx.load(build.graphs.graph(CPU_INT8))
    shapes = {i.name: tuple(i.dims) for i in graph.graph.initializer if i.name.endswith("_int8")}
    inner = [shape for shape in shapes.values() if shape[0] < shape[1]]
    float_graph = matrices(build.graphs.float_graph(CPU_FP32))
    width = max(matrix.shape[1] for matrix in float_graph.values())
    assert len(inner) == 2
    assert {columns for _, columns in inner} == {width + 16}


def test_excluded_nodes_read_float_activations(
    prepared_build: PreparedBuild, tmp_path: Path
) -> None:
    graph = tmp_path / "graph.onnx"
    excluded = tuple(prepared_build.graphs.sensitive_nodes(CPU_INT8)[:3])
    float_graph = prepared_build.graphs.float_graph(CPU_FP32)
    quantize(
        float_graph, SmoothedInt8(), graph, items=prepared_build.items, excluded_nodes=excluded
    )
    counts = op_counts(graph)
    assert (counts["MatMulIntegerToFloat"], counts["MatMulNBits"]) == (9, 3)
    outputs = prepared_build.answers(CPU_INT8, graph)
    unbatched = prepared_build.answers(CPU_INT8, graph, batch_items=1)
    assert cosines(outputs, unbatched).min() > 0.9999


GATED = CASES[6]
TOKEN_RANGES = replace(CPU_INT8, quantization=SmoothedInt8(gated_ranges="token"))


def test_gated_layers_may_have_the_range_of_each_token(tmp_path: Path) -> None:
    build = prepare_case(GATED, tmp_path)
    graph = build.graphs.graph(TOKEN_RANGES)
    counts = op_counts(graph)
    assert counts["MatMulIntegerToFloat"] == GATED.static
    assert counts["ReduceMax"] == 2  # one per layer
    expected = build.answers(CPU_FP32, build.graphs.graph(CPU_FP32), batch_items=1)
    unbatched = build.answers(CPU_INT8, graph, batch_items=1)
    assert cosines(unbatched, build.answers(CPU_INT8, graph, batch_items=64)).min() > 0.99999
    assert cosines(unbatched, expected).mean() > 0.99


@pytest.mark.parametrize(("case", "has_other"), [(GATED, True), (CASES[2], False)], ids=str)
def test_range_of_each_token_is_the_first_fallback_of_gated_layers(
    case: SmoothingCase, has_other: bool, tmp_path: Path
) -> None:
    build = prepare_case(case, tmp_path)
    runner = RecordingRunner(tmp_path / "gate")
    recipe = BuildRecipe(candidates=(CPU_INT8,))
    encoder_build = build.encoder_build(runner, recipe)
    attempts = encoder_build.attempts(CPU_INT8)
    first = next(attempts)
    encoder_build.export(first)
    second = next(attempts)
    assert first.recipe == CPU_INT8
    assert second.recipe == (TOKEN_RANGES if has_other else CPU_INT8)
    assert bool(second.excluded_nodes) is not has_other
    assert (", ranges per token" in second.label) is has_other


def test_pairs_have_no_ranges_of_tokens() -> None:
    with pytest.raises(ValueError, match="no ranges per token"):
        SmoothedInt8(layout="pairs", gated_ranges="token")
