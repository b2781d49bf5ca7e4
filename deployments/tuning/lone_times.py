"""Times of lone passes in the two sessions of a model, learned from the passes.

The cost tables of a host are measured once, and a virtual machine has slow minutes. On two virtual
cores that sometimes share one physical core, the table of such a minute put all cores 24 % behind
one thread. In other minutes they took 1.8 ms instead of 2.7, but lone requests ran on one thread
ever after. The tables therefore give only the first estimates. Each lone pass corrects the estimate
of its session, and one in TRIAL_INTERVAL passes tries the session that seems slower.

Nothing here reads a clock or a random number: the same passes lead to the same choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from deployments.load import WorkRate
from deployments.tuning.costs import Cost, Shape
from deployments.tuning.selection import nearest_shape

# The first passes use all cores if their lowest time in the tables exceeds that of one thread by at
# most this share. In a tie all cores come first, because disturbances slow them more.
MAX_LOSS = 0.1
# At first, all cores count with at most this multiple of the time of one thread. A table of all
# cores that was measured next to a crowd of requests had up to 34 times the time of one thread.
MAX_FIRST = 1.5
# One in this many lone passes of a shape uses the session that seems slower. The number is prime.
# Otherwise the trials could meet the same few texts of a client that repeats them in order, and
# these would be compared with all texts.
TRIAL_INTERVAL = 31
# Each pass multiplies the weight of all earlier ones by this factor. The first pass thus weighs
# about as much as the table, and a later one a tenth.
DECAY = 0.9
# A pass counts with at most this multiple of its predicted time. One stall thus changes little, but
# ten passes suffice to follow a machine that has become slower.
MAX_STRETCH = 1.5
_CACHED_SHAPES = 4_096


class SessionTime:
    """Moving mean of the time per padded token of one session, near one shape."""

    def __init__(self, shape: Shape, ms: float) -> None:
        """Start with an estimate that counts as one pass of `shape` that took `ms`."""
        self._rate = WorkRate(DECAY)
        self._rate.record(shape.area, ms / 1e3)

    def predict_s(self, tokens: int) -> float:
        return self._rate.predict_s(tokens)

    def record(self, tokens: int, forward_s: float) -> None:
        self._rate.record(tokens, min(forward_s, MAX_STRETCH * self.predict_s(tokens)))


class ShapeTimes:
    """Times of both sessions near one measured shape, and the choice between them."""

    def __init__(self, one_thread: Cost, all_cores: Cost | None) -> None:
        """Start with the lowest measured times.

        Times of several threads were measured next to other requests and include waiting for cores,
        but a lone pass never waits. Times of one thread are CPU times, which never include waiting.
        """
        shape = one_thread.shape
        self.usual = SessionTime(shape, one_thread.low_ms)
        self.all_cores: SessionTime | None = None  # None if all cores were not measured
        if all_cores is not None:
            first_ms = min(all_cores.low_ms / (1 + MAX_LOSS), MAX_FIRST * one_thread.low_ms)
            self.all_cores = SessionTime(shape, first_ms)
        self._untried = 0  # passes since the latest trial

    def choose(self) -> SessionTime:
        """Return the session for the next lone pass: the faster one, or the other for a trial.

        Trials are rarer if the slower session takes more than twice as long, as one thread does on
        a host with many cores. They thus lengthen lone passes by at most 1 / TRIAL_INTERVAL.
        """
        if self.all_cores is None:
            return self.usual
        faster, slower = self.all_cores, self.usual
        faster_s, slower_s = faster.predict_s(1), slower.predict_s(1)
        if slower_s < faster_s:
            faster, slower, faster_s, slower_s = slower, faster, slower_s, faster_s
        self._untried += 1
        if self._untried * faster_s < TRIAL_INTERVAL * max(faster_s, slower_s - faster_s):
            return faster
        self._untried = 0
        return slower


class LonePassTimes:
    """Times of the lone passes of one model, which start with its cost tables."""

    def __init__(self, one_thread: Mapping[Shape, Cost], all_cores: Mapping[Shape, Cost]) -> None:
        self._by_shape = {
            shape: ShapeTimes(cost, all_cores.get(shape)) for shape, cost in one_thread.items()
        }
        self.at = lru_cache(_CACHED_SHAPES)(self._at)

    def _at(self, items: int, tokens: int) -> ShapeTimes:
        """Return the times near this shape."""
        return self._by_shape[nearest_shape(self._by_shape, items, tokens)]
