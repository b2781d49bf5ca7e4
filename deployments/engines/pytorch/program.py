"""Torch programs as data: calls of ATen operators in JSON and weights in one safetensors file.

Files of `torch.export` are not safe to load. They may contain pickles, shared objects, and guards
and shape expressions that are evaluated as Python. A file of this format only names permitted
operators (`_function`), with tensors and plain values as arguments.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.engines.graph_io import check_inputs
from deployments.engines.pytorch.transformers_experts import (
    EXPERTS_OPERATOR,
    find_experts_operator,
)
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

_METADATA_KEY = "program"

# Arithmetic on tensor sizes, which torch.export traces as Python functions.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
        *(operator.getitem, operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
        operator.ge,
    )
}
# ATen operators that models need besides those with the tag `core`. None modifies its arguments.
_ADDITIONAL_OPERATORS = frozenset(
    {
        *("__and__", "arange", "baddbmm", "chunk", "concat", "contiguous", "dropout", "flatten"),
        *("layer_norm", "linear", "masked_fill", "matmul", "min", "multiply", "nan_to_num"),
        *("new_ones", "ones", "ones_like", "polar", "repeat_interleave", "reshape", "rms_norm"),
        *("scaled_dot_product_attention", "silu", "softmax", "softplus", "split", "square"),
        *("squeeze", "stack", "std", "to", "transpose", "type_as", "unbind", "view_as_complex"),
        *("view_as_real", "where", "zeros", "zeros_like"),
    }
)
# The only operators that may modify an argument. The first writes to a KV cache, the others to
# results of the model: queries and keys (OLMo), outputs of layers (Gemma 3n and 4), and results of
# routers of experts.
_IN_PLACE = frozenset(
    {
        *("aten.scatter_.src", "aten.add_.Tensor", "aten.div_.Tensor", "aten.mul_.Tensor"),
        *("aten.copy_.default", "aten.scatter_.value", "aten.clamp_.default"),
    }
)
_ENUMS = ("dtype", "layout", "memory_format")


def write_program(
    program: torch.export.ExportedProgram, path: Path, *, in_place: bool = False
) -> None:
    """Write an exported program with its first output only.

    With `in_place` the program may contain the operators of `_IN_PLACE`; otherwise all operators
    are functional. The caller exports the program under `torch.no_grad()`; otherwise the program
    would contain changes of the gradient mode. Raises EngineFailed for operators and values that
    the format cannot represent.
    """
    from safetensors.torch import save_file

    program = program if in_place else program.run_decompositions({})
    weights: dict[str, torch.Tensor] = {}
    nodes: list[dict[str, Any]] = []
    sources = {**program.state_dict, **program.constants}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    stored: dict[Any, str] = {}  # a tensor with several names is stored once
    for node in _needed_nodes(program):
        if node.op == "placeholder":
            target = targets[node.name]
            if target is None:
                shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
                nodes.append({"name": node.name, "input": node.name, "shape": shape})
            else:
                tensor = sources[target].detach()
                key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                target = stored.setdefault(key, target)
                weights[target] = tensor.clone().contiguous()
                nodes.append({"name": node.name, "weight": target})
        elif node.op == "call_function":
            nodes.append(_call(node))
        elif node.op == "output":
            nodes.append({"output": _to_json(node.args[0][0])})
        else:
            raise EngineFailed(f"a torch program cannot contain `{node.op}`")
    save_file(weights, path, metadata={_METADATA_KEY: json.dumps(nodes, allow_nan=False)})


def read_program(path: Path, device: str) -> torch.fx.GraphModule:
    """Read the program of an encoder, with inputs of `graph_io.INPUTS`.

    Raises EngineFailed for a file without a program, an operator that is not allowed or an unknown
    input. A damaged file raises other exceptions.
    """
    module = read_module(path, device)
    check_inputs(input_names(module))
    return module


def read_module(path: Path, device: str) -> torch.fx.GraphModule:
    """Read a program without a check of its inputs, which become the parameters of the module.

    Raises as `read_program` does, except for unknown inputs.
    """
    import torch
    from safetensors import safe_open

    root, graph, values = torch.nn.Module(), torch.fx.Graph(), dict[str, torch.fx.Node]()
    buffers: dict[str, str] = {}
    with safe_open(path, framework="pt", device=device) as file:
        nodes = json.loads((file.metadata() or {}).get(_METADATA_KEY, "null"))
        if not isinstance(nodes, list):
            raise EngineFailed("the file contains no torch program")
        for number, node in enumerate(nodes):
            if "input" in node:
                values[node["name"]] = given = graph.placeholder(node["input"])
                given.meta["shape"] = node.get("shape")
            elif "weight" in node:
                if node["weight"] not in buffers:
                    buffers[node["weight"]] = f"w{number}"
                    root.register_buffer(f"w{number}", file.get_tensor(node["weight"]))
                values[node["name"]] = graph.get_attr(buffers[node["weight"]])
            elif "call" in node:
                values[node["name"]] = graph.call_function(
                    _function(node["call"]),
                    tuple(_from_json(value, values, device) for value in node["args"]),
                    {
                        key: _from_json(value, values, device)
                        for key, value in node["kwargs"].items()
                    },
                )
            else:
                graph.output(_from_json(node["output"], values, device))
    return torch.fx.GraphModule(root, graph).eval()


def input_names(module: torch.fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the inputs of a module, in the order of its parameters."""
    return tuple(node.target for node in module.graph.nodes if node.op == "placeholder")


def input_shapes(module: torch.fx.GraphModule) -> tuple[Sequence[int] | None, ...]:
    """Return the shape of each input. Sizes that vary are -1. Version 0.1 wrote no shapes: None."""
    return tuple(node.meta["shape"] for node in module.graph.nodes if node.op == "placeholder")


def _needed_nodes(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Return the inputs and all nodes that an output or a write depends on.

    Assertions on shapes are dropped, because no other node depends on them. Raises EngineFailed for
    a write that the format does not permit, even if no other node depends on it.
    """
    needed: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set()
    inputs = set(program.graph_signature.user_inputs)
    for node in reversed(program.graph.nodes):
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            _function(_name(node.target))
        is_required = node.op == "output" or node.name in inputs or str(node.target) in _IN_PLACE
        if is_required or any(user in seen for user in node.users):
            seen.add(node)
            needed.append(node)
    return needed[::-1]


def _call(node: torch.fx.Node) -> dict[str, Any]:
    name = _name(node.target)
    _function(name)
    return {
        "name": node.name,
        "call": name,
        "args": [_to_json(value) for value in node.args],
        "kwargs": {key: _to_json(value) for key, value in node.kwargs.items()},
    }


def _name(target: Any) -> str:
    plain = getattr(target, "__name__", "")
    return plain if _FUNCTIONS.get(plain) is target else str(target)


def _function(name: str) -> Callable[..., Any]:
    """Return an ATen operator, such as `aten.add.Tensor`, EXPERTS_OPERATOR, or one of `_FUNCTIONS`.

    Raises EngineFailed for a name that is not allowed.
    """
    import torch

    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name == EXPERTS_OPERATOR:
        experts: Callable[..., Any] = find_experts_operator()
        return experts
    namespace, _, path = name.partition(".")
    packet, _, overload = path.partition(".")
    operator_: Any = None
    if namespace == "aten" and packet.isidentifier() and overload.isidentifier():
        operator_ = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(operator_, torch._ops.OpOverload):
        raise EngineFailed(f"a torch program cannot call `{name}`")
    is_allowed = torch.Tag.core in operator_.tags or packet in _ADDITIONAL_OPERATORS
    if name not in _IN_PLACE and (operator_._schema.is_mutable or not is_allowed):
        raise EngineFailed(f"a torch program cannot call `{name}`")
    function: Callable[..., Any] = operator_
    return function


def _to_json(value: Any) -> Any:
    """Convert an argument of a node to a JSON value. Raises EngineFailed for other types."""
    import torch

    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": True}  # `_from_json` inserts its argument `device`
    for kind in _ENUMS:
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise EngineFailed(f"a torch program cannot contain {value!r}")


def _from_json(value: Any, values: Mapping[str, torch.fx.Node], device: str) -> Any:
    """Invert `_to_json`. `values` are the nodes read so far, by name."""
    import torch

    if isinstance(value, list):
        return [_from_json(item, values, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return values[content]
    if kind == "device":
        return torch.device(device)
    if kind == "float":
        return float(content)
    member = getattr(torch, content, None)
    if kind not in _ENUMS or not isinstance(member, getattr(torch, kind)):
        raise EngineFailed(f"a torch program cannot contain the {kind} `{content}`")
    return member
