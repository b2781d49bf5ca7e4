"""A torch program as data: calls of ATen operators in JSON, weights in safetensors, one file.

Why not `torch.export.load`: its files may hold pickled weights and example inputs, guards and
shape expressions that are evaluated as Python, and shared objects that are loaded. Here a file can
only name operators of a fixed list and give them tensors and plain values.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.engines.graph_io import check_inputs
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

_METADATA_KEY = "program"

# Arithmetic on sizes, which torch traces as Python functions.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
        *(operator.getitem, operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
        operator.ge,
    )
}
# Operators that models need beside the core ones; none of them changes its arguments.
_BESIDE_CORE = frozenset(
    {
        *("__and__", "arange", "baddbmm", "chunk", "contiguous", "dropout", "flatten"),
        *("layer_norm", "linear", "masked_fill", "matmul", "min", "nan_to_num", "new_ones", "ones"),
        *("repeat_interleave", "reshape", "rms_norm", "scaled_dot_product_attention", "silu"),
        *("softmax", "split", "square", "stack", "to", "transpose", "type_as", "unbind", "where"),
        "zeros",
    }
)
# The one operator that writes into a tensor it is given: a decoder's memory.
_IN_PLACE = "aten.scatter_.src"
_ENUMS = ("dtype", "layout", "memory_format")


def write_program(
    program: torch.export.ExportedProgram, path: Path, *, in_place: bool = False
) -> None:
    """Write an exported program, whose first output is the answer.

    With `in_place` it may write into tensors that it is given, by `scatter_` only; otherwise copies
    take the place of whatever is written. Raises EngineFailed when the program does what a file
    cannot say. Export under `torch.no_grad()`, or changes of the gradient mode become part of it.
    """
    from safetensors.torch import save_file

    program = program if in_place else program.run_decompositions({})
    weights: dict[str, torch.Tensor] = {}
    nodes: list[dict[str, Any]] = []
    sources = {**program.state_dict, **program.constants}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    firsts: dict[Any, str] = {}  # tensors that go by several names are kept once
    for node in _computing(program):
        if node.op == "placeholder":
            target = targets[node.name]
            if target is None:
                nodes.append({"name": node.name, "input": node.name})
            else:
                tensor = sources[target].detach()
                where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                target = firsts.setdefault(where, target)
                weights[target] = tensor.clone().contiguous()
                nodes.append({"name": node.name, "weight": target})
        elif node.op == "call_function":
            nodes.append(_call(node))
        elif node.op == "output":
            nodes.append({"output": _plain(node.args[0][0])})
        else:
            raise EngineFailed(f"a torch program cannot hold `{node.op}`")
    save_file(weights, path, metadata={_METADATA_KEY: json.dumps(nodes, allow_nan=False)})


def read_program(path: Path, device: str) -> torch.fx.GraphModule:
    """The module of an encoder's file, on `device`; its inputs are those of `heads.INPUTS`.

    Raises EngineFailed when the file is damaged or names what it must not.
    """
    module = read_module(path, device)
    check_inputs(input_names(module))
    return module


def read_module(path: Path, device: str) -> torch.fx.GraphModule:
    """As `read_program`, of any inputs: the parameters of the module are named like them."""
    import torch
    from safetensors import safe_open

    root, graph, values = torch.nn.Module(), torch.fx.Graph(), dict[str, torch.fx.Node]()
    buffers: dict[str, str] = {}
    with safe_open(path, framework="pt", device=device) as file:
        nodes = json.loads((file.metadata() or {}).get(_METADATA_KEY, "null"))
        if not isinstance(nodes, list):
            raise EngineFailed("the file holds no torch program")
        for number, node in enumerate(nodes):
            if "input" in node:
                values[node["name"]] = graph.placeholder(node["input"])
            elif "weight" in node:
                if node["weight"] not in buffers:
                    buffers[node["weight"]] = f"w{number}"
                    root.register_buffer(f"w{number}", file.get_tensor(node["weight"]))
                values[node["name"]] = graph.get_attr(buffers[node["weight"]])
            elif "call" in node:
                values[node["name"]] = graph.call_function(
                    _function(node["call"]),
                    tuple(_rebuilt(value, values, device) for value in node["args"]),
                    {key: _rebuilt(value, values, device) for key, value in node["kwargs"].items()},
                )
            else:
                graph.output(_rebuilt(node["output"], values, device))
    return torch.fx.GraphModule(root, graph).eval()


def input_names(module: torch.fx.GraphModule) -> tuple[str, ...]:
    """The inputs of a module in the order it takes them."""
    return tuple(node.target for node in module.graph.nodes if node.op == "placeholder")


def _computing(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Inputs, and what an answer or the memory depends on; not what is said of shapes."""
    needed: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set()
    inputs = set(program.graph_signature.user_inputs)
    for node in reversed(program.graph.nodes):
        is_wanted = node.op == "output" or node.name in inputs or str(node.target) == _IN_PLACE
        if is_wanted or any(user in seen for user in node.users):
            seen.add(node)
            needed.append(node)
    return needed[::-1]


def _call(node: torch.fx.Node) -> dict[str, Any]:
    name = _name(node.target)
    _function(name)
    return {
        "name": node.name,
        "call": name,
        "args": [_plain(value) for value in node.args],
        "kwargs": {key: _plain(value) for key, value in node.kwargs.items()},
    }


def _name(target: Any) -> str:
    plain = getattr(target, "__name__", "")
    return plain if _FUNCTIONS.get(plain) is target else str(target)


def _function(name: str) -> Callable[..., Any]:
    """The operator called `aten.NAME.OVERLOAD`, or the function on sizes; else EngineFailed."""
    import torch

    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found: Any = None
    if namespace == "aten" and packet.isidentifier() and overload.isidentifier():
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise EngineFailed(f"a torch program cannot call `{name}`")
    is_known = torch.Tag.core in found.tags or packet in _BESIDE_CORE
    if name != _IN_PLACE and (found._schema.is_mutable or not is_known):
        raise EngineFailed(f"a torch program cannot call `{name}`")
    known: Callable[..., Any] = found
    return known


def _plain(value: Any) -> Any:
    """A node's argument as JSON can say it."""
    import torch

    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": True}  # wherever the program will run
    for kind in _ENUMS:
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise EngineFailed(f"a torch program cannot hold {value!r}")


def _rebuilt(value: Any, values: Mapping[str, torch.fx.Node], device: str) -> Any:
    """What `_plain` said; `values` are the nodes so far."""
    import torch

    if isinstance(value, list):
        return [_rebuilt(item, values, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return values[content]
    if kind == "device":
        return torch.device(device)
    if kind == "float":
        return float(content)
    found = getattr(torch, content, None)
    if kind not in _ENUMS or not isinstance(found, getattr(torch, kind)):
        raise EngineFailed(f"a torch program cannot hold the {kind} `{content}`")
    return found
