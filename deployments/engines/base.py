"""The engine contract: everything a batch loop may rely on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deployments.messages import Batch, Outputs


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine, as data."""

    compute_type: str  # the value of the x-compute-type header, such as "cpu-int8"


class Engine(Protocol):
    """One loaded graph."""

    info: EngineInfo

    def run(self, batch: Batch) -> Outputs:
        """One blocking forward pass; safe to call from several threads at once.

        Raises EngineFailed when the device gave up. Rows that are not finite are the caller's
        to refuse, row by row.
        """
        ...

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards."""
        ...
