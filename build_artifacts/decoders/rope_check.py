"""Are the rotations in the model builder's graph those that transformers computes?

The builder knows some types of rotations differently, or not at all. Short texts hardly show it,
and those that the gate reads are short; what a user loses is the far end of a long context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.errors import UnsupportedModel

if TYPE_CHECKING:
    import onnx

# Cosine and sine per position and pair of values, [P, D/2] each.
_Tables = tuple[NDArray[np.float32], NDArray[np.float32]]

# Measured up to position 131,071 with fifteen configs of eleven architectures: in fp32 the tables
# are those of transformers bit for bit, in fp16 they are up to 2.4e-4 off. Wrong ones were off by
# 0.015 among the first 128 positions already.
_TOLERANCE = 1e-3
# Angles are products in fp32, which whoever multiplies in another order rounds differently.
_ANGLE_ROUNDING = 2.0**-22  # per position
_DENSE_POSITIONS, _SPARSE_POSITIONS = (
    256,
    256,
)  # positions: all of the first, and so many between them and the last
_COSINES, _SINES = 7, 8  # inputs of GroupQueryAttention
# Where the builder knows it, the graph chooses between two tables, neither of which is stored as
# such; `check_decoder` keeps texts to the shorter one's.
_SWITCHING_TYPE = "longrope"


class _RopeLayer(NamedTuple):
    """What one attention of the graph rotates by: the names of its tables."""

    number: int
    cosines: str
    sines: str


def check_rope(graph: Path, weights: Path, metadata: CheckpointMetadata) -> None:
    """Hold the tables of `graph` against the rotations of the checkpoint in `weights`.

    Raises UnsupportedModel, naming type and architecture, where they differ at any position that
    the model may read.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    reference = _ReferenceRope(weights)
    positions = _sample_positions(metadata.max_tokens)
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    checked = set()
    for layer in _find_rope_layers(model):
        kind = reference.kind(layer.number)
        if (kind, layer.cosines) in checked:
            continue
        checked.add((kind, layer.cosines))
        made = _read_tables(found, layer, graph.parent)
        if made is None and reference.rope_type(kind) == _SWITCHING_TYPE:
            continue
        if made is None or not _are_close(
            made, reference.compute_tables(kind, positions), positions
        ):
            raise UnsupportedModel(
                f"the graph of `{metadata.architecture}` rotates otherwise than the model does, whose "
                f"rope type is `{reference.rope_type(kind)}`",
                hint="onnxruntime-genai's model builder does not know this type as transformers "
                "does; if it only lengthens the context, build from a copy whose config.json has "
                "neither it nor the further positions",
            )


class _ReferenceRope:
    """The rotations of a checkpoint by transformers' own module, which has no weights."""

    def __init__(self, weights: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(weights, trust_remote_code=False)
        with torch.device("meta"):  # only to learn which module is the model's
            base = AutoModelForCausalLM.from_config(config).base_model
        self._config: TransformersConfig = base.config
        self._module: Any = type(base.rotary_emb)(config=base.config)  # transformers is not typed
        self._by_kind = "layer_type" in signature(self._module.forward).parameters

    def kind(self, layer: int) -> str | None:
        """What tells the rotations of a layer from those of others; None where all are alike."""
        return str(self._config.layer_types[layer]) if self._by_kind else None

    def rope_type(self, kind: str | None) -> str:
        """The rope type of such layers, as configs name it."""
        said: Mapping[str, Any] = getattr(self._config, "rope_parameters", None) or {}
        own = said if kind is None else said.get(kind) or {}
        return str(own.get("rope_type", "default"))

    def compute_tables(self, kind: str | None, positions: NDArray[np.int64]) -> _Tables:
        """Cosines and sines at the positions `positions` [P]."""
        import torch

        how = {} if kind is None else {"layer_type": kind}
        with torch.inference_mode():
            compute_tables = self._module(torch.zeros(1), torch.from_numpy(positions)[None], **how)
        # transformers repeats the pairs, for both halves of a head.
        cosines, sines = (table[0, :, : table.shape[-1] // 2].numpy() for table in compute_tables)
        return cosines, sines


def _find_rope_layers(model: onnx.ModelProto) -> Iterator[_RopeLayer]:
    """Those that rotate; some architectures have layers that do not."""
    attentions = (node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    for number, node in enumerate(attentions):
        names = list(node.input)
        if len(names) > _SINES and names[_COSINES]:
            yield _RopeLayer(number, names[_COSINES], names[_SINES])


def _read_tables(
    found: Mapping[str, onnx.TensorProto], layer: _RopeLayer, directory: Path
) -> _Tables | None:
    """The tables of a layer; None where they are not simply stored."""
    from onnx import numpy_helper

    if layer.cosines not in found or layer.sines not in found:
        return None
    cosines, sines = (
        numpy_helper.to_array(found[name], str(directory)).astype(np.float32)
        for name in (layer.cosines, layer.sines)
    )
    return cosines, sines


def _sample_positions(most_tokens: int) -> NDArray[np.int64]:
    """Positions from the first to the last, ever further apart."""
    last = most_tokens - 1
    spread = np.geomspace(1, max(last, 1), _SPARSE_POSITIONS).round().astype(np.int64)
    every = np.concatenate([np.arange(_DENSE_POSITIONS), spread])
    return np.unique(every[every <= last])


def _are_close(made: _Tables, due: _Tables, positions: NDArray[np.int64]) -> bool:
    """Whether whole tables have, at `positions` [P], what is due there."""
    allowed = _TOLERANCE + positions[:, None] * _ANGLE_ROUNDING
    for table, expected in zip(made, due, strict=True):
        if len(table) <= positions[-1] or table.shape[1] != expected.shape[1]:
            return False
        if not (np.abs(table[positions] - expected) <= allowed).all():  # which NaN is not either
            return False
    return True
