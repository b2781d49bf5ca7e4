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
    strips: bool = False  # whether white space around the instruction and both segments is removed

    def join(self, first: str, second: str, instruction: str | None = None) -> str:
        """Return the text of a pair; None or an empty text selects the default instruction."""
        parts = [first, second, instruction or self.instruction or ""]
        if self.strips:
            parts = [part.strip() for part in parts]
        first, second, instruction = parts
        before = self.start + instruction + self.before_first
        return before + first + self.before_second + second + self.end
