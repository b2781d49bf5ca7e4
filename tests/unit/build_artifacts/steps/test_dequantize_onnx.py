"""`read_weights` restores float weights from ONNX graphs, by torch parameter name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from build_artifacts.errors import UnsupportedModel
from build_artifacts.steps.dequantize_onnx import read_weights

PRODUCT = "/bert/pooler/dense/MatMul_Q4"
WEIGHT = "bert.pooler.dense.weight"


def write_graph(path: Path, nodes: list[onnx.NodeProto], **constants: NDArray[np.generic]) -> Path:
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", [], [], tensors)
    onnx.save(helper.make_model(graph), path)
    return path


def pack(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack two 4-bit values of the last axis into a byte, the first in the lower four bits."""
    return (values[..., ::2] | (values[..., 1::2] << 4)).astype(np.uint8)


def dequantize_blocks(axis: int, block: int, *, zero: str = "") -> onnx.NodeProto:
    inputs = ["t_quantized", "scale", *([zero] if zero else [])]
    return helper.make_node(
        "DequantizeLinear", inputs, ["y"], name="/embed/Dequantize", axis=axis, block_size=block
    )


def product(*inputs: str, bits: int = 4, columns: int = 8) -> onnx.NodeProto:
    return helper.make_node(
        "MatMulNBits", ["x", *inputs], ["y"], name=PRODUCT, domain="com.microsoft",
        N=3, K=columns, bits=bits, block_size=4,
    )  # fmt: skip


@pytest.fixture
def values() -> NDArray[np.uint8]:
    """Return three rows of two blocks; a block has four 4-bit values."""
    return np.random.default_rng(0).integers(0, 16, (3, 2, 4), dtype=np.uint8)


@pytest.fixture
def scales() -> NDArray[np.float32]:
    return np.linspace(0.5, 2, 6, dtype=np.float32).reshape(3, 2)


def test_blocks_of_four_bits_are_centered_at_eight(
    tmp_path: Path, values: NDArray[np.uint8], scales: NDArray[np.float32]
) -> None:
    path = write_graph(tmp_path / "m.onnx", [product("b", "s")], b=pack(values), s=scales)
    expected = (values.astype(np.float32) - 8) * scales[..., None]
    np.testing.assert_array_equal(read_weights(path)[WEIGHT], expected.reshape(3, 8))


def test_padding_of_the_last_block_is_cut(
    tmp_path: Path, values: NDArray[np.uint8], scales: NDArray[np.float32]
) -> None:
    node = product("b", "s", columns=6)
    path = write_graph(tmp_path / "m.onnx", [node], b=pack(values), s=scales.ravel())
    assert read_weights(path)[WEIGHT].shape == (3, 6)


def test_blocks_have_zero_points_of_their_own(
    tmp_path: Path, values: NDArray[np.uint8], scales: NDArray[np.float32]
) -> None:
    zeros = np.array([[1, 2], [3, 4], [5, 6]], np.uint8)
    path = write_graph(
        tmp_path / "m.onnx", [product("b", "s", "z")], b=pack(values), s=scales, z=pack(zeros)
    )
    expected = (values.astype(np.float32) - zeros[..., None]) * scales[..., None]
    np.testing.assert_array_equal(read_weights(path)[WEIGHT], expected.reshape(3, 8))


def test_bytes_are_blocks_of_eight_bits(
    tmp_path: Path, values: NDArray[np.uint8], scales: NDArray[np.float32]
) -> None:
    path = write_graph(tmp_path / "m.onnx", [product("b", "s", bits=8)], b=values, s=scales)
    expected = (values.astype(np.float32) - 128) * scales[..., None]
    np.testing.assert_array_equal(read_weights(path)[WEIGHT], expected.reshape(3, 8))


@pytest.mark.parametrize("gathered", [False, True])
def test_table_is_dequantized_before_or_after_its_rows_are_gathered(
    tmp_path: Path, gathered: bool
) -> None:
    table = np.arange(6, dtype=np.uint8).reshape(3, 2)
    nodes = [helper.make_node("Gather", ["words.weight_quantized", "ids"], ["rows"])]
    rows = "rows" if gathered else "words.weight_quantized"
    nodes.append(helper.make_node("DequantizeLinear", [rows, "scale", "zero"], ["y"]))
    constants = {"scale": np.float32(0.5), "zero": np.uint8(2), "words.weight_quantized": table}
    arrays = {name: np.asarray(value) for name, value in constants.items()}
    weights = read_weights(write_graph(tmp_path / "m.onnx", nodes, **arrays))
    np.testing.assert_array_equal(weights["words.weight"], (table.astype(np.float32) - 2) / 2)


def test_table_has_a_scale_per_index_of_an_axis(tmp_path: Path) -> None:
    table = np.ones((2, 3), np.int8)
    node = helper.make_node("DequantizeLinear", ["t_quantized", "scale"], ["y"], axis=0)
    scale = np.array([2, 3], np.float32)
    path = write_graph(tmp_path / "m.onnx", [node], t_quantized=table, scale=scale)
    np.testing.assert_array_equal(read_weights(path)["t"], [[2, 2, 2], [3, 3, 3]])


@pytest.mark.parametrize(("axis", "columns"), [(1, 4), (-1, 3)])
def test_table_has_a_scale_per_block(tmp_path: Path, axis: int, columns: int) -> None:
    """The last block of a row may be smaller than the others."""
    table = np.full((2, columns), 5, np.int8)
    scale = np.array([[1, 2], [3, 4]], np.float32)
    zero = np.array([[0, 1], [2, 3]], np.int8)
    node = dequantize_blocks(axis, 2, zero="zero")
    path = write_graph(tmp_path / "m.onnx", [node], t_quantized=table, scale=scale, zero=zero)
    expected = np.array([[5, 5, 8, 8], [9, 9, 8, 8]], np.float32)[:, :columns]
    np.testing.assert_array_equal(read_weights(path)["t"], expected)


def test_scales_of_too_few_blocks_are_refused_by_node(tmp_path: Path) -> None:
    table, scale = np.ones((2, 6), np.int8), np.ones((2, 2), np.float32)
    path = write_graph(
        tmp_path / "m.onnx", [dequantize_blocks(1, 2)], t_quantized=table, scale=scale
    )
    with pytest.raises(UnsupportedModel, match=r"the node `/embed/Dequantize` .* cannot be read"):
        read_weights(path)


def test_axis_counts_from_the_end(tmp_path: Path) -> None:
    node = helper.make_node("DequantizeLinear", ["t_quantized", "scale"], ["y"], axis=-2)
    scale, table = np.array([2, 3], np.float32), np.ones((2, 3), np.int8)
    path = write_graph(tmp_path / "m.onnx", [node], t_quantized=table, scale=scale)
    np.testing.assert_array_equal(read_weights(path)["t"], [[2, 2, 2], [3, 3, 3]])


@pytest.mark.parametrize(
    ("inputs", "bits", "reason"),
    [
        (("b", "s", "", "g"), 4, "scales in another order .`g_idx`"),
        (("b", "s"), 2, "its weights have 2 bits"),
        (("b", "absent"), 4, "unknown key 'absent'"),
    ],
)
def test_blocks_in_other_forms_are_refused_by_node(
    tmp_path: Path,
    values: NDArray[np.uint8],
    scales: NDArray[np.float32],
    inputs: tuple[str, ...],
    bits: int,
    reason: str,
) -> None:
    node = product(*inputs, bits=bits)
    order = np.arange(8, dtype=np.int32)
    path = write_graph(tmp_path / "m.onnx", [node], b=pack(values), s=scales, g=order)
    with pytest.raises(UnsupportedModel, match=f"the node `{PRODUCT}` .*{reason}"):
        read_weights(path)


@pytest.mark.parametrize(("operator", "options"), [("MatMul", {}), ("Gemm", {"transB": 1})])
def test_float_weight_is_oriented_as_in_torch(
    tmp_path: Path, operator: str, options: dict[str, int]
) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)  # [outputs, inputs]
    stored = weight if options else np.ascontiguousarray(weight.T)
    node = helper.make_node(operator, ["x", "w"], ["y"], name=f"/bert/dense/{operator}", **options)
    weights = read_weights(write_graph(tmp_path / "m.onnx", [node], w=stored))
    np.testing.assert_array_equal(weights["bert.dense.weight"], weight)


def test_float_parameters_keep_their_names(tmp_path: Path) -> None:
    bias = np.array([1, 2], np.float16)
    weights = read_weights(write_graph(tmp_path / "m.onnx", [], **{"bert.dense.bias": bias}))
    assert weights["bert.dense.bias"].dtype == np.float32


def test_file_that_is_no_graph_fails(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UnsupportedModel, match=r"`m\.onnx` cannot be read"):
        read_weights(path)


def test_weights_in_another_file_fail(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "m.onnx", [], w=np.zeros(4, np.float32))
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModel, match=r"`m\.onnx` cannot be read"):
        read_weights(path)
