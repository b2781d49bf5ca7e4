"""Weights of the experts of a layer, in the forms in which checkpoints store them.

ONNX Runtime's operator reads all experts from two tensors, in which the rows of gate and up
projection alternate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from build_artifacts.decoders.graphs.weights import CheckpointWeights
from build_artifacts.types import FloatArray

# Values of FP4 (E2M1) by their bits, and the bias of scales (E8M0), in the Microscaling formats:
# https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_FP4, -_FP4])
_SCALE_BIAS = 127


class ExpertWeights(ABC):
    """Weights of experts that compute up to `inner` neurons from `outer` channels, and back."""

    def __init__(self, weights: CheckpointWeights, name: str, count: int) -> None:
        self.name = name  # name of the module in the checkpoint
        self._weights, self._count = weights, count

    @property
    def inner_shape(self) -> tuple[int, int, int]:
        """Shape of gate and up projections: experts, 2 x inner, outer."""
        experts, outer, inner = self.outer_shape
        return experts, 2 * inner, outer

    @property
    @abstractmethod
    def outer_shape(self) -> tuple[int, int, int]:
        """Shape of the down projections: experts, outer, inner."""

    @abstractmethod
    def read_inner(self) -> FloatArray:
        """Return gate and up projections, [experts, 2 x inner, outer], whose rows alternate."""

    @abstractmethod
    def read_outer(self) -> FloatArray:
        """Return the down projections, [experts, outer, inner]."""


class SeparateExperts(ExpertWeights):
    """A tensor for each projection of each expert."""

    _inner_parts = ("gate_proj", "up_proj")

    @property
    def outer_shape(self) -> tuple[int, int, int]:
        outer, inner = self._weights.shape(self._tensor("down_proj", 0))
        return self._count, outer, inner

    def read_inner(self) -> FloatArray:
        experts, rows, outer = self.inner_shape
        joined = np.empty((experts, rows // 2, 2, outer), np.float32)
        for index in range(experts):
            for place, part in enumerate(self._inner_parts):
                joined[index, :, place] = self._weights.read(self._tensor(part, index))
        return joined.reshape(experts, rows, outer)

    def read_outer(self) -> FloatArray:
        return np.stack(
            [self._weights.read(self._tensor("down_proj", index)) for index in range(self._count)]
        )

    def _tensor(self, part: str, index: int) -> str:
        return f"{self.name}.{index}.{part}.weight"


class JoinedExperts(ExpertWeights):
    """All experts in two tensors. The rows of the up projection follow those of the gate."""

    @property
    def outer_shape(self) -> tuple[int, int, int]:
        experts, outer, inner = self._weights.shape(f"{self.name}.down_proj")
        return experts, outer, inner

    def read_inner(self) -> FloatArray:
        experts, rows, outer = self.inner_shape
        halves = self._weights.read(f"{self.name}.gate_up_proj")
        pairs = halves.reshape(experts, 2, rows // 2, outer).swapaxes(1, 2)
        return pairs.reshape(experts, rows, outer)

    def read_outer(self) -> FloatArray:
        return self._weights.read(f"{self.name}.down_proj")


class SeparateUngatedExperts(SeparateExperts):
    """Experts without gates. The up projection takes the place of the gate, too."""

    _inner_parts = ("up_proj", "up_proj")


class JoinedUngatedExperts(JoinedExperts):
    """All experts in two tensors, without gates. The up projection takes their place, too."""

    def read_inner(self) -> FloatArray:
        return np.repeat(self._weights.read(f"{self.name}.up_proj"), 2, axis=1)


class TransposedExperts(ExpertWeights):
    """All experts in two transposed tensors. Gate and up projection alternate, as in GPT-OSS."""

    @property
    def outer_shape(self) -> tuple[int, int, int]:
        experts, inner, outer = self._weights.shape(f"{self.name}.down_proj")
        return experts, outer, inner

    def read_inner(self) -> FloatArray:
        return self._weights.read(f"{self.name}.gate_up_proj").swapaxes(1, 2)

    def read_outer(self) -> FloatArray:
        return self._weights.read(f"{self.name}.down_proj").swapaxes(1, 2)


class Mxfp4Experts(ExpertWeights):
    """The experts of GPT-OSS in MXFP4: blocks of 32 values along the rows, and their scales."""

    @property
    def outer_shape(self) -> tuple[int, int, int]:
        experts, outer, blocks, size = self._weights.shape(f"{self.name}.down_proj_blocks")
        return experts, outer, blocks * 2 * size

    def read_inner(self) -> FloatArray:
        return self._read("gate_up_proj")

    def read_outer(self) -> FloatArray:
        return self._read("down_proj")

    def _read(self, part: str) -> FloatArray:
        """Return the values of packed blocks, [experts, rows, blocks, 16], with scales [..., 1]."""
        name = f"{self.name}.{part}"
        packed = self._weights.read_stored(f"{name}_blocks").astype(np.uint8, copy=False)
        scales = self._weights.read_stored(f"{name}_scales").astype(np.int32) - _SCALE_BIAS
        values = np.empty((*packed.shape, 2), np.float32)
        values[..., 0] = _FP4_VALUES[packed & 0x0F]
        values[..., 1] = _FP4_VALUES[packed >> 4]
        np.ldexp(values, scales[..., None, None], out=values)
        experts, rows, _, _ = packed.shape
        return values.reshape(experts, rows, -1)


def find_experts(
    weights: CheckpointWeights, name: str, count: int, *, transposed: bool, gated: bool
) -> ExpertWeights:
    """Find the form of `count` experts. If there are none, reads raise UnsupportedModel."""
    if f"{name}.down_proj_blocks" in weights:
        return Mxfp4Experts(weights, name, count)
    if f"{name}.down_proj" not in weights:
        separate = SeparateExperts if gated else SeparateUngatedExperts
        return separate(weights, name, count)
    if not gated:
        return JoinedUngatedExperts(weights, name, count)
    form = TransposedExperts if transposed else JoinedExperts
    return form(weights, name, count)
