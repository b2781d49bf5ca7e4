"""Rewrite of a decoder graph that computes logits only from a given token on, in fp32.

A prefill needs the logits of its last token only. The logits of a thousand tokens take most of the
memory of a forward pass. For a small model, they also take most of its time.

The host selects tokens from fp32 logits. The device casts the logits to fp32, because a cast with
numpy takes 16 ms or more for 32 slots of 128,256 logits each (Zen 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from build_artifacts.errors import UnsupportedModel
from deployments.engines.decoder import LOGITS_FROM

if TYPE_CHECKING:
    import onnx

GRAPH_NAME = "model.onnx"
WEIGHTS_NAME = "model.onnx.data"
_LOGITS = "logits"
_HEAD_OPERATORS = ("MatMul", "MatMulNBits", "Gemm")
# Elementwise operators that some architectures apply to the logits.
_ELEMENTWISE = ("Add", "Cast", "Div", "Mul", "Tanh")
_TO_THE_END = 2**62
_TOKENS_AXIS = 1


def slice_logits(graph: Path, architecture: str) -> None:
    """Add the input `logits_from`, [1], to the file `graph`: the first token with logits.

    A Slice before the head removes all earlier tokens; 0 keeps all tokens. Cast logits of lower
    precision to fp32. Weight files stay unchanged.

    Raises UnsupportedModel if the graph requires inputs that the server does not provide, has
    another attention than GroupQueryAttention, or computes the logits without a MatMul.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    _check_inputs(model, architecture)
    head = _find_head(model, architecture)
    tables = {"logits_end": _TO_THE_END, "logits_axis": _TOKENS_AXIS}
    for name, value in tables.items():
        model.graph.initializer.append(
            onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value])
        )
    sliced_name = "logits_hidden_states"
    inputs = [head.input[0], LOGITS_FROM, *tables]
    slice_node = onnx.helper.make_node("Slice", inputs, [sliced_name], name="logits_slice")
    index = [node.name for node in model.graph.node].index(head.name)
    head.input[0] = sliced_name
    model.graph.node.insert(index, slice_node)
    model.graph.input.append(
        onnx.helper.make_tensor_value_info(LOGITS_FROM, onnx.TensorProto.INT64, [1])
    )
    _rename_logits_dimension(model)
    _cast_logits(model)
    onnx.save(model, graph)


def _check_inputs(model: onnx.ModelProto, architecture: str) -> None:
    fed = ("input_ids", "attention_mask")
    names = [value.name for value in model.graph.input]
    others = [name for name in names if name not in fed and not name.startswith("past_key_values.")]
    if others:
        raise UnsupportedModel(
            f"the graph of `{architecture}` requires the input `{others[0]}`, "
            "which the server does not provide",
            hint="use a model with attention in all layers, such as Llama or Qwen3",
        )
    kinds = {node.op_type for node in model.graph.node if node.op_type.endswith("Attention")}
    if kinds != {"GroupQueryAttention"}:
        raise UnsupportedModel(
            f"the graph of `{architecture}` uses {' and '.join(sorted(kinds)) or 'no attention'}; "
            "slots of different lengths require GroupQueryAttention",
            hint="use a model with attention in all layers, such as Llama or Qwen3",
        )


def _find_head(model: onnx.ModelProto, architecture: str) -> onnx.NodeProto:
    """Find the MatMul that computes the logits. Elementwise operators may follow it."""
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in _walk_back(makers, _LOGITS):
        if node.op_type in _HEAD_OPERATORS:
            return node
        if node.op_type not in _ELEMENTWISE:
            break
    raise UnsupportedModel(
        f"the graph of `{architecture}` has no MatMul that computes the logits",
        hint="supported: a MatMul, and elementwise operators after it",
    )


def _walk_back(makers: dict[str, onnx.NodeProto], name: str) -> Iterator[onnx.NodeProto]:
    """Yield the producer of `name`, then the producer of its first computed input, and so on."""
    while name in makers and makers[name].op_type != "Constant":
        node = makers[name]
        yield node
        computed = [i for i in node.input if i in makers and makers[i].op_type != "Constant"]
        name = computed[0] if computed else ""


def _rename_logits_dimension(model: onnx.ModelProto) -> None:
    """Rename the token axis of the logits, whose size now differs from that of the input."""
    (logits,) = (value for value in model.graph.output if value.name == _LOGITS)
    logits.type.tensor_type.shape.dim[_TOKENS_AXIS].dim_param = "logits_length"
    # Recorded shapes after the Slice are stale; ONNX Runtime infers all shapes.
    del model.graph.value_info[:]


def _cast_logits(model: onnx.ModelProto) -> None:
    import onnx

    (logits,) = (value for value in model.graph.output if value.name == _LOGITS)
    if logits.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
        return
    narrow = "logits_before_cast"
    for node in model.graph.node:
        node.output[:] = [narrow if name == _LOGITS else name for name in node.output]
    cast = onnx.helper.make_node(
        "Cast", [narrow], [_LOGITS], name="logits_cast", to=onnx.TensorProto.FLOAT
    )
    model.graph.node.append(cast)
    logits.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
