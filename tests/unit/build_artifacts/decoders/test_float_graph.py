"""Weights of a float graph, in the graph file and in a weight file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from build_artifacts.decoders.float_graph import FloatGraph
from build_artifacts.decoders.tensor_file import TensorFile

MATRIX = np.arange(32 * 24, dtype=np.float32).reshape(32, 24)
SMALL = np.array([1, 2, 3], np.int64)


@pytest.fixture(params=["graph file", "weight file"])
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> FloatGraph:
    path = tmp_path / "model.onnx"
    tables = {"matrix": MATRIX, "small": SMALL}
    if request.param == "graph file":
        initializers = [numpy_helper.from_array(values, name) for name, values in tables.items()]
    else:
        with TensorFile.open(path) as file:
            file.write("before", np.zeros(1025, np.int8))
            initializers = [file.write(name, values) for name, values in tables.items()]
    nodes = [helper.make_node("MatMul", ["x", "matrix"], ["y"])]
    value = helper.make_tensor_value_info
    inputs, outputs = ([value(name, TensorProto.FLOAT, None)] for name in ("x", "y"))
    model = helper.make_model(helper.make_graph(nodes, "graph", inputs, outputs, initializers))
    onnx.save(model, path)
    return FloatGraph(onnx.load(path, load_external_data=False), tmp_path)


def test_tensors_are_read_from_either_place(graph: FloatGraph) -> None:
    assert graph.names == ("matrix", "small")
    assert graph.shape("matrix") == (32, 24)
    np.testing.assert_array_equal(graph.read("matrix"), MATRIX)
    np.testing.assert_array_equal(graph.read("small"), SMALL)


def test_changes_are_part_of_what_is_read(graph: FloatGraph) -> None:
    graph.add_transposed("matrix", "turned")
    columns, rows = np.array([2, 3], np.float32), np.linspace(1, 2, 32, dtype=np.float32)
    graph.scale_columns(["matrix"], 5, columns)
    graph.scale_rows("matrix", rows)
    expected = MATRIX.copy()
    expected[:, 5:7] *= columns
    expected *= rows[:, None]
    np.testing.assert_array_equal(graph.read("matrix"), expected)
    np.testing.assert_array_equal(graph.read("turned"), expected.T)


def test_weight_file_is_readable_by_onnx(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    tables = {"large": MATRIX, "turned": MATRIX.T, "small": SMALL, "scalar": np.array(1.5)}
    with TensorFile.open(path) as file:
        written = [file.write(name, values) for name, values in tables.items()]
    onnx.save(helper.make_model(helper.make_graph([], "graph", [], [], written)), path)
    for table in onnx.load(path).graph.initializer:
        values = numpy_helper.to_array(table)
        assert values.shape == tables[table.name].shape
        np.testing.assert_array_equal(values, tables[table.name])
    places = [table.data_location == TensorProto.EXTERNAL for table in written]
    assert places == [True, True, False, False]
