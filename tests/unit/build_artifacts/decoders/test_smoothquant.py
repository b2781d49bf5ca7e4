from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnx
import pytest

from build_artifacts.decoders.calibration import CalibrationTexts
from build_artifacts.decoders.float_graph import FloatGraph, scale_queries
from build_artifacts.decoders.smoothquant import is_bounded, smooth_activations
from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray
from tests.support.decoder_graphs import VOCABULARY, open_graph, spec_of, tiny_graph
from tests.support.outlier_models import LOUD_CHANNELS, graph_with_outliers

NORMED, ATTENDED, GATED = ("a_0", "f_1"), ("c_0",), ("k_1",)
TEXTS = tuple(
    tuple(np.random.default_rng(seed).integers(0, VOCABULARY, 20).tolist()) for seed in range(4)
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return graph_with_outliers(tmp_path / "model.onnx")


def logits_of(graph: Path) -> FloatArray:
    engine = open_graph(graph)
    read = [engine.prefill(row, text, 0, all_logits=True).copy() for row, text in enumerate(TEXTS)]
    engine.close()
    return np.stack(read)


def collect_scales(graph: Path, values: Sequence[str]) -> Mapping[str, FloatArray]:
    texts = CalibrationTexts(TEXTS, spec_of(graph).generation_config)
    return texts.observe(graph, values, Path(mkdtemp(dir=graph.parent)))


def save(model: onnx.ModelProto, graph: FloatGraph, into: Path) -> None:
    """Save the model with the changed weights of `graph`."""
    for table in model.graph.initializer:
        table.CopyFrom(onnx.numpy_helper.from_array(graph.read(table.name), table.name))
    onnx.save(model, into)


def spread_of(values: FloatArray) -> float:
    """Return the ratio of the largest to the median of the maximum absolute values of channels."""
    sizes = np.abs(values).max(axis=0)
    return float(sizes.max() / np.median(sizes))


def test_observe_returns_activations_of_all_tokens(path: Path) -> None:
    observed = collect_scales(path, ["a_0", "k_1"])
    assert {name: values.shape for name, values in observed.items()} == {
        "a_0": (80, 64),
        "k_1": (80, 96),
    }
    loud = np.abs(observed["a_0"]).max(axis=0)
    assert set(np.argsort(loud)[-2:]) == set(LOUD_CHANNELS)


def test_float_graph_that_does_not_run_is_unsupported(path: Path) -> None:
    texts = CalibrationTexts([(VOCABULARY,)], spec_of(path).generation_config)  # has no vector
    with pytest.raises(UnsupportedModel, match=r"not run the exported graph: .*Gather"):
        texts.observe(path, ["a_0"], path.parent)
    with pytest.raises(UnsupportedModel, match=r"not run the exported graph: .*Gather"):
        list(texts.observe_kv_cache(path))


def test_smoothing_reduces_outliers_and_preserves_outputs(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    graph = FloatGraph(model, path.parent)
    values = [*NORMED, *ATTENDED, *GATED]
    observed = collect_scales(path, values)
    expected = {value: smooth_activations(graph, value, observed[value]) for value in values}
    smoothed = tmp_path / "smoothed.onnx"
    save(model, graph, smoothed)
    np.testing.assert_allclose(logits_of(smoothed), logits_of(path), atol=2e-4)
    after = collect_scales(smoothed, values)
    for value in values:
        np.testing.assert_allclose(after[value], expected[value], rtol=1e-3, atol=1e-4)
        assert spread_of(after[value]) < spread_of(observed[value]), value
    for value in NORMED:
        assert spread_of(observed[value]) > 20 > 5 > spread_of(after[value])


def test_activation_without_scale_target_is_unchanged(tmp_path: Path) -> None:
    """No tensor can absorb the factors: all norms share a scale, and a Slice precedes the head."""
    model = onnx.load(tiny_graph(tmp_path / "model.onnx"))
    graph = FloatGraph(model, tmp_path)
    before = {name: graph.read(name) for name in graph.names}
    for value in ("a_0", "f_1", "wanted", "input_ids"):
        observed = np.ones((3, 64), np.float32)
        assert smooth_activations(graph, value, observed) is observed
    for name, values in before.items():
        np.testing.assert_array_equal(graph.read(name), values)


def test_activation_with_other_consumers_is_unchanged(path: Path) -> None:
    model = onnx.load(path)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("a_0"))
    observed = np.ones((3, 64), np.float32)
    assert smooth_activations(FloatGraph(model, path.parent), "a_0", observed) is observed


@pytest.mark.parametrize(
    ("value", "bounded"), [("a_0", True), ("c_1", True), ("k_0", False), ("input_ids", False)]
)
def test_norm_and_attention_outputs_are_bounded(path: Path, value: str, bounded: bool) -> None:
    assert is_bounded(FloatGraph(onnx.load(path), path.parent), value) is bounded


def test_scale_queries_moves_scale_into_weights(path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    graph = FloatGraph(model, path.parent)
    for node in model.graph.node:
        scale_queries(graph, node)
    scales = [
        attribute.f
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "scale"
    ]
    assert scales == [1.0, 1.0]
    scaled = tmp_path / "scaled.onnx"
    save(model, graph, scaled)
    np.testing.assert_allclose(logits_of(scaled), logits_of(path), atol=2e-4)
