from __future__ import annotations

import pytest

from deployments.tuning.costs import VariantCosts
from deployments.tuning.selection import nearest_shape_variant, select_variants
from tests.support.cost_tables import row, shape, variant

CASES = {
    "the fastest": (
        [row("a", {"1x16": 2.0, "8x128": 20}), row("b", {"1x16": 1.0, "8x128": 10})],
        {"1x16": "b", "8x128": "b"},
    ),
    "of equals the first": (
        [row("a", {"1x16": 1.0}), row("b", {"1x16": 1.0})],
        {"1x16": "a"},
    ),
    "one that is nearly the fastest everywhere, although another wins somewhere": (
        [row("a", {"1x16": 1.0, "8x128": 10.4}), row("b", {"1x16": 1.5, "8x128": 10.0})],
        {"1x16": "a", "8x128": "a"},
    ),
    "two where none is near the fastest everywhere": (
        [
            row("a", {"1x16": 1.0, "8x128": 20}, "fp32"),
            row("b", {"1x16": 1.5, "8x128": 10}, "fp32"),
        ],
        {"1x16": "a", "8x128": "b"},
    ),
    "of two that cover everything the faster on the whole": (
        [
            row("a", {"1x16": 1.04, "8x128": 10.4}),
            row("b", {"1x16": 1.0, "8x128": 10.3}),
            row("c", {"1x16": 9.0, "8x128": 10.0}),
        ],
        {"1x16": "b", "8x128": "b"},
    ),
    "one precision, even where another would win": (
        [
            row("a", {"1x16": 1.0, "8x128": 10.0}),
            row("b", {"1x16": 2.0, "8x128": 5.0}, "bf16"),
            row("c", {"1x16": 1.5, "8x128": 5.1}, "bf16"),
        ],
        {"1x16": "c", "8x128": "c"},
    ),
    "one quantized graph, because each rounds in its own way": (
        [row("a", {"1x16": 1.0, "8x128": 20}), row("b", {"1x16": 1.5, "8x128": 10})],
        {"1x16": "b", "8x128": "b"},
    ),
    "a graph never where it was not measured": (
        [row("a", {"1x16": 1.0, "8x128": 10.0}, "fp32"), row("b", {"1x16": 0.5}, "fp32")],
        {"1x16": "b", "8x128": "a"},
    ),
    "no more than three, those that miss least": (
        [
            row("a", {"1x16": 1, "4x16": 9, "8x16": 9, "32x16": 2}, "fp32"),
            row("b", {"1x16": 9, "4x16": 1, "8x16": 9, "32x16": 9}, "fp32"),
            row("c", {"1x16": 9, "4x16": 9, "8x16": 1, "32x16": 9}, "fp32"),
            row("d", {"1x16": 9, "4x16": 9, "8x16": 9, "32x16": 1}, "fp32"),
        ],
        {"1x16": "a", "4x16": "b", "8x16": "c", "32x16": "a"},
    ),
}


@pytest.mark.parametrize(("rows", "winners"), CASES.values(), ids=CASES.keys())
def test_select_variants_returns_the_expected_winners(
    rows: list[VariantCosts], winners: dict[str, str]
) -> None:
    selection = select_variants(rows)
    assert {str(where): winner.name for where, winner in selection} == winners


def test_selection_is_in_order_of_shape_size() -> None:
    rows = [row("a", {"8x16": 1.0, "1x16": 1.0, "1x128": 1.0, "2x64": 1.0})]
    assert [str(where) for where, _ in select_variants(rows)] == ["1x16", "1x128", "2x64", "8x16"]


@pytest.mark.parametrize(
    ("items", "tokens", "winner"),
    [
        (1, 16, "small"),
        (1, 1, "small"),
        (1, 30, "small"),
        (1, 200, "long"),
        (1, 9_000, "long"),
        (200, 16, "many"),
        (2, 16, "small"),
        (8, 60, "long"),  # the length counts more than the number of items
    ],
)
def test_nearest_measured_shape_selects_the_variant(items: int, tokens: int, winner: str) -> None:
    winners = [
        (shape("1x16"), variant("small")),
        (shape("32x16"), variant("many")),
        (shape("1x128"), variant("long")),
    ]
    assert nearest_shape_variant(winners, items, tokens).name == winner
