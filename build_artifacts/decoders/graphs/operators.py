"""Activations, and position encodings as tables: sinusoids and T5's distance buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import FloatArray

Value = Any  # an onnx_ir.Value; the library is not typed
Append = Callable[..., Value]  # appends an operator to a graph


def apply_activation(op: Append, value: Value, name: str) -> Value:
    """Apply the activation `name` of config.json. Raises UnsupportedModel if it is unknown."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"the activation `{name}` is not supported",
            hint=f"supported: {', '.join(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[name](op, value)


def _relu(op: Append, value: Value) -> Value:
    return op("Relu", value)


def _squared_relu(op: Append, value: Value) -> Value:
    positive = op("Relu", value)
    return op("Mul", positive, positive)


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
    "relu2": _squared_relu,
    "tanh": _tanh,
    "gelu": _gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "silu": _silu,
    "swish": _silu,
}


def sinusoids(positions: int, width: int) -> FloatArray:
    """Return a position table [positions, width]: sines of all frequencies, then cosines."""
    speeds = 10_000.0 ** (-2.0 * np.arange((width + 1) // 2) / width)
    angles = np.arange(positions)[:, None] * speeds
    table = np.concatenate([np.sin(angles), np.cos(angles[:, : width // 2])], axis=1)
    return table.astype(np.float32)


def stretched_sinusoids(positions: int, width: int) -> FloatArray:
    """Return fairseq's sinusoids, [positions, width]: the lowest frequency is exactly 1 / 10,000.

    All steps use single precision, as in the training of these models.
    """
    half = width // 2
    step = np.float32(math.log(10_000) / (half - 1))
    speeds = np.exp(np.arange(half, dtype=np.float32) * -step)
    angles = np.arange(positions, dtype=np.float32)[:, None] * speeds
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, width % 2)))


def distance_buckets(
    distances: NDArray[np.int64], *, both_ways: bool, buckets: int, farthest: int
) -> NDArray[np.int64]:
    """Return T5's relative position bucket per distance (key minus query).

    In each direction, half of the buckets hold one distance each. The widths of the other half grow
    logarithmically up to `farthest`. With `both_ways`, keys after the query have separate buckets.
    Otherwise keys after the query share the bucket of distance 0.
    """
    if both_ways:
        buckets //= 2
        first = np.where(distances > 0, buckets, 0)
        apart = np.abs(distances)
    else:
        first = np.zeros_like(distances)
        apart = np.maximum(-distances, 0)
    exact = buckets // 2
    # Use single precision as torch does: at the border of two buckets, rounding selects the bucket.
    ratio = np.log(np.maximum(apart, 1).astype(np.float32) / np.float32(exact))
    grown = ratio / np.float32(math.log(farthest / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + grown.astype(np.int64), buckets - 1)
    return first + np.where(apart < exact, apart, far)
