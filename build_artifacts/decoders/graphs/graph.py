"""Builder for one ONNX graph: operators in execution order, weights read on save.

Tensors and their MatMuls carry the checkpoint's names, so the name of a node identifies its layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.graphs.operators import Value, apply_activation
from build_artifacts.decoders.graphs.weights import CheckpointWeights
from build_artifacts.graph_nodes import ORT_DOMAIN
from build_artifacts.types import FloatArray

if TYPE_CHECKING:
    import onnx_ir as ir

ElementType = Literal["FLOAT", "INT64"]

FLOAT, INT32, BFLOAT16 = 1, 6, 16  # ONNX's numbers of types, for Cast
_OPSET, _IR_VERSION = 20, 10


class GraphWriter:
    """Builder of one graph. Methods that append operators or tensors return the resulting value."""

    def __init__(self, name: str, weights: CheckpointWeights) -> None:
        self.weights = weights
        self._name = name
        self._nodes: list[ir.Node] = []
        self._inputs: list[Value] = []
        self._outputs: list[Value] = []
        self._tensors: dict[str, Value] = {}

    def input(self, name: str, kind: ElementType, *shape: str | int) -> Value:
        """Add a graph input. Strings in `shape` name dynamic axes."""
        value = _create_value(name, kind, shape)
        self._inputs.append(value)
        return value

    def output(self, value: Value, name: str, *shape: str | int) -> None:
        """Rename `value` to `name` and make it a float output of the graph."""
        import onnx_ir as ir

        value.name, value.shape = name, ir.Shape(shape)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        self._outputs.append(value)

    def count_input_values(self, prefix: str) -> int:
        """Return the values of the inputs with this prefix that one sequence of a batch has.

        For inputs that grow with its tokens, these are the values of one token.
        """
        shapes = (value.shape for value in self._inputs if value.name.startswith(prefix))
        return sum(
            math.prod(axis for axis in shape[1:] if isinstance(axis, int)) for shape in shapes
        )

    def op(self, op_type: str, *inputs: Value | None, name: str = "", **attributes: Any) -> Value:
        """Append an operator with one output. `attributes` may include the operator's `domain`."""
        return self.multi_output_op(op_type, 1, *inputs, name=name, **attributes)[0]

    def multi_output_op(
        self, op_type: str, outputs: int, *inputs: Value | None, name: str = "", **attributes: Any
    ) -> Sequence[Value]:
        """Append an operator with several outputs, and return them."""
        name = name or f"{op_type}_{len(self._nodes)}"
        node = create_node(op_type, *inputs, name=name, outputs=outputs, **attributes)
        self._nodes.append(node)
        outputs_made: Sequence[Value] = node.outputs
        return outputs_made

    def if_else(
        self, condition: Value, then: Sequence[ir.Node], otherwise: Sequence[ir.Node], name: str
    ) -> Value:
        """Append an If. Its output is the output of the last node in the executed branch."""
        import onnx_ir as ir

        branches = {
            branch: ir.Graph([], nodes[-1].outputs, nodes=nodes, name=f"{name}.{branch}")
            for branch, nodes in (("then_branch", then), ("else_branch", otherwise))
        }
        return self.op("If", condition, name=name, **branches)

    def constant(self, value: NDArray[np.generic] | Sequence[int] | int | float) -> Value:
        """Return a constant, int64 or fp32. Equal constants share a tensor."""
        array = np.asarray(value)
        kind: type[np.generic] = np.float32 if array.dtype.kind == "f" else np.int64
        array = array.astype(kind)
        digits = "_".join(str(number) for number in array.ravel())
        shape = "x".join(str(size) for size in array.shape)
        return self.tensor(f"{array.dtype}_{shape}_{digits}", array)

    def tensor(self, name: str, array: NDArray[np.generic]) -> Value:
        """Return the tensor `name`. Only the first call with a name stores `array`."""
        import onnx_ir as ir

        existing = self._tensors.get(name)
        return (
            self._add_initializer(name, ir.tensor(array, name=name))
            if existing is None
            else existing
        )

    def weight(
        self, name: str, shape: Sequence[int], read: Callable[[], FloatArray] | None = None
    ) -> Value:
        """Return the checkpoint tensor `name`, or the result of `read`, which runs on save."""
        import onnx_ir as ir

        if name in self._tensors:
            return self._tensors[name]

        def load() -> ir.TensorProtocol:
            array = self.weights.read(name) if read is None else read()
            assert array.shape == tuple(shape), f"bug: {name} has shape {array.shape}"
            return ir.tensor(np.ascontiguousarray(array), name=name)

        return self._add_initializer(
            name, ir.LazyTensor(load, ir.DataType.FLOAT, ir.Shape(shape), name=name)
        )

    def stored(self, name: str) -> Value:
        """Return a checkpoint tensor without changes."""
        return self.weight(name, self.weights.shape(name))

    def linear(self, value: Value, modules: Sequence[str], label: str = "") -> Value:
        """Apply `modules` as one linear layer: [..., in] -> [..., sum of outs]."""
        joined = _FusedLinear(self.weights, tuple(modules))
        label = label or modules[0]
        weight = self.weight(f"{label}.weight.columns", joined.shape, joined.columns)
        projected = self.op("MatMul", value, weight, name=label)
        if not joined.has_bias:
            return projected
        bias = self.weight(f"{label}.bias.joined", joined.shape[1:], joined.bias)
        return self.op("Add", projected, bias)

    def decoder_head(self, value: Value, *, is_tied: bool) -> tuple[Value, int]:
        """Project `value` to logits by the head with Llama's name, or by the table it shares."""
        names = ["lm_head.weight", "embed_tokens.weight"]
        return self.head(value, names[::-1] if is_tied else names)

    def head(self, value: Value, names: Sequence[str]) -> tuple[Value, int]:
        """Project `value` to logits. Return the logits and the vocabulary size.

        The weight is the first of `names` that the checkpoint has.
        """
        name = self.weights.first(names)
        vocabulary, size = self.weights.shape(name)
        columns = self.weight("head.columns", (size, vocabulary), lambda: self.weights.read(name).T)
        return self.op("MatMul", value, columns, name="head"), vocabulary

    def layer_norm(self, value: Value, module: str, epsilon: float) -> Value:
        """Apply the checkpoint's layer norm over the last axis. Its bias is optional."""
        weight, bias = f"{module}.weight", f"{module}.bias"
        parts = [
            self.stored(name) for name in (weight, bias) if name == weight or name in self.weights
        ]
        return self.op("LayerNormalization", value, *parts, axis=-1, epsilon=epsilon)

    def rms_norm(self, value: Value, scale: Value, epsilon: float) -> Value:
        """Divide by the RMS over the last axis, and multiply by `scale`."""
        return self.op("SimplifiedLayerNormalization", value, scale, axis=-1, epsilon=epsilon)

    def activation(self, value: Value, name: str) -> Value:
        """Apply the activation `name` of config.json. Raises UnsupportedModel if it is unknown."""
        return apply_activation(self.op, value, name)

    def soft_cap(self, value: Value, limit: float) -> Value:
        """Keep values below `limit` by tanh."""
        capped = self.op("Tanh", self.op("Div", value, self.constant(limit)))
        return self.op("Mul", capped, self.constant(limit))

    def save(self, path: Path) -> None:
        """Write the graph to `path` and its weights to a file next to it."""
        import onnx_ir as ir

        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._tensors.values()),
            opset_imports={"": _OPSET, ORT_DOMAIN: 1},
            name=self._name,
        )
        ir.save(ir.Model(graph, ir_version=_IR_VERSION), path, external_data=f"{path.name}.data")

    def _add_initializer(self, name: str, tensor: ir.TensorProtocol) -> Value:
        import onnx_ir as ir

        value = ir.Value(
            name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self._tensors[name] = value
        return value


@dataclass(frozen=True, slots=True)
class _FusedLinear:
    """Several linear layers with the same input, concatenated."""

    weights: CheckpointWeights
    modules: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the joined weight, [in, sum of outs]."""
        shapes = [self.weights.shape(f"{module}.weight") for module in self.modules]
        return shapes[0][1], sum(shape[0] for shape in shapes)

    @property
    def has_bias(self) -> bool:
        return any(f"{module}.bias" in self.weights for module in self.modules)

    def columns(self) -> FloatArray:
        read = [self.weights.read(f"{module}.weight") for module in self.modules]
        return np.concatenate([weight.T for weight in read], axis=1)

    def bias(self) -> FloatArray:
        return np.concatenate([self.weights.read(f"{module}.bias") for module in self.modules])


def create_node(
    op_type: str, *inputs: Value | None, name: str, outputs: int = 1, **attributes: Any
) -> ir.Node:
    """Create a node outside any graph, with outputs named after the node."""
    import onnx_ir as ir

    domain = attributes.pop("domain", "")
    values = [ir.Value(name=f"{name}:{i}") for i in range(outputs)]
    return ir.node(op_type, inputs, attributes, domain=domain, outputs=values, name=name)


def _create_value(name: str, kind: ElementType, shape: Sequence[str | int]) -> Value:
    import onnx_ir as ir

    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType[kind]))
