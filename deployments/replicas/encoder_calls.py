"""Calls of a micro-batch in an encoder replica, from their outputs to their outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments.artifacts.manifest import ArtifactManifest
from deployments.batching.calls import CallOutputs
from deployments.errors import ServeError, hide_details
from deployments.messages import (
    CallOutcome,
    CallResult,
    TokenizedBatch,
    TokenizedCall,
    TokenizedItem,
)
from deployments.tasks import TASKS, DecodeContext
from deployments.tokenization.encodings import translate_panics
from deployments.tokenization.vocabulary import TokenVocabulary

log = logging.getLogger("ray.serve.hundredfold")

# Maximum seconds to decode a call on the event loop. If a task predicts more, a thread decodes the
# call, so that other calls wait neither for the event loop nor for this call.
INLINE_DECODE_S = 2.5e-3


@dataclass(slots=True)
class SubmittedCall:
    tokenized: TokenizedCall
    items: Sequence[TokenizedItem]
    outputs: asyncio.Future[CallOutputs]
    large_values: int  # output values that count towards MAX_OUTPUT_VALUES
    decoding: Future[CallOutcome] | None = None  # set once a thread decodes the call

    def drop_decoding(self, then: Callable[[], None]) -> None:
        """Do not start a decode that waits for a thread; call `then` when no thread reads outputs.

        Call it on the event loop, where `then` runs too.
        """
        if self.decoding is None or self.decoding.cancel() or self.decoding.done():
            then()
        else:
            self.decoding.add_done_callback(_run_on_this_loop(then))


class DecodedCalls:
    """Outcomes of the calls of one micro-batch, in the order in which they end."""

    def __init__(
        self,
        batch: TokenizedBatch,
        calls: Sequence[SubmittedCall | ServeError],
        manifest: ArtifactManifest,
        vocabulary: TokenVocabulary | None,
        threads: Executor,
    ) -> None:
        self._calls = calls
        self._task = TASKS[batch.key.task]
        self._tokenize_s = batch.tokenize_s
        self._manifest = manifest
        self._vocabulary = vocabulary
        self._threads = threads
        self._indices: list[int] = []  # of calls that have ended or are decoded
        self._changed = asyncio.Event()
        for index, call in enumerate(calls):
            if isinstance(call, ServeError):
                self._add(index)
            else:
                call.outputs.add_done_callback(partial(self._add, index))

    async def take(self) -> dict[int, CallOutcome]:
        """Await the next outcomes, by call index: those of one pass that are decoded together.

        Calls with a long decode have outcomes of their own, so that the others do not wait.
        """
        outcomes: dict[int, CallOutcome] = {}
        while not outcomes:
            await self._changed.wait()
            self._changed.clear()
            taken, self._indices = self._indices, []
            for index in taken:
                outcome = self._decode_or_start(index)
                if outcome is not None:
                    outcomes[index] = outcome
        return outcomes

    def _add(self, index: int, _done: object = None) -> None:
        self._indices.append(index)
        self._changed.set()

    def _decode_or_start(self, index: int) -> CallOutcome | None:
        """Return the outcome of a call that has ended; None if a thread decodes it now."""
        call = self._calls[index]
        if isinstance(call, ServeError):
            return call
        if call.decoding is not None:
            return call.decoding.result()
        try:
            outputs = call.outputs.result()
        except ServeError as error:
            return error
        context = DecodeContext(
            rows=outputs.rows,
            items=call.items,
            token_offsets=call.tokenized.token_offsets,
            manifest=self._manifest,
            vocabulary=self._vocabulary,
        )
        decode = partial(self._decode, context, call.tokenized, outputs)
        try:
            is_long = self._task.predict_decode_s(context, call.tokenized.options) > INLINE_DECODE_S
        except Exception as error:  # noqa: BLE001  it is logged
            return self._log_and_hide(error)
        if not is_long:
            return decode()
        call.decoding = self._threads.submit(decode)
        call.decoding.add_done_callback(_run_on_this_loop(partial(self._add, index)))
        return None

    def _decode(
        self, context: DecodeContext, call: TokenizedCall, outputs: CallOutputs
    ) -> CallOutcome:
        try:
            with translate_panics():
                value = self._task.decode(context, call.options)
        except Exception as error:  # noqa: BLE001  it is logged
            return self._log_and_hide(error)
        return CallResult(
            value=value,
            compute_type=outputs.compute_type,
            truncated=call.truncated,
            timings=outputs.timings._replace(tokenize_s=self._tokenize_s),
        )

    def _log_and_hide(self, error: Exception) -> ServeError:
        if isinstance(error, ServeError):
            return error
        log.error("bug: task %s failed to decode", self._task.name, exc_info=error)
        return hide_details(error)


def _run_on_this_loop(call: Callable[[], None]) -> Callable[[Any], object]:
    """Return a callback for the end of work in a thread, which outlasts the loop if it closes."""
    loop = asyncio.get_running_loop()
    return lambda _done: None if loop.is_closed() else loop.call_soon_threadsafe(call)
