"""Selection of the variants to serve with, from their measured costs. Pure functions.

Every selected variant is one more graph in memory. The selection is therefore the smallest set of
variants that is within a tolerance of the fastest variant at every shape. All variants of a set
have the same rounding, because the output must not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from math import log

from deployments.tuning.costs import CostTable, Shape, Variant, VariantCosts

# Times that exceed the fastest time by up to this share count as equal to it, because repeated
# measurements differ by as much.
TOLERANCE = 0.05
MAX_VARIANTS = 3  # per model, because each variant is a graph in memory
_UNMEASURED_MS = 1e9

Times = Mapping[Shape, float]  # milliseconds


def select_variants(rows: Sequence[VariantCosts]) -> tuple[tuple[Shape, Variant], ...]:
    """Return the variant to use per shape, ordered by shape size.

    Use the smallest set of variants that is within TOLERANCE of the fastest times at every shape.
    Among equally small sets, take the set with the least `_mean_excess`, then the first in `rows`.
    If no set of up to MAX_VARIANTS is within TOLERANCE, choose from `_find_nearly_best`.
    """
    times = [row.by_shape() for row in rows]
    shapes = sorted({shape for row in times for shape in row}, key=lambda s: (s.area, s.items))
    best = {shape: min(row[shape] for row in times if shape in row) for shape in shapes}
    for count in range(1, min(MAX_VARIANTS, len(rows)) + 1):
        sets = [
            members
            for members in _combine_one_rounding(rows, count)
            if _is_near_best([times[i] for i in members], best)
        ]
        if sets:
            break
    else:
        sets = _find_nearly_best(rows, times, best)
    members = min(sets, key=lambda members: _mean_excess([times[i] for i in members], best))
    fastest = [(shape, min(members, key=lambda i: _time_ms([times[i]], shape))) for shape in shapes]
    return tuple((shape, rows[i].variant) for shape, i in fastest)


def select_again(table: CostTable, roundings: Collection[str]) -> CostTable | None:
    """Select only among variants with one of the `roundings`. Return None if there are none."""
    rows = [row for row in table.rows if row.rounding in roundings]
    return table.model_copy(update={"selection": select_variants(rows)}) if rows else None


def _combine_one_rounding(rows: Sequence[VariantCosts], count: int) -> list[tuple[int, ...]]:
    return [
        members
        for members in combinations(range(len(rows)), count)
        if len({rows[i].rounding for i in members}) == 1
    ]


def _find_nearly_best(
    rows: Sequence[VariantCosts], times: Sequence[Times], best: Times
) -> list[tuple[int, ...]]:
    """Return the smallest sets whose mean excess is within TOLERANCE of the least mean excess."""
    excesses = {
        members: _mean_excess([times[i] for i in members], best)
        for count in range(1, MAX_VARIANTS + 1)
        for members in _combine_one_rounding(rows, count)
    }
    limit = min(excesses.values()) + TOLERANCE
    near = [members for members, excess in excesses.items() if excess <= limit]
    return [members for members in near if len(members) == len(near[0])]


def _is_near_best(members: Sequence[Times], best: Times) -> bool:
    return all(_time_ms(members, shape) <= limit * (1 + TOLERANCE) for shape, limit in best.items())


def _mean_excess(members: Sequence[Times], best: Times) -> float:
    """Return the mean over the shapes of log(time / fastest time).

    The result is rounded, so that noise does not decide between sets.
    """
    ratios = [log(_time_ms(members, shape) / limit) for shape, limit in best.items()]
    return round(sum(ratios) / len(ratios), 3)


def _time_ms(members: Sequence[Times], shape: Shape) -> float:
    # With the very long default, no variant is selected for a shape at which it was not measured.
    return min((times[shape] for times in members if shape in times), default=_UNMEASURED_MS)


def nearest_shape_variant(
    selection: Sequence[tuple[Shape, Variant]], items: int, tokens: int
) -> Variant:
    """Return the selected variant of the measured shape nearest to `items` x `tokens`."""
    return dict(selection)[nearest_shape([shape for shape, _ in selection], items, tokens)]


def nearest_shape(shapes: Iterable[Shape], items: int, tokens: int) -> Shape:
    """Return the shape nearest to `items` x `tokens`.

    The distance is logarithmic, and the difference in tokens counts twice.
    """
    return min(
        shapes,
        key=lambda shape: abs(log(items / shape.items)) + 2 * abs(log(tokens / shape.tokens)),
    )
