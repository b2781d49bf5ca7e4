"""Replacement of products and of the word embedding table by int8 operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from build_artifacts.recipes import SmoothedInt8
from build_artifacts.smoothing.graph_edits import GraphEditor
from build_artifacts.smoothing.products import Product, array
from build_artifacts.smoothing.ranges import (
    MAX_INT8_WITHOUT_OVERFLOW,
    ByteRange,
    Int8Weights,
    TokenRange,
)
from deployments.host.machine import read_cpu_info

if TYPE_CHECKING:
    import onnx_ir as ir

    from build_artifacts.types import FloatArray

# Smaller tables stay float: quantization saves nothing.
_MIN_TABLE_VALUES = 1 << 12


class ProductWriter:
    """Writer of the products of one graph, in the layout of `scheme`."""

    def __init__(self, editor: GraphEditor, scheme: SmoothedInt8) -> None:
        self._editor = editor
        self._scheme = scheme
        # Quantized activations by name. All readers of an activation share its quantized value.
        self._quantized: dict[str, tuple[ir.Value, ir.Value, ir.Value]] = {}
        self._restored: dict[str, ir.Value] = {}
        # The same with ranges of tokens, and the factors of the tokens.
        self._rows: dict[str, tuple[ir.Value, ir.Value, ir.Value, ir.Value]] = {}

    def write(self, product: Product, byte_range: ByteRange | TokenRange | None) -> None:
        """Replace the MatMul and its Add. Without `byte_range`, the replacement is float."""
        place = product.output.producer()
        assert place is not None, "bug: a product without a node"
        if byte_range is None:
            output = self._write_float(product, place)
        elif isinstance(byte_range, TokenRange):
            output = self._write_rows(product, byte_range, place)
        elif self._scheme.layout == "operators":
            output = self._write_operator(product, byte_range, place)
        else:
            output = self._write_pairs(product, byte_range, place)
        product.output.replace_all_uses_with(output, replace_graph_outputs=True)

    def _write_float(self, product: Product, place: ir.Node) -> ir.Value:
        weights = self._editor.add_constant(f"{product.name}_weights", product.weights)
        return self._write_matmul(product, _read_source(product), weights, place)

    def _write_operator(self, product: Product, byte_range: ByteRange, place: ir.Node) -> ir.Value:
        values, scale, zero = self._quantize(_read_source(product), byte_range, product.node)
        weights = Int8Weights.of(product.weights)
        name, add = product.name, self._editor.add_constant
        inputs = [
            values,
            add(f"{name}_int8", weights.values),
            scale,
            add(f"{name}_scales", weights.scales),
            zero,
            add(f"{name}_zero", np.int8(0)),
            add(f"{name}_bias", product.bias),
        ]
        return self._editor.insert_before(place, "MatMulIntegerToFloat", inputs, f"{name}_static")

    def _write_rows(self, product: Product, token_range: TokenRange, place: ir.Node) -> ir.Value:
        """Write x = largest * (x / largest), where the integers hold x / largest."""
        name, add = product.name, self._editor.add_constant
        source = _read_source(product)
        assert source.name, "bug: a value without a name"
        if source.name not in self._rows:
            self._rows[source.name] = self._quantize_rows(source, token_range, product.node)
        values, step, zero, largest = self._rows[source.name]
        weights = Int8Weights.of(product.weights)
        integers = add(f"{name}_int8", weights.values)
        scales = add(f"{name}_scales", weights.scales)
        inputs = [values, integers, step, scales, zero]
        output = self._editor.insert_before(place, "MatMulIntegerToFloat", inputs, f"{name}_shares")
        output = self._editor.insert_before(place, "Mul", [output, largest], f"{name}_rows")
        return self._add_bias(product, output, place)

    def _quantize_rows(
        self, source: ir.Value, token_range: TokenRange, place: ir.Node
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Return the bytes of an activation [.., K], step, zero and largest magnitudes [.., 1]."""
        name, insert, add = source.name, self._editor.insert_before, self._editor.add_constant
        axis = add(f"{name}_axis", np.array([-1], np.int64))
        step, zero = add(f"{name}_step", token_range.step), add(f"{name}_zero", token_range.zero)
        sizes = insert(place, "Abs", [source], f"{name}_sizes")
        largest = insert(place, "ReduceMax", [sizes, axis], f"{name}_largest", keepdims=1)
        # A token of zeros gives NaN here and any integers below, which its factor of 0 makes 0.
        shares = insert(place, "Div", [source, largest], f"{name}_shares")
        values = insert(place, "QuantizeLinear", [shares, step, zero], f"{name}_int8")
        return values, step, zero, largest

    def _write_pairs(self, product: Product, byte_range: ByteRange, place: ir.Node) -> ir.Value:
        quantized = self._quantize(_read_source(product), byte_range, product.node)
        source = _read_source(product).name
        assert source, "bug: a value without a name"
        if source not in self._restored:
            self._restored[source] = self._editor.insert_before(
                product.node, "DequantizeLinear", quantized, f"{source}_rounded"
            )
        name, weights = product.name, self._round_for_openvino(product.weights)
        stored = [
            self._editor.add_constant(f"{name}_int8", weights.values),
            self._editor.add_constant(f"{name}_scales", weights.scales),
        ]
        restored = self._editor.insert_before(
            place, "DequantizeLinear", stored, f"{name}_weights", axis=1
        )
        return self._write_matmul(product, self._restored[source], restored, place)

    def _round_for_openvino(self, weights: FloatArray) -> Int8Weights:
        """Round to int8, but to 7 bits on a CPU whose int8 sums overflow.

        On such a CPU, OpenVINO has no int8 kernels that avoid the overflow.
        """
        if read_cpu_info().int8_overflows:
            return Int8Weights.of(weights, limit=MAX_INT8_WITHOUT_OVERFLOW)
        return Int8Weights.of(weights)

    def _write_matmul(
        self, product: Product, source: ir.Value, weights: ir.Value, place: ir.Node
    ) -> ir.Value:
        name, matmul = product.name, product.node
        output = self._editor.insert_before(place, "MatMul", [source, weights], f"{name}_product")
        written = output.producer()
        assert written is not None, "bug: a node without an output"
        # Accuracy fallbacks identify MatMuls by their names in the float graph.
        written.name, matmul.name = name, f"{name}_replaced"
        return self._add_bias(product, output, place)

    def _add_bias(self, product: Product, output: ir.Value, place: ir.Node) -> ir.Value:
        if not product.bias.any():
            return output
        bias = self._editor.add_constant(f"{product.name}_bias", product.bias)
        return self._editor.insert_before(place, "Add", [output, bias], f"{product.name}_sum")

    def _quantize(
        self, source: ir.Value, byte_range: ByteRange, place: ir.Node
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        name = source.name
        assert name, "bug: a value without a name"
        if name not in self._quantized:
            scale = self._editor.add_constant(f"{name}_step", byte_range.scale)
            zero = self._editor.add_constant(f"{name}_zero", byte_range.zero)
            values = self._editor.insert_before(
                place, "QuantizeLinear", [source, scale, zero], f"{name}_int8"
            )
            self._quantized[name] = (values, scale, zero)
        return self._quantized[name]


def _read_source(product: Product) -> ir.Value:
    """Return the current input of the MatMul: earlier writes may have replaced `product.source`."""
    source = product.node.inputs[0]
    assert source is not None, "bug: a product without an activation"
    return source


def quantize_word_table(model: ir.Model, editor: GraphEditor) -> None:
    """Store the word embedding table as int8, with one scale per word.

    A scale for the whole table costs .0008 of MiniLM's mean cosine. The tables of positions and
    token types are small and stay float.
    """
    import onnx_ir as ir

    for node in [node for node in model.graph if node.op_type == "Gather"]:
        table, ids = array(node.inputs[0]), node.inputs[1]
        is_words = ids is not None and ids.is_graph_input() and ids.name == "input_ids"
        if not is_words or table is None or table.ndim != 2 or table.size < _MIN_TABLE_VALUES:
            continue
        assert ids is not None, "bug: ids were checked above"
        words, name = Int8Weights.of(table, axis=1), node.outputs[0].name
        values = editor.add_constant(f"{name}_words", words.values)
        scales = editor.add_constant(f"{name}_scales", words.scales[:, None])
        found = editor.insert_before(node, "Gather", [values, ids], f"{name}_int8")
        factor = editor.insert_before(node, "Gather", [scales, ids], f"{name}_scale")
        number = editor.insert_before(
            node, "Cast", [found], f"{name}_number", to=int(ir.DataType.FLOAT)
        )
        row = editor.insert_before(node, "Mul", [number, factor], f"{name}_row")
        node.outputs[0].replace_all_uses_with(row, replace_graph_outputs=True)
