"""Tokenizer replica: converts micro-batches of texts to token ids; lists and decodes tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.types import ModelHead
from deployments.config import AppArgs, TokenizerUserConfig
from deployments.deadlines import is_expired, remaining_s
from deployments.errors import (
    DeadlineExceeded,
    Overloaded,
    ServeError,
    build_overloaded,
    hide_details,
)
from deployments.health import WorkerHealth
from deployments.load import BusyMeter, Load, WorkRate
from deployments.messages import (
    Call,
    CallBatch,
    DecodeRequest,
    ModelRef,
    TextTokens,
    TokenizedBatch,
    TokenizedCall,
    TokenizeRequest,
    count_characters,
)
from deployments.records import TokenizeRecord, TokenizeRecorder
from deployments.registry import RegisteredModel
from deployments.replicas.fair_threads import FairThreads
from deployments.replicas.model_pool import ModelLoader, ModelPool
from deployments.replicas.pinned_models import PinnedModels
from deployments.tokenization.encodings import measure_tokenizer, translate_panics
from deployments.tokenization.slices import (
    SLICE_CHARACTERS,
    CallMerger,
    CallPart,
    cut_calls,
    cut_sequences,
)
from deployments.tokenization.tokenizer import CachingTokenizer, TokenCache, TokenizedTexts
from deployments.tokenization.vocabulary import TokenInspector

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")
S = TypeVar("S", bound=Sequence[Any])

# Maximum characters of a slice that is tokenized on the event loop. A slice of this size takes
# 0.1 ms, less than a round trip to the thread.
INLINE_CHARACTERS = 4_000


class _SliceResult(NamedTuple):
    outcomes: list[TokenizedTexts | ServeError]  # one per part
    elapsed_s: float
    characters: int  # characters of the calls that have not expired


# Heads of the models whose tasks need windows, for which CachingTokenizer opens a second tokenizer.
_WINDOWED_HEADS = (ModelHead.TOKENS, ModelHead.SPAN)


def _measure(model: RegisteredModel) -> int:
    copies = 2 if model.manifest.head in _WINDOWED_HEADS else 1
    return copies * measure_tokenizer(model.directory)


class TokenizerReplica:
    """Replica that tokenizes texts, long ones on a thread so that the event loop stays free."""

    def __init__(
        self,
        args: AppArgs,
        recorder: TokenizeRecorder,
        *,
        generative: bool | None = None,
    ) -> None:
        """Load pinned models: all (`generative` None), generators (True) or encoders (False)."""
        self._recorder = recorder
        self._hang_timeout_s = args.hang_timeout_s
        self._cache = TokenCache(0)
        self._pinned = PinnedModels(
            args, lambda model: generative is None or model.is_generative is generative
        )
        self.pool = ModelPool(
            args.store_path(),
            ModelLoader(
                _measure,
                self._load,
                lambda _ref, _tokenizer: None,
                limit_setting="tokenizer_pool_bytes",
            ),
            args.tokenizer_pool_bytes,
            self._pinned.refs,
        )
        self._pinned.load_into(self.pool)
        self._thread = FairThreads("tokenizer")
        self._health = WorkerHealth("the tokenizer thread")
        self._meter = BusyMeter(1)
        self._character_rate = WorkRate()
        self._characters: Counter[str] = Counter()  # characters in progress, by client
        # A tokenizer serves one caller at a time. The thread may still work on a batch after its
        # caller disconnected. The event loop must therefore take this lock too.
        self._tokenizers_in_use = threading.Lock()

    def start(self) -> None:
        """Load newly pinned models from now on."""
        self._pinned.start(self.pool)

    def configure(self, settings: TokenizerUserConfig) -> None:
        """Set the size of the tokenization cache, which all models share."""
        self._thread.submit(partial(self._resize_cache, settings.cache_bytes))

    async def tokenize_batch(self, batch: CallBatch) -> TokenizedBatch:
        """Replace the texts of each call with token ids, or a failed call with its error.

        The thread tokenizes a long call in slices, and serves other clients between two slices. A
        slice with calls of several clients counts as work for the client of its first call. A
        batch without calls only loads its model. Raises the ServeError of a model that cannot be
        loaded.
        """
        async with self.pool.lease(batch.key.model) as tokenizer:
            if not batch.calls:
                return TokenizedBatch(batch.key, b"", (), 0.0)
            return await self._tokenize_batch(batch, tokenizer)

    async def _tokenize_batch(
        self, batch: CallBatch, tokenizer: CachingTokenizer
    ) -> TokenizedBatch:
        batch = batch._replace(calls=tuple(map(tokenizer.join_pairs, batch.calls)))
        mergers = [CallMerger(call) for call in batch.calls]
        waiting = _count_characters(batch.calls)
        # Only a call that is alone in its batch can be refused. A batch of several calls has only
        # short calls, and no call may be refused because of the others.
        if len(batch.calls) == 1 and (refusal := self._refuse(batch.calls[0], waiting)):
            return TokenizedBatch(batch.key, b"", (refusal,), 0.0)
        client = batch.calls[0].client
        self._characters[client] += waiting
        tokenize_s = 0.0
        try:
            for parts in cut_calls(batch.calls):
                characters = _count_characters([part.call for part in parts])
                needed = [part for part in parts if mergers[part.call_index].error is None]
                if needed:
                    done = await self._take_turn(tokenizer, batch.key.model, needed, characters)
                    tokenize_s += done.elapsed_s
                    for part, outcome in zip(needed, done.outcomes, strict=True):
                        mergers[part.call_index].add(part, outcome)
                self._characters[client] -= characters
                waiting -= characters
        finally:
            self._characters[client] -= waiting
            if not self._characters[client]:
                del self._characters[client]
        merged = [merger.merge() for merger in mergers]
        return _build_batch(batch, merged, tokenize_s)

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...] | ServeError:
        return await self._inspect(
            request,
            request.texts,
            lambda inspector, texts: inspector.tokens(texts, special=request.special),
        )

    async def decode(self, request: DecodeRequest) -> tuple[str, ...] | ServeError:
        """Return the text of each sequence of token ids."""
        return await self._inspect(
            request,
            request.sequences,
            lambda inspector, ids: inspector.texts(
                ids, skip_special=request.skip_special, trim_special=request.trim_special
            ),
        )

    def measure_load(self, backlog: int = 0) -> Load:
        """Return the share of time spent on tokenization, and the predicted time of waiting work.

        `backlog` is the number of characters that wait for this replica in other processes.
        """
        characters = sum(self._characters.values()) + backlog
        return Load(self._meter.take(), self._character_rate.predict_s(characters))

    async def check_health(self) -> None:
        """Raise EngineFailed if the thread hangs. A long queue is no failure."""
        self._health.check(self._hang_timeout_s)

    async def close(self) -> None:
        """Stop loading models, refuse queued work, and end the tokenizer thread."""
        self._pinned.close()
        self.pool.shut_down()
        await self._thread.close()

    def _resize_cache(self, cache_bytes: int) -> None:
        with self._tokenizers_in_use:
            self._cache.resize(cache_bytes)

    def _load(self, model: RegisteredModel) -> CachingTokenizer:
        """Open the tokenizer of a model. Blocks."""
        manifest = model.manifest
        manifest.verify(model.directory, (TOKENIZER_NAME,))
        return CachingTokenizer(
            model.directory,
            manifest.max_tokens,
            self._cache,
            pair_template=manifest.pair_template,
        )

    async def _inspect(
        self,
        request: TokenizeRequest | DecodeRequest,
        inputs: Sequence[S],
        call: Callable[[TokenInspector, Sequence[S]], tuple[T, ...]],
    ) -> tuple[T, ...] | ServeError:
        """Apply `call` to all inputs, in several slices if they are long.

        This method has no deadline. The caller cancels it at the deadline of the request.
        """

        def run(tokenizer: CachingTokenizer, part: Sequence[S]) -> tuple[T, ...]:
            with translate_panics():
                return call(tokenizer.inspector, part)

        found: list[T] = []
        try:
            async with self.pool.lease(request.model) as tokenizer:
                for part in cut_sequences(inputs):
                    found += await self._in_thread(
                        partial(run, tokenizer, part),
                        sum(map(len, part)),
                        client=request.client,
                        priority=request.priority,
                    )
        except ServeError as error:
            return error
        return tuple(found)

    async def _in_thread(
        self, work: Callable[[], T], units: int, *, client: str = "", priority: int = 0
    ) -> T:
        """Queue `work` for the thread. `units`, its cost, is the number of characters or ids."""

        def run() -> T:
            with self._health.running(), self._meter.running():
                return work()

        return await self._thread.run(run, cost=1 + units, client=client, priority=priority)

    def _refuse(self, call: Call, characters: int) -> Overloaded | None:
        """Return an error for a long call that cannot be tokenized before its deadline.

        The prediction assumes that each other client takes turns with this client until one of the
        two has no more calls. If no call is in progress, every call is accepted.
        """
        if characters <= SLICE_CHARACTERS or not self._characters:
            return None
        own = self._characters[call.client] + characters
        shared = sum(min(each, own) for each in self._characters.values())
        ahead = own + shared - self._characters[call.client]
        needed_s, left_s = self._character_rate.predict_s(ahead), remaining_s(call.deadline_s)
        if needed_s <= left_s:
            return None
        return build_overloaded(
            f"Tokenization would take about {needed_s:.1f} s, the deadline is in {left_s:.1f} s. "
            "Retry later.",
            needed_s - left_s,
            needed_s,
        )

    async def _take_turn(
        self,
        tokenizer: CachingTokenizer,
        model: ModelRef,
        parts: Sequence[CallPart],
        characters: int,
    ) -> _SliceResult:
        """Tokenize one slice.

        Run on the event loop if the slice is short, has no windows and the tokenizers are free,
        else on the thread. Windows take longer than their number of characters says.
        """
        calls = [part.call for part in parts]
        has_windows = any(call.windowing is not None for call in calls)
        is_short = characters <= INLINE_CHARACTERS and not has_windows
        if is_short and self._tokenizers_in_use.acquire(blocking=False):
            try:
                with self._meter.running():
                    return self._tokenize(tokenizer, model, calls)
            finally:
                self._tokenizers_in_use.release()

        def run() -> _SliceResult:
            with self._tokenizers_in_use:
                return self._tokenize(tokenizer, model, calls)

        done = await self._in_thread(
            run,
            characters,
            client=calls[0].client,
            priority=min(call.priority for call in calls),
        )
        if done.characters:
            self._character_rate.record(done.characters, done.elapsed_s)
        return done

    def _tokenize(
        self, tokenizer: CachingTokenizer, model: ModelRef, calls: Sequence[Call]
    ) -> _SliceResult:
        started_s = time.perf_counter()
        lookups, hits = tokenizer.lookups
        expired = [is_expired(call.deadline_s) for call in calls]
        live = [call for call, late in zip(calls, expired, strict=True) if not late]
        outcomes = iter(_tokenize_calls(tokenizer, live))
        results = [_deadline_error() if late else next(outcomes) for late in expired]
        elapsed_s = time.perf_counter() - started_s
        all_lookups, all_hits = tokenizer.lookups
        self._recorder.record(
            TokenizeRecord(model.id, elapsed_s, all_lookups - lookups, all_hits - hits)
        )
        return _SliceResult(results, elapsed_s, _count_characters(live))


def _build_batch(
    batch: CallBatch, outcomes: Sequence[TokenizedTexts | ServeError], tokenize_s: float
) -> TokenizedBatch:
    ids = [
        item.ids
        for outcome in outcomes
        if isinstance(outcome, TokenizedTexts)
        for item in outcome.items
    ]
    calls = tuple(
        outcome if isinstance(outcome, ServeError) else _tokenized_call(call, outcome)
        for call, outcome in zip(batch.calls, outcomes, strict=True)
    )
    flat = np.concatenate(ids).tobytes() if ids else b""
    return TokenizedBatch(batch.key, flat, calls, tokenize_s)


def _tokenize_calls(
    tokenizer: CachingTokenizer, calls: Sequence[Call]
) -> list[TokenizedTexts | ServeError]:
    """Tokenize calls together. If that fails, tokenize each alone: only faulty calls then fail."""
    try:
        with translate_panics():
            return list(tokenizer.tokenize(calls))
    except Exception as error:
        if len(calls) == 1:
            log.error("bug: a call cannot be tokenized", exc_info=error)
            return [hide_details(error)]
    return [_tokenize_calls(tokenizer, [call])[0] for call in calls]


def _deadline_error() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed in the tokenizer queue")


def _count_characters(calls: Sequence[Call]) -> int:
    return sum(count_characters(text) for call in calls for text in call.texts)


def _tokenized_call(call: Call, outcome: TokenizedTexts) -> TokenizedCall:
    lengths = tuple(len(item.ids) for item in outcome.items)
    starts = tuple(item.second_segment_start for item in outcome.items)
    return TokenizedCall(
        lengths,
        outcome.truncated,
        call.options,
        call.deadline_s,
        starts if starts != lengths else (),
        outcome.token_offsets,
        call.client,
        call.priority,
    )
