"""Text in which a decoder reads a pair, such as a query and a document; part of the manifest."""

from __future__ import annotations

from pydantic import Field

from deployments.artifacts.types import FrozenModel


class PairTemplate(FrozenModel):
    """The fixed parts of the text of a pair.

    The text is `start`, the instruction, `before_first`, the first segment, `before_second`, the
    second segment and `end`. Without an instruction, `start` is empty.
    """

    start: str = ""
    instruction: str | None = None  # if a request states none; None: the text has no instruction
    before_first: str
    before_second: str
    end: str
    end_tokens: int = Field(default=0, ge=0)  # tokens at the end that truncation keeps
    # Whether the template removes white space around the segments, and around the instruction.
    strips: bool = False
    strips_instruction: bool = False

    @property
    def characters(self) -> int:
        """Characters that the text of every pair has, the default instruction included."""
        return len(self.join("", ""))

    def join(self, first: str, second: str, instruction: str | None = None) -> str:
        """Return the text of a pair; None or an empty text selects the default instruction."""
        instruction = instruction or self.instruction or ""
        if self.strips:
            first, second = first.strip(), second.strip()
        if self.strips_instruction:
            instruction = instruction.strip()
        before = self.start + instruction + self.before_first
        return before + first + self.before_second + second + self.end
