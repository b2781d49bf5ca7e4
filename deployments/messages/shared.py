"""Types that the messages of all replicas use: model, priority and truncation."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias, get_args

from deployments.artifacts.types import TruncationSide


class ModelRef(NamedTuple):
    """A model and its exact version."""

    id: str
    version: str

    @property
    def name(self) -> str:
        """The name that always selects this version, independent of the plan."""
        return f"{self.id}@{self.version}"


class Truncation(StrEnum):
    """Handling of a text that exceeds the model's limit."""

    REFUSE = "refuse"
    KEEP_START = "keep-start"
    KEEP_END = "keep-end"

    @classmethod
    def remove(cls, side: TruncationSide) -> Truncation:
        return cls.KEEP_END if side == "left" else cls.KEEP_START


# Interactive work has the higher priority. While both kinds wait, batch work still gets a small
# share of the time (LOWER_SHARE in fair_queue.py).
# Messages between processes contain the index in PRIORITIES.
Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
# Characters per token of usual text, for estimates before tokenization.
CHARACTERS_PER_TOKEN = 4
Sender: TypeAlias = tuple[str, int]  # a client, and the index of a priority
