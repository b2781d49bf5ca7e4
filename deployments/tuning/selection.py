"""Which variants to serve with: a pure function of what was measured.

Every variant in use is one more graph in memory, so the fewest are taken that are, at every shape,
within a tolerance of the fastest. All of them have one precision: an answer must not get other
digits because of the batch it happened to travel in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import log

from deployments.tuning.costs import Shape, Variant, VariantCosts

# Slower than the fastest by less than this is as fast: two measurements differ by as much.
TOLERANCE = 0.05
# More graphs in memory than this are never worth it.
MOST_VARIANTS = 3
_NEVER_MS = 1e9

Times = Mapping[Shape, float]  # milliseconds


def select_variants(rows: Sequence[VariantCosts]) -> tuple[tuple[Shape, Variant], ...]:
    """The winner per shape, shapes in order of size.

    Of equally small sets that with the fewest session options is taken, for they cost memory or
    idle cores; of these the fastest on the whole is taken (mean of logarithms), of equally fast
    ones the first in the order of `rows`. When no `MOST_VARIANTS` variants are near the fastest
    everywhere, the smallest set that on the whole misses by nearly as little as any is taken.
    """
    times = [row.by_shape() for row in rows]
    shapes = sorted({shape for row in times for shape in row}, key=lambda s: (s.area, s.items))
    best = {shape: min(row[shape] for row in times if shape in row) for shape in shapes}
    for count in range(1, min(MOST_VARIANTS, len(rows)) + 1):
        sets = [
            members
            for members in _of_one_precision(rows, count)
            if _covers([times[i] for i in members], best)
        ]
        if sets:
            break
    else:
        sets = _nearly_best(rows, times, best)
    members = min(
        sets, key=lambda chosen: (_extras(rows, chosen), _loss([times[i] for i in chosen], best))
    )
    winners = [(shape, min(members, key=lambda i: _time([times[i]], shape))) for shape in shapes]
    return tuple((shape, rows[i].variant) for shape, i in winners)


def _of_one_precision(rows: Sequence[VariantCosts], count: int) -> list[tuple[int, ...]]:
    return [
        members
        for members in combinations(range(len(rows)), count)
        if len({rows[i].precision for i in members}) == 1
    ]


def _nearly_best(
    rows: Sequence[VariantCosts], times: Sequence[Times], best: Times
) -> list[tuple[int, ...]]:
    """The smallest sets whose loss is within the tolerance of the least."""
    losses = {
        members: _loss([times[i] for i in members], best)
        for count in range(1, MOST_VARIANTS + 1)
        for members in _of_one_precision(rows, count)
    }
    limit = min(losses.values()) + TOLERANCE
    near = [members for members, loss in losses.items() if loss <= limit]
    return [members for members in near if len(members) == len(near[0])]


def _covers(chosen: Sequence[Times], best: Times) -> bool:
    return all(_time(chosen, shape) <= limit * (1 + TOLERANCE) for shape, limit in best.items())


def _extras(rows: Sequence[VariantCosts], members: Sequence[int]) -> int:
    return sum(rows[i].variant.arena + rows[i].variant.spinning for i in members)


def _loss(chosen: Sequence[Times], best: Times) -> float:
    """Mean logarithm of how much slower than the fastest; rounded, for noise must not decide."""
    ratios = [log(_time(chosen, shape) / limit) for shape, limit in best.items()]
    return round(sum(ratios) / len(ratios), 3)


def _time(chosen: Sequence[Times], shape: Shape) -> float:
    # A shape that a graph was not measured at is one that it does not win.
    return min((times[shape] for times in chosen if shape in times), default=_NEVER_MS)


def nearest_shape_variant(
    winners: Sequence[tuple[Shape, Variant]], items: int, tokens: int
) -> Variant:
    """The winner of the measured shape that is most like `items` x `tokens`."""

    def distance(entry: tuple[Shape, Variant]) -> float:
        shape = entry[0]
        return abs(log(items / shape.items)) + 2 * abs(log(tokens / shape.tokens))

    return min(winners, key=distance)[1]
