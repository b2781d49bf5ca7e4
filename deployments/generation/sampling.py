"""From logits to a token: penalties, the mask of what may follow, and the draw.

What is done, in this order, is what the field does: penalties and biases change logits, a mask
takes tokens out, the temperature scales what is left, and top-k, top-p, min-p and typical-p each
cut the distribution that the one before has left.

Nothing sorts a whole vocabulary unless the distribution is nearly flat: with 50,000 tokens that
alone would take as long as the rest of a step for a row.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.errors import EngineFailed, InvalidField
from deployments.generation.logits_rules import Penalties
from deployments.generation.messages import Sampling

SEED_BITS = 63  # what fits a signed integer of eight bytes, which is what clients read it into
# Temperatures beyond these change nothing any more, but single precision would lose them.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
# Weights are added up in blocks of this size, and only one block token by token.
BLOCK = 256
# For a share of the probability: how many of the likeliest are looked at before all of them, in how
# many steps these are then sorted, and by how much of a log-weight they may differ to have steps.
TOP_P_FIRST_CANDIDATES = 64
SORT_BINS = 4096
MAX_LOG_WEIGHT_GAP = 32.0
COLDEST_LOG = 1e30  # stands for an infinite one

TokenIndices = NDArray[np.intp]
Numbers = NDArray[np.floating[Any]]
# Of N tokens, by log-weight and weight [N]: the places of those that stay. A log-weight is relative
# to the likeliest token's, whose weight is 1.
Cut = Callable[[Numbers, Numbers], TokenIndices]


class Sampler:
    """Chooses the tokens of one answer.

    The k-th choice depends on the seed, on k and on the logits, not on what else is computed.
    """

    seed: int  # drawn here where the request gives none

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int) -> None:
        """Prepare for logits of `vocabulary` tokens. Raises UnknownToken for a bias outside it."""
        given = sampling.seed
        self.seed = secrets.randbits(SEED_BITS) if given is None else given
        self._random = np.random.Generator(np.random.PCG64(self.seed % 2**64))  # no negative ones
        self._penalties = Penalties.of(sampling, prompt_ids, vocabulary)
        self._temperature = min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
        self._top_k = sampling.top_k
        self._greedy = sampling.temperature == 0 or sampling.top_k == 1
        self._cuts = _cuts(sampling)

    def next(
        self,
        logits: NDArray[np.float32],
        allowed: NDArray[np.bool_] | None = None,
        forbidden: Sequence[int] = (),
    ) -> int:
        """The next token, counted for the penalties.

        logits is [V] and stays as it is; allowed is [V], and forbidden lists ids that may not come
        although they are allowed. Raises EngineFailed for logits that are not numbers, or where
        nothing may follow; InvalidField where all that is allowed is forbidden.
        """
        scores = logits if self._penalties is None else self._penalties.applied(logits)
        if forbidden:
            scores = scores.copy() if scores is logits else scores
            scores[list(forbidden)] = -np.inf
        if allowed is None:
            token = self._place(scores)
        else:
            # Most masks leave few tokens, and then all that follows is about these few.
            ids = np.flatnonzero(allowed)
            if forbidden and np.isin(ids, forbidden).all():
                raise InvalidField(
                    "`grammar` cannot be followed: what it leaves is ruled out by how long the "
                    "answer must be, or by what it must not repeat",
                    field="grammar",
                )
            token = int(ids[self._place(scores[ids])])
        if self._penalties is not None:
            self._penalties.count(token)
        return token

    def _place(self, scores: NDArray[np.float32]) -> int:
        if not len(scores):
            raise EngineFailed("no token may follow")
        likeliest_place = int(scores.argmax())  # of one that is not a number, if there is any
        top = float(scores[likeliest_place])
        _check(top)
        return likeliest_place if self._greedy else self._sample(scores, top)

    def _sample(self, scores: NDArray[np.float32], top: float) -> int:
        share = self._random.random()  # one for each choice, whatever is left to choose from
        places: TokenIndices | None = None
        logs: Numbers
        with np.errstate(over="ignore"):  # the coldest temperatures take the rest to -inf
            if self._top_k is not None and self._top_k < len(scores):
                places = likeliest(scores, self._top_k)
                logs = (scores[places].astype(np.float64) - top) / self._temperature
            else:
                logs = scores - np.float32(top)
                logs /= np.float32(self._temperature)
        weights: Numbers = np.exp(logs) if self._cuts else np.exp(logs, out=logs)
        for cut in self._cuts:
            kept = cut(logs, weights)
            places = kept if places is None else places[kept]
            logs, weights = logs[kept], weights[kept]
        place = _index_at(weights, share)
        return place if places is None else int(places[place])


def log_probabilities(
    logits: NDArray[np.float32], token: int, alternatives: int
) -> tuple[float, list[tuple[int, float]]]:
    """What the model says of `token`, and of the `alternatives` likeliest tokens.

    Natural logarithms of the softmax of logits [V]; the likeliest first, equals by their ids.
    Raises EngineFailed for logits that are not numbers.
    """
    base = log_total(logits)
    best = likeliest(logits, alternatives) if alternatives else ()
    return float(logits[token]) - base, [(int(id_), float(logits[id_]) - base) for id_ in best]


def log_total(logits: NDArray[np.float32]) -> float:
    """The logarithm of the sum of the exponentials of logits [V]. Raises EngineFailed as above."""
    top = float(logits.max())
    _check(top)
    return top + math.log(float(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))


def likeliest(scores: Numbers, count: int) -> TokenIndices:
    """Places of the `count` highest of scores [N], the highest first, equals by place.

    All N where there are no more; `count` is at least 1.
    """
    count = min(count, len(scores))
    # The count-th highest of the highest of each block is a floor that at least `count` scores
    # reach, and hardly more: finding it costs a tenth of partitioning all of them.
    block = max(1, len(scores) // (4 * count))
    highest = np.maximum.reduceat(scores, np.arange(0, len(scores), block))
    floor = np.partition(highest, len(highest) - count)[len(highest) - count]
    places = np.flatnonzero(scores >= floor)
    return places[np.argsort(-scores[places], kind="stable")[:count]]


def _check(top: float) -> None:
    if math.isnan(top) or top == math.inf:
        raise EngineFailed("the model's logits are not numbers")
    if top == -math.inf:
        raise EngineFailed("no token may follow")


def _cuts(sampling: Sampling) -> tuple[Cut, ...]:
    """What takes tokens out after top-k, in order; options that would take none are left out."""
    cuts: list[Cut] = []
    if sampling.top_p is not None and sampling.top_p < 1:
        cuts.append(partial(_top_p, sampling.top_p))
    if sampling.min_p:
        cuts.append(partial(_min_p, sampling.min_p))
    if sampling.typical_p is not None and sampling.typical_p < 1:
        cuts.append(partial(_typical_p, sampling.typical_p))
    return tuple(cuts)


def _top_p(share: float, logs: Numbers, weights: Numbers) -> TokenIndices:
    return fewest(logs, weights, share)


def _min_p(floor: float, _logs: Numbers, weights: Numbers) -> TokenIndices:
    return np.flatnonzero(weights >= min(floor, 1.0))  # the likeliest, whose weight is 1, stays


def _typical_p(share: float, logs: Numbers, weights: Numbers) -> TokenIndices:
    possible = np.maximum(logs, -COLDEST_LOG)  # times a weight of zero it is zero, not NaN
    total = float(weights.sum(dtype=np.float64))
    mean = float((weights * possible).sum(dtype=np.float64)) / total  # less log(total): -entropy
    return fewest(-np.abs(possible - mean), weights, share)


def fewest(ranks: Numbers, weights: Numbers, share: float) -> TokenIndices:
    """The places of highest rank that together reach `share` of all weights: at least one."""
    goal = share * float(weights.sum(dtype=np.float64))
    places = likeliest(ranks, TOP_P_FIRST_CANDIDATES)
    reached = weights[places].cumsum(dtype=np.float64)
    if reached[-1] < goal and len(places) < len(weights):
        return _fewest_of_many(ranks, weights, share)
    return places[: int(np.searchsorted(reached, goal)) + 1]


def _fewest_of_many(ranks: Numbers, weights: Numbers, share: float) -> TokenIndices:
    """The same where they are thousands: only those of ranks near the last one's are sorted."""
    depths = ranks.max() - ranks
    span = min(float(depths.max()), MAX_LOG_WEIGHT_GAP) or 1.0
    steps = np.minimum(depths * (SORT_BINS / span), SORT_BINS).astype(np.intp)
    sums = np.bincount(steps, weights)
    ends = sums.cumsum()
    goal = share * float(ends[-1])
    last = int(np.searchsorted(ends, goal))
    edge = np.flatnonzero(steps == last)
    edge = edge[np.argsort(-ranks[edge], kind="stable")]
    reached = weights[edge].cumsum(dtype=np.float64) + float(ends[last] - sums[last])
    needed = int(np.searchsorted(reached, goal)) + 1
    return np.concatenate([np.flatnonzero(steps < last), edge[:needed]])


def _index_at(weights: Numbers, share: float) -> int:
    """The place where the running sum of weights passes `share`, in [0, 1), of their total.

    A weight of zero is never where it passes: `share` is below 1 by at least the spacing of
    doubles, so that the product is below the total also after rounding.
    """
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).astype(np.float64)
    ends = sums.cumsum()
    goal = share * float(ends[-1])
    block = int(np.searchsorted(ends, goal, side="right"))
    inner = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    within = (goal - float(ends[block] - sums[block])) / float(sums[block])
    within = min(max(within, 0.0), math.nextafter(1.0, 0.0))
    return block * BLOCK + int(np.searchsorted(inner, within * float(inner[-1]), side="right"))
