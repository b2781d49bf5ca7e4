from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from build_artifacts.decoders.rowwise import quantise_rows

HIDDEN, INNER, WORDS = 64, 96, 200
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def tables() -> dict[str, Array]:
    random = np.random.default_rng(5)
    drawn = {
        "head": random.normal(size=(HIDDEN, WORDS)),  # turned, it is the word table too
        "up": random.normal(size=(HIDDEN, INNER)),
        "gate": random.normal(size=(HIDDEN, INNER)),
        "down": random.normal(size=(INNER, HIDDEN)),
        "small": random.normal(size=(HIDDEN, 2)),
    }
    return {name: table.astype(np.float32) for name, table in drawn.items()}


@pytest.fixture(scope="module")
def graph(tables: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ids [B, T] -> words -> two products of one value, and one of their product -> scores."""
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
    made = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["B", "T"])],
        outputs,
        [numpy_helper.from_array(table, name) for name, table in tables.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path_factory.mktemp("fp32") / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def quantised(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    quantise_rows(graph, path)
    return path


def scores(path: Path, ids: NDArray[np.int64]) -> Array:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: Array = session.run(["scores"], {"ids": ids})[0]
    return found


def test_the_int8_graph_answers_nearly_alike(graph: Path, quantised: Path) -> None:
    ids = np.random.default_rng(1).integers(0, WORDS, (4, 6))
    exact, rounded = (scores(path, ids).reshape(-1, WORDS) for path in (graph, quantised))
    norms = np.linalg.norm(exact, axis=1) * np.linalg.norm(rounded, axis=1)
    cosines = (exact * rounded).sum(axis=1) / norms
    assert cosines.min() > 0.999
    assert np.abs(exact - rounded).max() > 0, "nothing was rounded: the test shows nothing"


def test_a_row_is_the_same_in_any_company(quantised: Path) -> None:
    ids = np.random.default_rng(2).integers(0, WORDS, (5, 7))
    together = scores(quantised, ids)
    for row in range(5):
        np.testing.assert_array_equal(scores(quantised, ids[row : row + 1])[0], together[row])
    np.testing.assert_array_equal(scores(quantised, ids[:, :1])[:, 0], together[:, 0])


def test_products_of_one_value_share_its_rounding(quantised: Path) -> None:
    kinds = [node.op_type for node in onnx.load(quantised).graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 4
    assert kinds.count("QuantizeLinear") == 3


def test_small_tables_stay_as_they_are_and_large_ones_are_gone(quantised: Path) -> None:
    model = onnx.load(quantised)
    floats = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    assert "small" in floats
    assert not floats & {"head", "up", "gate", "down", "words"}
    assert [node.op_type for node in model.graph.node].count("Transpose") == 0


def test_a_row_of_zeros_gives_zeros(graph: Path, tables: dict[str, Array], tmp_path: Path) -> None:
    model = onnx.load(graph)
    silent = tables["head"].copy()
    silent[:, 3] = 0
    for table in model.graph.initializer:
        if table.name == "head":
            table.CopyFrom(numpy_helper.from_array(silent, "head"))
    onnx.save(model, tmp_path / "model.onnx")
    path = tmp_path / "int8.onnx"
    quantise_rows(tmp_path / "model.onnx", path)
    found = scores(path, np.array([[3, 5]]))
    assert not found[0, 0].any()
    assert np.isfinite(found).all()
    assert found[0, 1].any()


def test_the_weights_lie_in_one_file_beside_the_graph(quantised: Path) -> None:
    assert {path.name for path in quantised.parent.iterdir()} == {"model.onnx", "model.onnx.data"}
