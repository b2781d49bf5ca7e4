"""Entries of cost tables, built from short notations."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.tuning.costs import Cost, Shape, Variant, VariantCosts


def shape(text: str) -> Shape:
    """Parse `"8x128"` as 8 items of 128 tokens."""
    items, _, tokens = text.partition("x")
    return Shape(items=int(items), tokens=int(tokens))


def variant(name: str) -> Variant:
    """Parse `"int8+spinning"` as the candidate `int8` with spinning threads."""
    candidate, *options = name.split("+")
    return Variant(candidate=candidate, **dict.fromkeys(options, True))


def row(name: str, medians_ms: Mapping[str, float], precision: str = "int8") -> VariantCosts:
    """Build the costs of one variant from its medians by shape."""
    costs = (
        Cost(shape=shape(text), median_ms=ms, low_ms=ms, rounds=5)
        for text, ms in medians_ms.items()
    )
    return VariantCosts(variant=variant(name), precision=precision, costs=tuple(costs))
