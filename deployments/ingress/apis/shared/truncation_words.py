"""`truncate` as Cohere and NVIDIA write it: the end of a long text that is removed, or NONE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from deployments.artifacts.types import TruncationSide

TruncationWord: TypeAlias = Literal["NONE", "START", "END"]
TRUNCATION_WORDS: tuple[TruncationWord, ...] = ("NONE", "START", "END")
_SIDES: Mapping[str, TruncationSide] = {"START": "left", "END": "right"}


def parse_truncation_word(word: TruncationWord) -> dict[str, Any]:
    """Return the parameters of the task for one of TRUNCATION_WORDS."""
    if word == "NONE":
        return {"truncate": False}
    return {"truncate": True, "truncation_direction": _SIDES[word]}
