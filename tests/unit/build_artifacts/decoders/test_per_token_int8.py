from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from build_artifacts.decoders.calibration import CalibrationTexts
from build_artifacts.decoders.per_token_int8 import compute_static_scale, quantize_per_token
from build_artifacts.types import FloatArray
from deployments.host.machine import CpuInfo
from tests.support.decoder_graphs import VOCABULARY, open_graph, spec_of
from tests.support.outlier_models import graph_with_outliers

HIDDEN, INNER, WORDS = 64, 96, 200


@pytest.fixture(scope="module")
def tables() -> dict[str, FloatArray]:
    random = np.random.default_rng(5)
    drawn = {
        "head": random.normal(size=(HIDDEN, WORDS)),  # transposed, it is the embedding table
        "up": random.normal(size=(HIDDEN, INNER)),
        "gate": random.normal(size=(HIDDEN, INNER)),
        "down": random.normal(size=(INNER, HIDDEN)),
        "small": random.normal(size=(HIDDEN, 2)),
    }
    return {name: table.astype(np.float32) for name, table in drawn.items()}


@pytest.fixture(scope="module")
def graph(tables: dict[str, FloatArray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a float graph: embeddings, a gated MLP, and the two output heads `head` and `small`.

    The MatMuls `up` and `gate` share an input. `head` has the weights of the embeddings.
    """
    nodes = [
        helper.make_node("Transpose", ["head"], ["words"], perm=[1, 0]),
        helper.make_node("Gather", ["words", "ids"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "up"], ["upper"]),
        helper.make_node("MatMul", ["hidden", "gate"], ["gated"]),
        helper.make_node("Mul", ["upper", "gated"], ["inner"]),
        helper.make_node("MatMul", ["inner", "down"], ["after"]),
        helper.make_node("MatMul", ["after", "head"], ["scores"]),
        helper.make_node("MatMul", ["after", "small"], ["few"]),
    ]
    outputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["B", "T", WORDS]),
        helper.make_tensor_value_info("few", TensorProto.FLOAT, ["B", "T", 2]),
    ]
    node_proto = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["B", "T"])],
        outputs,
        [numpy_helper.from_array(table, name) for name, table in tables.items()],
    )
    model = helper.make_model(
        node_proto, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    path = tmp_path_factory.mktemp("fp32") / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def quantized(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    quantize_per_token(graph, path)
    return path


def scores(path: Path, ids: NDArray[np.int64]) -> FloatArray:
    options = ort.SessionOptions()
    # The engine sets this option on CPUs without VNNI. The option has no effect on other CPUs.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    result: FloatArray = session.run(["scores"], {"ids": ids})[0]
    return result


def test_per_token_int8_is_close_to_float(graph: Path, quantized: Path) -> None:
    ids = np.random.default_rng(1).integers(0, WORDS, (4, 6))
    exact, rounded = (scores(path, ids).reshape(-1, WORDS) for path in (graph, quantized))
    norms = np.linalg.norm(exact, axis=1) * np.linalg.norm(rounded, axis=1)
    cosines = (exact * rounded).sum(axis=1) / norms
    assert cosines.min() > 0.999
    assert np.abs(exact - rounded).max() > 0, "nothing was rounded: the test shows nothing"


def test_per_token_int8_is_batch_invariant(quantized: Path) -> None:
    ids = np.random.default_rng(2).integers(0, WORDS, (5, 7))
    together = scores(quantized, ids)
    for row in range(5):
        np.testing.assert_array_equal(scores(quantized, ids[row : row + 1])[0], together[row])
    np.testing.assert_array_equal(scores(quantized, ids[:, :1])[:, 0], together[:, 0])


def test_matmuls_share_quantized_activation(quantized: Path) -> None:
    kinds = [node.op_type for node in onnx.load(quantized).graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 4
    assert kinds.count("QuantizeLinear") == 3


def test_only_large_matrices_are_quantized(quantized: Path) -> None:
    model = onnx.load(quantized)
    floats = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    assert "small" in floats
    assert not floats & {"head", "up", "gate", "down", "words"}
    assert [node.op_type for node in model.graph.node].count("Transpose") == 0


def test_gathered_columns_stay_float(tables: dict[str, FloatArray], tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["head", "ids"], ["scores"], axis=1)],
        "columns",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [HIDDEN, "N"])],
        [numpy_helper.from_array(tables["head"], "head")],
    )
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "fp32.onnx")
    quantize_per_token(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    ids = np.array([0, HIDDEN, WORDS - 1])
    np.testing.assert_array_equal(scores(tmp_path / "int8.onnx", ids), tables["head"][:, ids])


def test_row_of_zeros_returns_zeros(
    graph: Path, tables: dict[str, FloatArray], tmp_path: Path
) -> None:
    model = onnx.load(graph)
    silenced = tables["head"].copy()
    silenced[:, 3] = 0
    for table in model.graph.initializer:
        if table.name == "head":
            table.CopyFrom(numpy_helper.from_array(silenced, "head"))
    onnx.save(model, tmp_path / "model.onnx")
    path = tmp_path / "int8.onnx"
    quantize_per_token(tmp_path / "model.onnx", path)
    result = scores(path, np.array([[3, 5]]))
    assert not result[0, 0].any()
    assert np.isfinite(result).all()
    assert result[0, 1].any()


def test_weights_are_in_one_external_file(quantized: Path) -> None:
    assert {path.name for path in quantized.parent.iterdir()} == {"model.onnx", "model.onnx.data"}


TEXTS = tuple(
    tuple(np.random.default_rng(seed).integers(0, VOCABULARY, 24).tolist()) for seed in range(6)
)


def test_calibration_reduces_error_and_operators(tmp_path: Path) -> None:
    path = graph_with_outliers(tmp_path / "model.onnx")
    plain, taught = tmp_path / "plain" / "model.onnx", tmp_path / "taught" / "model.onnx"
    for into in (plain, taught):
        into.parent.mkdir()
    quantize_per_token(path, plain)
    quantize_per_token(path, taught, CalibrationTexts(TEXTS[:4], spec_of(path).generation_config))
    exact, dynamic, static = (logits_of(graph) for graph in (path, plain, taught))
    assert np.abs(static - exact).mean() < np.abs(dynamic - exact).mean() / 3
    kinds = [[node.op_type for node in onnx.load(graph).graph.node] for graph in (plain, taught)]
    # Norms and attention have static scales in both layers; the other activations are dynamic.
    assert [result.count("ReduceMax") for result in kinds] == [9, 3]
    assert [result.count("MatMulIntegerToFloat") for result in kinds] == [11, 11]


def test_static_scales_are_batch_invariant(tmp_path: Path) -> None:
    path, into = graph_with_outliers(tmp_path / "model.onnx"), tmp_path / "int8.onnx"
    quantize_per_token(path, into, CalibrationTexts(TEXTS[:4], spec_of(path).generation_config))
    engine = open_graph(into)
    for row in range(4):
        engine.prefill(row, TEXTS[row], 0)
    ids, lengths = np.array([5, 6, 7, 8]), np.array([len(text) for text in TEXTS[:4]])
    together = engine.decode(ids, lengths).copy()
    alone = engine.decode(ids[:1], lengths[:1]).copy()
    engine.close()
    np.testing.assert_array_equal(alone[0], together[0])


def test_results_are_equal_on_cpu_with_int8_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, into = graph_with_outliers(tmp_path / "model.onnx"), tmp_path / "int8.onnx"
    quantize_per_token(path, into, CalibrationTexts(TEXTS[:4], spec_of(path).generation_config))
    here = logits_of(into)
    old = CpuInfo("old", "1", ("avx2",), "x86_64")
    monkeypatch.setattr("deployments.engines.onnx.sessions.read_cpu_info", lambda: old)
    np.testing.assert_array_equal(logits_of(into), here)


def test_static_scale_requires_similar_rows() -> None:
    rows = np.random.default_rng(4).normal(size=(50, 64)).astype(np.float32)
    scale = compute_static_scale(rows)
    assert scale is not None
    assert np.abs(rows).max() / 127 < scale < np.abs(rows).max() / 100
    rows[0] *= 100
    assert compute_static_scale(rows) is None
    assert compute_static_scale(np.zeros((4, 8), np.float32)) is None


def logits_of(graph: Path) -> FloatArray:
    """Return the logits after every token of texts outside the calibration data."""
    engine = open_graph(graph)
    read = [engine.prefill(0, text, 0, all_logits=True).copy() for text in TEXTS[4:]]
    engine.close()
    return np.concatenate(read)
