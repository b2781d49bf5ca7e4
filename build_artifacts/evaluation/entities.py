"""Entities in a line of tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OUTSIDE = "O"


class Entity(NamedTuple):
    """What a run of words is; `end` is the index after its last word."""

    kind: str
    start: int
    end: int


class _Tag(NamedTuple):
    mark: str  # B, I, E or S
    kind: str


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities that tags in any of BIO, BIOES or IO describe, by the lenient CoNLL reading.

    A word continues the entity before it if it says so (I or E), is of the same kind and that
    entity has not ended (E or S); any other word but `O` starts one. So an I after nothing, or
    after another kind, is a start, as in seqeval's default mode.
    """
    found: set[Entity] = set()
    start, before = 0, None
    for place, tag in enumerate([*tags, OUTSIDE]):
        now = _parse(tag)
        if before is not None and not _continues(before, now):
            found.add(Entity(before.kind, start, place))
            before = None
        if before is None:
            start = place
        before = now
    return found


def _parse(tag: str) -> _Tag | None:
    if tag == OUTSIDE:
        return None
    mark, dash, kind = tag.partition("-")
    if mark in ("B", "I", "E", "S"):
        return _Tag(mark, kind)
    # IO without marks, such as `PER`; a dash is then part of the name.
    return _Tag("I", mark + dash + kind)


def _continues(before: _Tag, now: _Tag | None) -> bool:
    if now is None or before.mark in ("E", "S"):
        return False
    return now.mark in ("I", "E") and now.kind == before.kind
