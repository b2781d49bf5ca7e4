"""Activations by the names that configs have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from build_artifacts.errors import UnsupportedModel

Value = Any  # an onnx_ir.Value; the library is not typed
Append = Callable[..., Value]  # appends an operator to a graph


def activated(op: Append, value: Value, name: str) -> Value:
    """`value` through the activation `name`. Raises UnsupportedModel."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"there is no operator for the activation `{name}`",
            hint=f"these are known: {', '.join(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[name](op, value)


def _relu(op: Append, value: Value) -> Value:
    return op("Relu", value)


def _tanh(op: Append, value: Value) -> Value:
    return op("Tanh", value)


def _gelu(op: Append, value: Value) -> Value:
    return op("Gelu", value)


def _tanh_gelu(op: Append, value: Value) -> Value:
    return op("Gelu", value, approximate="tanh")


def _silu(op: Append, value: Value) -> Value:
    return op("Mul", value, op("Sigmoid", value))


_ACTIVATIONS: Mapping[str, Callable[[Append, Value], Value]] = {
    "relu": _relu,
    "tanh": _tanh,
    "gelu": _gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "silu": _silu,
    "swish": _silu,
}
