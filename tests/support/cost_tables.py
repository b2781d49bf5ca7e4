"""Costs as a test writes them down."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.tuning.costs import Cost, Shape, Variant, VariantCosts


def shape(told: str) -> Shape:
    """`"8x128"`: 8 items of 128 tokens."""
    items, _, tokens = told.partition("x")
    return Shape(items=int(items), tokens=int(tokens))


def variant(name: str) -> Variant:
    """`"int8+arena"`: the candidate `int8` with the arena."""
    candidate, *options = name.split("+")
    return Variant(candidate=candidate, **dict.fromkeys(options, True))


def row(name: str, medians_ms: Mapping[str, float], precision: str = "int8") -> VariantCosts:
    """The costs of one variant by shape."""
    costs = (
        Cost(shape=shape(told), median_ms=ms, low_ms=ms, rounds=5)
        for told, ms in medians_ms.items()
    )
    return VariantCosts(variant=variant(name), precision=precision, costs=tuple(costs))
