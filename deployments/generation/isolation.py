"""Attribution of failures: the KV slot that makes a decode step fail, or the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from deployments.engines.decoder import DecoderEngine, Logits
from deployments.errors import EngineFailed, EngineLost
from deployments.health import WorkerHealth

PROBE_TOKENS = 4

log = logging.getLogger("ray.serve.hundredfold")


class IsolatedStep(NamedTuple):
    """Result of a decode step. If a slot makes the step fail, only earlier slots are computed."""

    logits: Logits | None  # [n, V] of slots 0 to n-1; None if n is 0
    failed_slot: int | None = None  # the slot n that made the step fail; None: all worked
    error: Exception | None = None


def decode_isolated(decode: Callable[[int], Logits], slots: int) -> IsolatedStep:
    """Call `decode(slots)`. If it fails twice, find the first slot that makes it fail by bisection.

    `decode(n)` computes slots 0 to n-1. Repeating the call is safe: a step writes only after the
    valid tokens of a slot. Only EngineLost is raised; other errors are in the result.
    """
    error: Exception
    for _ in range(2):
        try:
            return IsolatedStep(decode(slots))
        except EngineLost:
            raise
        except Exception as exc:
            error = exc
            log.warning("a decode step over %d slots failed", slots, exc_info=exc)
    # If all smaller calls succeed, the search ends with decode(slots) again, because both failures
    # may have been temporary.
    computed, failing = 0, slots + 1
    logits: Logits | None = None
    while failing - computed > 1:
        middle = (computed + failing) // 2
        try:
            logits = decode(middle).copy()  # the next call overwrites the result
            computed = middle
        except EngineLost:
            raise
        except Exception as exc:
            failing, error = middle, exc
            log.warning("a decode step over %d slots failed too", middle, exc_info=exc)
    if computed == slots:
        return IsolatedStep(logits)
    return IsolatedStep(logits, failing - 1, error)


class EngineTest:
    """Records in a `WorkerHealth` whether the engine works.

    The prompts of one client may cause NaN logits or calls that raise. Such prompts must not lead
    to the quarantine of the model, so a failure counts only if a known good prompt fails too.
    """

    def __init__(self, decoder: DecoderEngine, health: WorkerHealth) -> None:
        self._decoder = decoder
        self._health = health
        # Whether the last failure was in a decode step and no decode step has succeeded since.
        self._decode_fails = False

    def record_success(self, *, is_decode: bool) -> None:
        # A prefill that succeeds must not hide decode steps that fail.
        if is_decode or not self._decode_fails:
            self._decode_fails = False
            self._health.record_success()

    def run(self, slot: int, lengths: Sequence[int], *, is_decode: bool) -> None:
        """Prefill a known good prompt in `slot`, after a failed decode step also decode a token.

        `lengths` are the used tokens of the slots before `slot`. The contents of `slot` are lost.
        Only EngineLost is raised.
        """
        info, prompt = self._decoder.info, list(range(PROBE_TOKENS))
        # The slot of an encoder-decoder begins with the decoder start token, not with the prompt.
        used = PROBE_TOKENS if info.max_source_tokens is None else 1
        try:
            _check_finite(self._decoder.prefill(slot, prompt, 0))
            if is_decode:
                ids = np.zeros(slot + 1, np.int64)
                _check_finite(self._decoder.decode(ids, np.array([*lengths, used]))[slot])
        except EngineLost:
            raise
        except Exception as error:  # noqa: BLE001  any error shows that the engine does not work
            self._decode_fails = is_decode
            self._health.record_failure(error)
        else:
            self.record_success(is_decode=is_decode)


def _check_finite(logits: Logits) -> None:
    # The highest logit, because models may forbid tokens with infinite ones.
    if not np.isfinite(logits.max()):
        raise EngineFailed("the logits of a known good prompt are NaN or infinite")
