"""RoPE tables of the layers of one graph."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import TransformersConfig, read_max_positions
from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.kv_inputs import LayerRope
from build_artifacts.decoders.reference_rope import ReferenceRope


def list_positions(config: TransformersConfig) -> NDArray[np.int64]:
    """Return the positions that tables have rows for."""
    positions = read_max_positions(config)
    assert positions is not None, "bug: a config without a maximum of positions"
    return np.arange(positions)


class LayerRopes:
    """RoPE of the layers. Layers of one kind share tables."""

    def __init__(
        self,
        graph: GraphWriter,
        config: TransformersConfig,
        checkpoint: Path,
        *,
        interleaved: bool = False,
        turns_back: bool = False,
    ) -> None:
        """`interleaved`: RoPE pairs neighboring channels, instead of the halves.

        `turns_back`: it rotates pairs in the opposite direction.
        """
        self._graph, self._config, self._checkpoint = graph, config, checkpoint
        self._interleaved, self._turns_back = interleaved, turns_back
        self._by_kind: dict[str | None, LayerRope] = {}

    @cached_property
    def _reference(self) -> ReferenceRope:
        return ReferenceRope(self._checkpoint)  # not before a layer needs it: some models have none

    def of(self, layer: int) -> LayerRope:
        """Return the RoPE of a layer."""
        kind = self._reference.kind(layer)
        if kind not in self._by_kind:
            positions = list_positions(self._config)
            cosines, sines = self._reference.compute_tables(kind, positions)
            self._by_kind[kind] = LayerRope(
                self._graph.tensor(f"rope.{kind}.cosines", cosines),
                self._graph.tensor(f"rope.{kind}.sines", -sines if self._turns_back else sines),
                channels=2 * cosines.shape[1],
                interleaved=self._interleaved,
            )
        return self._by_kind[kind]
