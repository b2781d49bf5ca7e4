"""int8 MatMuls with one scale per token, for decoders on CPUs.

ONNX Runtime's dynamic quantization uses one scale per tensor, so an output would depend on the
other requests in the batch. Its blockwise int4 MatMuls are batch invariant, but take twice the time
of int8 for several tokens and three times for a prompt. This rewrite divides each row of
activations, which is one token, by its largest absolute value and rounds to int8. The graph then
multiplies the row by int8 weights with one scale per column, and scales back. Integer sums are
exact, so each row is batch invariant.

    x [.., K] -> m = max|x| -> q = round(127 x / m) -> (q . W) [.., N] / 127 . column scales -> * m

With calibration texts, `smoothquant.py` first moves outliers of the activations into the weights.
An activation then gets one static scale if its rows have similar sizes, and if a norm or an
attention computes it. This saves four small operators per MatMul.

    x [.., K] -> q = round(x / scale) -> (q . W) [.., N] . scale . column scales

An embedding table from which the graph gathers rows becomes int8 with one scale per row. Experts
become int8 in blocks, because ONNX Runtime has no other fast int8 operator for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.block_weights import (
    EXPERT_WEIGHT_INPUTS,
    EXPERTS,
    QUANTIZED_EXPERTS,
    expert_attributes,
    has_whole_blocks,
    quantize_experts,
)
from build_artifacts.decoders.calibration import SCALE_MARGIN, CalibrationTexts
from build_artifacts.decoders.float_graph import FloatGraph, scale_queries
from build_artifacts.decoders.smoothquant import is_bounded, smooth_activations
from build_artifacts.decoders.tensor_file import TensorFile
from build_artifacts.graph_nodes import ORT_DOMAIN
from build_artifacts.types import MAX_INT8, FloatArray

if TYPE_CHECKING:
    import onnx

_ZERO_POINT = 128  # ONNX Runtime's kernels read activations as uint8: int8 plus this number
_STEP, _SHIFT, _LAST_AXIS = "rowwise_step", "rowwise_shift", "rowwise_axis"
# Smaller tensors stay float: quantization saves nothing.
_MIN_QUANTIZED_VALUES = 1 << 12
# Maximum rounding noise of a static scale, relative to the RMS of the median row. A dynamic scale
# adds 0.01 to 0.03.
_MAX_NOISE = 0.05


def quantize_per_token(
    graph: Path, into: Path, calibration: CalibrationTexts | None = None
) -> None:
    """Write an int8 copy of `graph` to `into`, and its weights to the same directory.

    `into` must be in another directory, so that its weight file does not replace that of `graph`.
    With `calibration`, the rewrite smooths activations and uses static scales where they are
    precise enough.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    with TensorFile.open(into) as file:
        rewriter = _PerTokenRewriter(model, graph.parent, file)
        if calibration is not None:
            with TemporaryDirectory(dir=into.parent) as scratch:
                activations = rewriter.list_activations()
                rewriter.calibrate(calibration.observe(graph, activations, Path(scratch)))
        rewriter.rewrite()
    onnx.save(model, into)


def _is_large_matrix(table: onnx.TensorProto) -> bool:
    """Return whether the tensor is a float matrix of at least _MIN_QUANTIZED_VALUES."""
    is_matrix = len(table.dims) == 2 and table.data_type == table.FLOAT
    return is_matrix and int(np.prod(table.dims)) >= _MIN_QUANTIZED_VALUES


def _gathers_rows(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and all(attribute.i == 0 for attribute in node.attribute)


class _QuantizedRows(NamedTuple):
    """Names of the graph values that represent a quantized activation."""

    values: str
    step: str  # step size of `values`
    scales: str | None = None  # [.., 1], factor of each output row; None with a static scale


class _PerTokenRewriter:
    """Rewriter of the large MatMuls and embedding tables of one graph to int8."""

    def __init__(self, model: onnx.ModelProto, directory: Path, file: TensorFile) -> None:
        """Prepare the rewrite of `model`, whose weight file is in `directory`, to `file`."""
        self._graph = model.graph
        self._floats = FloatGraph(model, directory)
        self._file = file
        self._quantizable = {
            table.name for table in model.graph.initializer if _is_large_matrix(table)
        }
        self._nodes: list[onnx.NodeProto] = []
        self._added: dict[str, onnx.TensorProto] = {}
        self._static_scales: dict[str, np.float32] = {}  # static scale by activation
        self._quantized_rows: dict[str, _QuantizedRows] = {}  # quantized values by activation
        if all(opset.domain != ORT_DOMAIN for opset in model.opset_import):
            model.opset_import.add(domain=ORT_DOMAIN, version=1)

    def list_activations(self) -> list[str]:
        """Return the names of the activations that enter a MatMul to be quantized."""
        products = (node for node in self._graph.node if node.op_type == "MatMul")
        names = (node.input[0] for node in products if self._is_quantizable(node.input[1]))
        return list(dict.fromkeys(names))

    def calibrate(self, observed: Mapping[str, FloatArray]) -> None:
        """Smooth the observed activations, [tokens, K], and choose static scales.

        Also move the score scale of each attention node into its query projection.
        """
        for value, rows in observed.items():
            scale = compute_static_scale(smooth_activations(self._floats, value, rows))
            if scale is not None and is_bounded(self._floats, value):
                self._static_scales[value] = scale
        for node in self._graph.node:
            scale_queries(self._floats, node)

    def rewrite(self) -> None:
        for node in self._graph.node:
            if node.op_type == "Transpose" and self._is_quantizable(node.input[0]):
                self._transpose(node)
            elif node.op_type == "MatMul" and self._is_quantizable(node.input[1]):
                self._quantize_matmul(node)
            elif node.op_type == EXPERTS and self._has_quantizable_experts(node):
                self._quantize_experts(node)
            elif _gathers_rows(node) and self._is_quantizable(node.input[0]):
                self._quantize_gather(node)
            else:
                self._nodes.append(node)
        self._constant(_STEP, np.array(1 / MAX_INT8, np.float32))
        self._constant(_SHIFT, np.array(_ZERO_POINT, np.uint8))
        self._constant(_LAST_AXIS, np.array([-1], np.int64))
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        used = {name for node in self._nodes for name in node.input}
        tables = [
            self._file.write(name, self._floats.read(name))
            for name in self._floats.names
            if name in used
        ]
        del self._graph.initializer[:]
        self._graph.initializer.extend([*tables, *self._added.values()])

    def _is_quantizable(self, name: str) -> bool:
        return name in self._quantizable

    def _has_quantizable_experts(self, node: onnx.NodeProto) -> bool:
        return all(
            has_whole_blocks(self._floats.shape(node.input[index]))
            for index in EXPERT_WEIGHT_INPUTS
        )

    def _transpose(self, node: onnx.NodeProto) -> None:
        """Make a transposed embedding table a tensor, because a tied head multiplies by it."""
        self._floats.add_transposed(node.input[0], node.output[0])
        self._quantizable.add(node.output[0])

    def _quantize_matmul(self, node: onnx.NodeProto) -> None:
        name = node.input[1]
        weights = self._floats.read(name)
        scales = _compute_scales(weights, axis=0)
        self._constant(f"{name}_int8", _round_to_int8(weights, scales))
        self._constant(f"{name}_scales", scales.ravel())
        rows, output = self._quantize_rows(node.input[0]), node.output[0]
        product = output if rows.scales is None else f"{output}_unscaled"
        inputs = [rows.values, f"{name}_int8", rows.step, f"{name}_scales", _SHIFT]
        self._node("MatMulIntegerToFloat", inputs, product, domain=ORT_DOMAIN)
        if rows.scales is not None:
            self._node("Mul", [product, rows.scales], output)

    def _quantize_rows(self, value: str) -> _QuantizedRows:
        """Quantize an activation once for all its consumers."""
        rows = self._quantized_rows.get(value)
        if rows is None:
            if value in self._static_scales:
                rows = self._quantize_static(value)
            else:
                rows = self._quantize_dynamic(value)
            self._quantized_rows[value] = rows
        return rows

    def _quantize_static(self, value: str) -> _QuantizedRows:
        rows = _QuantizedRows(f"{value}_int8", f"{value}_step")
        self._constant(rows.step, np.array(self._static_scales[value]))
        self._node("QuantizeLinear", [value, rows.step, _SHIFT], rows.values)
        return rows

    def _quantize_dynamic(self, value: str) -> _QuantizedRows:
        sizes, scales, shares = (f"{value}_{part}" for part in ("sizes", "row_scales", "shares"))
        self._node("Abs", [value], sizes)
        self._node("ReduceMax", [sizes, _LAST_AXIS], scales, keepdims=1)
        # A row of zeros gives NaN here and arbitrary integers in QuantizeLinear. The row scale of 0
        # makes the output zero.
        self._node("Div", [value, scales], shares)
        self._node("QuantizeLinear", [shares, _STEP, _SHIFT], f"{value}_int8")
        return _QuantizedRows(f"{value}_int8", _STEP, scales)

    def _quantize_experts(self, node: onnx.NodeProto) -> None:
        inputs = []
        for index, name in enumerate(node.input):
            if index not in EXPERT_WEIGHT_INPUTS:
                inputs.append(name)
                continue
            blocks = quantize_experts(self._floats.read(name), 8)
            for part, array in blocks._asdict().items():
                inputs.append(f"{name}_{part}")
                self._constant(inputs[-1], array)
        self._node(
            QUANTIZED_EXPERTS, inputs, node.output[0], domain=ORT_DOMAIN, **expert_attributes(8)
        )
        self._nodes[-1].attribute.extend(node.attribute)

    def _quantize_gather(self, node: onnx.NodeProto) -> None:
        import onnx

        name, output = node.input[0], node.output[0]
        table = self._floats.read(name)
        scales = _compute_scales(table, axis=1)
        self._constant(f"{name}_words_int8", _round_to_int8(table, scales))
        self._constant(f"{name}_words_scales", scales)
        self._node("Gather", [f"{name}_words_int8", node.input[1]], f"{output}_words_int8")
        self._node("Gather", [f"{name}_words_scales", node.input[1]], f"{output}_words_scales")
        self._node("Cast", [f"{output}_words_int8"], f"{output}_words", to=onnx.TensorProto.FLOAT)
        self._node("Mul", [f"{output}_words", f"{output}_words_scales"], output)

    def _node(
        self, kind: str, inputs: list[str], output: str, *, domain: str = "", **attributes: int
    ) -> None:
        import onnx

        node_proto = onnx.helper.make_node(
            kind, inputs, [output], output, domain=domain, **attributes
        )
        self._nodes.append(node_proto)

    def _constant(self, name: str, values: NDArray[np.generic]) -> None:
        if name not in self._added:
            self._added[name] = self._file.write(name, values)


def _compute_scales(weights: FloatArray, axis: int) -> FloatArray:
    largest = np.abs(weights).max(axis=axis, keepdims=True)
    return np.where(largest == 0, 1, largest / MAX_INT8).astype(np.float32)


def _round_to_int8(weights: FloatArray, scales: FloatArray) -> NDArray[np.int8]:
    rounded: NDArray[np.int8] = np.rint(weights / scales).clip(-MAX_INT8, MAX_INT8).astype(np.int8)
    return rounded


def compute_static_scale(rows: FloatArray) -> np.float32 | None:
    """Return one scale for all rows [N, K]; None if it is zero or too coarse for half the rows.

    Rounding to steps of `scale` adds noise with an RMS of scale / sqrt(12). The scale is too coarse
    for a row if this noise exceeds _MAX_NOISE times the row's RMS.
    """
    scale = SCALE_MARGIN * np.abs(rows).max() / MAX_INT8
    sizes = np.sqrt(np.square(rows, dtype=np.float64).mean(axis=1))
    noise = np.median(scale / np.sqrt(12) / np.maximum(sizes, 1e-12))
    return np.float32(scale) if 0 < noise <= _MAX_NOISE else None
