"""Changes of a float graph that make its activations fit 8 bits and preserve its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from build_artifacts.graph_nodes import only_user
from build_artifacts.smoothing.calibration import Observed
from build_artifacts.smoothing.graph_edits import GraphEditor
from build_artifacts.smoothing.products import Product, array, is_attention_output
from build_artifacts.smoothing.ranges import (
    COLUMNS,
    ByteRange,
    choose_range,
    choose_saturation,
    even_channels,
)
from build_artifacts.types import FloatArray

if TYPE_CHECKING:
    import onnx_ir as ir

_LAYER_NORM = "LayerNormalization"
_NORMS = (_LAYER_NORM, "RMSNormalization")
# Activation functions that return large inputs unchanged. The sigmoid approximation of GELU is
# exact enough to compare ranges.
_RECTIFIERS: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "Relu": lambda values: np.maximum(values, 0),
    "Gelu": lambda values: values / (1 + np.exp(np.clip(-1.702 * values, -80, 80))),
}


class _NeuronLayer(NamedTuple):
    """The MatMuls before and after a rectifier, whose outputs are the neurons of the layer.

    `width` is the number of neurons before `smooth` adds copies of some neurons.
    """

    neurons: Product
    reader: Product
    width: int


class ActivationSmoother:
    """Smoother of the activations that `products`, MatMuls with constant weights, read."""

    def __init__(self, editor: GraphEditor, products: Sequence[Product]) -> None:
        self._editor = editor
        self._by_output = {product.output: product for product in products}
        self._copied: list[_NeuronLayer] = []

    def can_smooth(self, source: ir.Value, readers: Sequence[Product]) -> bool:
        """Return whether `source` is the output of a known pattern.

        The patterns are attention, norms, products, and gated or plain neurons. Calibration texts
        suffice to determine the ranges of these patterns only. An output of the whole graph must be
        an attention output, because `smooth` changes the values of all other patterns.
        """
        return is_attention_output(source) or (
            not source.is_graph_output()
            and (
                self._is_norm(source)
                or source in self._by_output
                or self._find_gated(source, readers) is not None
                or self._find_neurons(source, readers) is not None
            )
        )

    def is_gated(self, source: ir.Value, readers: Sequence[Product]) -> bool:
        """Return whether `source` is the output of a gated layer."""
        return self._find_gated(source, readers) is not None

    def smooth(self, source: ir.Value, readers: Sequence[Product], seen: Observed) -> ByteRange:
        """Smooth `source` by changes of its producer and readers; return the resulting range."""
        if is_attention_output(source):
            # Do not smooth by changes of the value projection: the result would fit only the
            # calibration texts. On other texts, the worst cosine of MiniLM would be .970.
            return choose_range(seen, [product.weights for product in readers])
        neurons = self._find_neurons(source, readers)
        if neurons is not None:
            return self._copy_neurons(source, neurons, readers[0], seen)
        return self._even(source, readers, seen)

    def equalize_widths(self) -> None:
        """Pad layers of neurons to equal widths if their widths were equal before `smooth`.

        A forward pass reuses the memory of one layer for the next. With different widths, the pass
        allocates new pages: a pass of 32 x 16 tokens of MiniLM took up to 24 % longer.
        """
        widest: dict[int, int] = {}
        for layer in self._copied:
            width = layer.neurons.weights.shape[1]
            widest[layer.width] = max(widest.get(layer.width, 0), width)
        for layer in self._copied:
            added = widest[layer.width] - layer.width
            _add_empty_neurons(layer, layer.width + -(-added // COLUMNS) * COLUMNS)

    def _even(self, source: ir.Value, readers: Sequence[Product], seen: Observed) -> ByteRange:
        producer = source.producer()
        assert producer is not None, "bug: an activation without a producer"
        gated = self._find_gated(source, readers)
        can_shift = source in self._by_output or producer.op_type == _LAYER_NORM
        factors, shift = even_channels(
            seen, [product.weights for product in readers], centered=can_shift
        )
        if gated is not None:
            _scale_columns(*gated, factors, shift)
        elif source in self._by_output:
            _scale_columns(self._by_output[source], 0, factors, shift)
        else:
            self._scale_norm(producer, factors, shift)
        for product in readers:
            product.bias = product.bias + shift @ product.weights
            product.weights = product.weights * factors[:, None]
        self._restore_for_others(source, readers, factors, shift)
        return ByteRange.covering(seen.transform(factors, shift))

    def _is_norm(self, source: ir.Value) -> bool:
        node = source.producer()
        if node is None or node.op_type not in _NORMS or source is not node.outputs[0]:
            return False
        return all(array(value) is not None for value in node.inputs[1:] if value is not None)

    def _scale_norm(self, norm: ir.Node, factors: FloatArray, shift: FloatArray) -> None:
        scale = array(norm.inputs[1])
        assert scale is not None, "bug: a norm without a constant scale"
        name = norm.outputs[0].name
        norm.replace_input_with(1, self._editor.add_constant(f"{name}_scale", scale / factors))
        if norm.op_type == _LAYER_NORM:
            bias = array(norm.inputs[2]) if len(norm.inputs) > 2 else None
            moved = ((0 if bias is None else bias) - shift) / factors
            norm.resize_inputs(3)
            norm.replace_input_with(2, self._editor.add_constant(f"{name}_bias", moved))

    def _restore_for_others(
        self, source: ir.Value, readers: Sequence[Product], factors: FloatArray, shift: FloatArray
    ) -> None:
        """Restore the original values for consumers other than `readers`, such as residual Adds."""
        nodes = {product.node for product in readers}
        others = [use for use in source.uses() if use.node not in nodes]
        producer = source.producer()
        if not others or producer is None:
            return
        name = source.name
        scale = self._editor.add_constant(f"{name}_factors", factors)
        restored = self._editor.insert_after(producer, "Mul", [source, scale], f"{name}_restored")
        addends = [self._find_addend(source, use.node) for use in others]
        for addend in addends:
            if addend is not None:
                addend.bias = addend.bias + shift
        if None in addends and shift.any():
            middle = self._editor.add_constant(f"{name}_shift", shift)
            place = restored.producer()
            assert place is not None, "bug: a node without an output"
            shifted = self._editor.insert_after(place, "Add", [restored, middle], f"{name}_shifted")
        else:
            shifted = restored
        for use, addend in zip(others, addends, strict=True):
            use.node.replace_input_with(use.idx, shifted if addend is None else restored)

    def _find_addend(self, source: ir.Value, node: ir.Node) -> Product | None:
        """Return the product that `node` adds to `source`, if no other node reads the product."""
        if node.op_type != "Add":
            return None
        other = next((value for value in node.inputs if value is not source), None)
        if other is None or only_user(other) is not node:
            return None
        return self._by_output.get(other)

    def _find_gated(
        self, source: ir.Value, readers: Sequence[Product]
    ) -> tuple[Product, int] | None:
        """Return the product in the linear half of a gated layer, and the half's first column.

        None if `source` is not the output of a gated layer, or if `source` has other readers.
        """
        node = source.producer()
        if node is None or node.op_type != "Mul" or len(source.uses()) != len(readers):
            return None
        for factor in reversed(node.inputs):
            if factor is None or only_user(factor) is not node:
                continue
            if factor in self._by_output:
                return self._by_output[factor], 0
            if (column := self._find_split(factor)) is not None:
                return column
        return None

    def _find_split(self, part: ir.Value) -> tuple[Product, int] | None:
        """Return the product that a Split cuts into parts, and the first column of `part`."""
        split = part.producer()
        if split is None or split.op_type != "Split" or "num_outputs" not in split.attributes:
            return None
        whole = split.inputs[0]
        if whole not in self._by_output or only_user(whole) != split:
            return None
        product, index = self._by_output[whole], [*split.outputs].index(part)
        return product, index * (product.weights.shape[1] // len(split.outputs))

    def _find_neurons(self, source: ir.Value, readers: Sequence[Product]) -> Product | None:
        """Return the product before the rectifier that produces `source` for a single reader."""
        node = source.producer()
        if node is None or node.op_type not in _RECTIFIERS or len(readers) != 1:
            return None
        before = node.inputs[0]
        if before is None or only_user(before) is not node or only_user(source) is None:
            return None
        return self._by_output.get(before)

    def _copy_neurons(
        self, source: ir.Value, neurons: Product, reader: Product, seen: Observed
    ) -> ByteRange:
        node = source.producer()
        assert node is not None, "bug: an activation without a producer"
        self._copied.append(_NeuronLayer(neurons, reader, neurons.weights.shape[1]))
        top, slope, copied, offsets = choose_saturation(
            seen, reader.weights, _RECTIFIERS[node.op_type]
        )
        bias = (neurons.bias[copied] - offsets) * slope
        neurons.weights = np.hstack([neurons.weights, neurons.weights[:, copied] * slope])
        neurons.bias = np.concatenate([neurons.bias, bias])
        reader.weights = np.vstack([reader.weights, reader.weights[copied] / np.float32(slope)])
        source.shape = neurons.output.shape = neurons.node.outputs[0].shape = None
        return ByteRange.of(float(seen.low.min()), top)


def _add_empty_neurons(layer: _NeuronLayer, width: int) -> None:
    neurons, reader = layer.neurons, layer.reader
    missing = width - len(neurons.bias)
    neurons.weights = np.pad(neurons.weights, ((0, 0), (0, missing)))
    neurons.bias = np.pad(neurons.bias, (0, missing))
    reader.weights = np.pad(reader.weights, ((0, missing), (0, 0)))


def _scale_columns(product: Product, first: int, factors: FloatArray, shift: FloatArray) -> None:
    columns = slice(first, first + len(factors))
    product.weights, product.bias = product.weights.copy(), product.bias.copy()
    product.weights[:, columns] /= factors
    product.bias[columns] = (product.bias[columns] - shift) / factors
