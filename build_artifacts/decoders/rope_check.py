"""Comparison of the RoPE tables in a graph with those of transformers.

The model builder implements some RoPE types differently or not at all. The texts of the accuracy
gate are too short to reveal such an error, which appears at the end of a long context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.decoders.reference_rope import ReferenceRope, RopeTables
from build_artifacts.errors import UnsupportedModel

if TYPE_CHECKING:
    import onnx

# Maximum absolute difference. Measured up to position 131,071 with fifteen configs of eleven
# architectures: fp32 tables equal those of transformers bit for bit, and fp16 tables differ by up
# to 2.4e-4. Wrong tables differ by 0.015 within the first 128 positions.
_TOLERANCE = 1e-3
# Angles are fp32 products. A graph that multiplies in another order may round them differently.
_ANGLE_ROUNDING = 2.0**-22  # allowed difference per position, added to _TOLERANCE
# Number of positions to check: the first 256, and 256 at growing distances up to the last one.
_DENSE_POSITIONS, _SPARSE_POSITIONS = 256, 256
_COSINES, _SINES = 7, 8  # input indices of GroupQueryAttention
_HEAD_SIZE_STEP = 16  # GroupQueryAttention with RoPE requires a multiple as head size
# RoPE type whose graph selects one of two tables at run time. The check skips such a graph, because
# `read_max_positions` limits texts to the range of the shorter table.
_SWITCHING_TYPE = "longrope"


class _RopeLayer(NamedTuple):
    """RoPE table names of one attention node."""

    number: int
    cosines: str
    sines: str


def check_head_size(graph: Path, head_dim: int) -> None:
    """Raise UnsupportedModel if ONNX Runtime cannot apply RoPE to heads of `head_dim` values."""
    import onnx

    layers = _find_rope_layers(onnx.load(graph, load_external_data=False))
    if head_dim % _HEAD_SIZE_STEP and any(layers):
        raise UnsupportedModel(
            f"the head size {head_dim} is not a multiple of {_HEAD_SIZE_STEP}, which the attention "
            "of ONNX Runtime with RoPE requires",
            hint="use a model with another head size, such as 64 or 128",
        )


def check_rope(graph: Path, weights: Path, metadata: CheckpointMetadata) -> None:
    """Compare the RoPE tables of `graph` with those of the checkpoint in `weights`.

    Raises UnsupportedModel if the tables differ at a sampled position below `max_tokens`, or if
    the graph stores no tables. A longrope graph without tables is not checked (_SWITCHING_TYPE).
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    reference = ReferenceRope(weights)
    positions = _sample_positions(metadata.max_tokens)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    checked = set()
    for layer in _find_rope_layers(model):
        kind = reference.kind(layer.number)
        if (kind, layer.cosines) in checked:
            continue
        checked.add((kind, layer.cosines))
        actual = _read_tables(initializers, layer, graph.parent)
        if actual is None and reference.rope_type(kind) == _SWITCHING_TYPE:
            continue
        if actual is None or not _are_close(
            actual, reference.compute_tables(kind, positions), positions
        ):
            raise UnsupportedModel(
                f"RoPE tables of the exported `{metadata.architecture}` graph differ from "
                f"transformers (rope type is `{reference.rope_type(kind)}`)",
                hint="onnxruntime-genai's model builder implements this type differently; if the "
                "type only extends the context, build from a copy whose config.json omits it and "
                "states the original maximum of positions",
            )


def _find_rope_layers(model: onnx.ModelProto) -> Iterator[_RopeLayer]:
    """Yield the attention layers that use RoPE."""
    attentions = (node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    for number, node in enumerate(attentions):
        names = list(node.input)
        if len(names) > _SINES and names[_COSINES]:
            yield _RopeLayer(number, names[_COSINES], names[_SINES])


def _read_tables(
    initializers: Mapping[str, onnx.TensorProto], layer: _RopeLayer, directory: Path
) -> RopeTables | None:
    """Return the tables of a layer; None when the graph computes them."""
    from onnx import numpy_helper

    if layer.cosines not in initializers or layer.sines not in initializers:
        return None
    cosines, sines = (
        numpy_helper.to_array(initializers[name], str(directory)).astype(np.float32)
        for name in (layer.cosines, layer.sines)
    )
    return cosines, sines


def _sample_positions(max_tokens: int) -> NDArray[np.int64]:
    """Return positions below `max_tokens`: the first ones, then some at growing distances."""
    last = max_tokens - 1
    spread = np.geomspace(1, max(last, 1), _SPARSE_POSITIONS).round().astype(np.int64)
    every = np.concatenate([np.arange(_DENSE_POSITIONS), spread])
    return np.unique(every[every <= last])


def _are_close(actual: RopeTables, expected: RopeTables, positions: NDArray[np.int64]) -> bool:
    """Return whether the tables equal `expected` at `positions` [P], within the tolerance."""
    allowed = _TOLERANCE + positions[:, None] * _ANGLE_ROUNDING
    for table, reference in zip(actual, expected, strict=True):
        if len(table) <= positions[-1] or table.shape[1] != reference.shape[1]:
            return False
        if not (np.abs(table[positions] - reference) <= allowed).all():  # also false for NaN
            return False
    return True
