"""Token selection from logits: penalties, allowed tokens, temperature, filters, sampling.

The order is that of the transformers library. Penalties and biases change logits, and a mask
removes tokens. The temperature scales the remaining logits. Top-k, top-p, min-p and typical-p
follow in this order. Each filters the tokens that the previous filter retained.

A whole vocabulary is sorted only if the distribution is nearly flat. For 50,000 tokens a sort alone
would take as long as the rest of a decode step of one slot.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deployments.errors import EngineFailed, InvalidField
from deployments.generation.logits_rules import Penalties
from deployments.messages import SamplingParams
from deployments.top_indices import Numbers, top_indices

SEED_BITS = 63  # clients store the returned seed as a signed 64-bit integer
# Temperatures beyond these bounds have no further effect, but overflow float32.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
# Weights are summed per block of this many tokens. Only the block that contains the chosen token is
# then summed token by token.
SUM_BLOCK = 256
# Top-p and typical-p first sort only this many of the best tokens. If their total probability is
# too small, all tokens are put into SORT_BINS bins by log-weight or typicality. The bins cover a
# range of at most MAX_LOG_WEIGHT_GAP, and one more bin has the rest.
TOP_P_FIRST_CANDIDATES = 64
SORT_BINS = 4096
MAX_LOG_WEIGHT_GAP = 32.0
MAX_ABS_LOG_WEIGHT = 1e30  # replaces infinite log-weights

TokenIndices = NDArray[np.intp]
# Takes log-weights and weights [N] of N tokens and returns the indices of the retained ones.
# Log-weights are relative to the most likely token, whose weight is 1.
LogitFilter = Callable[[Numbers, Numbers], TokenIndices]


class Sampler:
    """Sampler of the tokens of one answer.

    A choice does not depend on other requests in the batch. It depends on the parameters of this
    request, its logits and the earlier tokens. The k-th random number depends on the seed and k.
    """

    seed: int  # random if the request has none

    def __init__(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], vocabulary: int
    ) -> None:
        """Take `vocabulary` as the number of logits. Raises UnknownToken for a bias beyond it."""
        self.seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
        # PCG64 rejects negative seeds.
        self._random = np.random.Generator(np.random.PCG64(self.seed % 2**64))
        self._penalties = Penalties.from_params(sampling, prompt_ids, vocabulary)
        self._temperature = min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
        self._top_k = sampling.top_k
        self._greedy = sampling.temperature == 0 or sampling.top_k == 1
        self._filters = _build_filters(sampling)

    def next(
        self,
        logits: NDArray[np.float32],
        allowed: NDArray[np.bool_] | None = None,
        forbidden: Sequence[int] = (),
    ) -> int:
        """Choose the next token and count it for the penalties.

        `logits` [V] are not modified. `allowed` is a mask [V]. `forbidden` ids are excluded even if
        they are allowed. Raises EngineFailed if the best score is NaN or infinite, or if no
        token is possible. Raises InvalidField if all allowed tokens are forbidden.
        """
        scores = logits if self._penalties is None else self._penalties.apply(logits)
        if forbidden:
            scores = scores.copy() if scores is logits else scores
            scores[list(forbidden)] = -np.inf
        if allowed is None:
            token = self._choose(scores)
        else:
            # Most masks allow few tokens, so the following steps process only these.
            ids = np.flatnonzero(allowed)
            if forbidden and len(ids) and np.isin(ids, forbidden).all():
                raise InvalidField(
                    "`grammar` allows no token here that the minimum length and the repetition "
                    "limit permit. Relax one of the three.",
                    field="grammar",
                )
            token = int(ids[self._choose(scores[ids])])
        if self._penalties is not None:
            self._penalties.count(token)
        return token

    def _choose(self, scores: NDArray[np.float32]) -> int:
        if not len(scores):
            raise EngineFailed("no token is possible")
        top_index = int(scores.argmax())  # argmax returns the index of a NaN if there is one
        top = float(scores[top_index])
        _check_finite(top)
        return top_index if self._greedy else self._sample(scores, top)

    def _sample(self, scores: NDArray[np.float32], top: float) -> int:
        quantile = self._random.random()  # one number per choice, whatever the filters retain
        indices: TokenIndices | None = None
        logs: Numbers
        with np.errstate(over="ignore"):  # very low temperatures turn differences into -inf
            if self._top_k is not None and self._top_k < len(scores):
                indices = top_indices(scores, self._top_k)
                logs = (scores[indices].astype(np.float64) - top) / self._temperature
            else:
                logs = scores - np.float32(top)
                logs /= np.float32(self._temperature)
        weights: Numbers = np.exp(logs) if self._filters else np.exp(logs, out=logs)
        for filter_ in self._filters:
            retained = filter_(logs, weights)
            indices = retained if indices is None else indices[retained]
            logs, weights = logs[retained], weights[retained]
        index = _index_at(weights, quantile)
        return index if indices is None else int(indices[index])


def log_probabilities(
    logits: NDArray[np.float32], token: int, alternatives: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return the log-probability of `token`, and the most likely tokens with log-probabilities.

    `alternatives` is the number of most likely tokens. They are sorted, most likely first, ties by
    id. Log-probabilities are natural logarithms of the softmax of `logits` [V]. Raises EngineFailed
    if the highest logit is NaN or infinite.
    """
    base = log_total(logits)
    best = top_indices(logits, alternatives) if alternatives else ()
    return float(logits[token]) - base, [(int(id_), float(logits[id_]) - base) for id_ in best]


def log_total(logits: NDArray[np.float32]) -> float:
    """Return the log-sum-exp of logits [V]. Raises EngineFailed if the highest is not finite."""
    top = float(logits.max())
    _check_finite(top)
    return top + math.log(float(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))


def _check_finite(top: float) -> None:
    if math.isnan(top) or top == math.inf:
        raise EngineFailed("the model returned NaN or infinite logits")
    if top == -math.inf:
        raise EngineFailed("no token is possible")


def _build_filters(sampling: SamplingParams) -> tuple[LogitFilter, ...]:
    """Build the filters after top-k, in order. Omit filters that would retain every token."""
    filters: list[LogitFilter] = []
    if sampling.top_p is not None and sampling.top_p < 1:
        filters.append(partial(_top_p, sampling.top_p))
    if sampling.min_p:
        filters.append(partial(_min_p, sampling.min_p))
    if sampling.typical_p is not None and sampling.typical_p < 1:
        filters.append(partial(_typical_p, sampling.typical_p))
    return tuple(filters)


def _top_p(probability: float, logs: Numbers, weights: Numbers) -> TokenIndices:
    return smallest_set_reaching(logs, weights, probability)


def _min_p(floor: float, _logs: Numbers, weights: Numbers) -> TokenIndices:
    return np.flatnonzero(weights >= floor)  # the most likely token has weight 1


def _typical_p(probability: float, logs: Numbers, weights: Numbers) -> TokenIndices:
    finite = np.maximum(logs, -MAX_ABS_LOG_WEIGHT)  # 0 times -inf would be NaN
    total = float(weights.sum(dtype=np.float64))
    mean = float((weights * finite).sum(dtype=np.float64)) / total  # log(total) - entropy
    return smallest_set_reaching(-np.abs(finite - mean), weights, probability)


def smallest_set_reaching(ranks: Numbers, weights: Numbers, probability: float) -> TokenIndices:
    """Return the fewest indices, of the highest ranks, whose weights sum to `probability` or more.

    `probability` is a share of the sum of all weights. Returns at least one index.
    """
    goal = probability * float(weights.sum(dtype=np.float64))
    indices = top_indices(ranks, TOP_P_FIRST_CANDIDATES)
    reached = weights[indices].cumsum(dtype=np.float64)
    if reached[-1] < goal and len(indices) < len(weights):
        return _smallest_large_set(ranks, weights, probability)
    return indices[: int(np.searchsorted(reached, goal)) + 1]


def _smallest_large_set(ranks: Numbers, weights: Numbers, probability: float) -> TokenIndices:
    """Do the same as `smallest_set_reaching`, but sort only the bin in which the set ends."""
    depths = ranks.max() - ranks
    span = min(float(depths.max()), MAX_LOG_WEIGHT_GAP) or 1.0
    bins = np.minimum(depths * (SORT_BINS / span), SORT_BINS).astype(np.intp)
    sums = np.bincount(bins, weights)
    ends = sums.cumsum()
    goal = probability * float(ends[-1])
    last = int(np.searchsorted(ends, goal))
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(-ranks[edge], kind="stable")]
    reached = weights[edge].cumsum(dtype=np.float64) + float(ends[last] - sums[last])
    needed = int(np.searchsorted(reached, goal)) + 1
    return np.concatenate([np.flatnonzero(bins < last), edge[:needed]])


def _index_at(weights: Numbers, quantile: float) -> int:
    """Return the index at which the running sum of weights passes `quantile` times their total.

    `quantile` is in [0, 1). The index never has weight 0: `quantile` is below 1 by at least the
    spacing of doubles, so the product is below the total even after rounding.
    """
    sums = np.add.reduceat(weights, np.arange(0, len(weights), SUM_BLOCK)).astype(np.float64)
    ends = sums.cumsum()
    goal = quantile * float(ends[-1])
    block = int(np.searchsorted(ends, goal, side="right"))
    inner = weights[block * SUM_BLOCK : (block + 1) * SUM_BLOCK].cumsum(dtype=np.float64)
    within = (goal - float(ends[block] - sums[block])) / float(sums[block])
    within = min(max(within, 0.0), math.nextafter(1.0, 0.0))
    return block * SUM_BLOCK + int(np.searchsorted(inner, within * float(inner[-1]), side="right"))
