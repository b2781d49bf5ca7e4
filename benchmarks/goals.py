"""What is to be reached, and whether it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure and its bound; `value` and `reached` are None where it was not measured."""

    what: str
    value: float | None
    bound: str  # such as "at least 5"
    reached: bool | None

    @classmethod
    def at_least(cls, what: str, value: float | None, least: float) -> Self:
        """Reached from `least` on."""
        reached = None if value is None else value >= least
        return cls(what, value, f"at least {least:g}", reached)

    @classmethod
    def at_most(cls, what: str, value: float | None, most: float) -> Self:
        """Reached up to `most`."""
        reached = None if value is None else value <= most
        return cls(what, value, f"at most {most:g}", reached)

    @property
    def sentence(self) -> str:
        """For people."""
        if self.value is None:
            return f"{self.what}: not measured, {self.bound}"
        return f"{self.what}: {self.value:.3f}, {self.bound}: {_WORDS[bool(self.reached)]}"


_WORDS = {True: "reached", False: "missed"}
