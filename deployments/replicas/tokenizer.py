"""The tokenizer deployment: lists of calls in, ragged token ids out; and tokens to look at."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from deployments.config import AppArgs, TokenizerUserConfig
from deployments.errors import DeadlineExceeded, EngineFailed, ServeError
from deployments.messages import (
    Call,
    CallBatch,
    DecodeRequest,
    EncodedBatch,
    EncodedCall,
    ModelRef,
    TextTokens,
    TokenizeRequest,
    characters,
)
from deployments.records import EncodeRecord, EncodeRecorder
from deployments.registry import Registry, why_not_loaded
from deployments.tokenization.tokenizer import Encoded, Encoder
from deployments.tokenization.vocabulary import TokenTable

T = TypeVar("T")

# Characters encoded on the event loop itself: a tenth of a millisecond, less than the way to the
# thread and back.
INLINE_CHARACTERS = 4_000
# What the thread does takes seconds for the longest lists: the tokenizer hangs.
STUCK_AFTER_S = 60.0


class TokenizerReplica:
    """Encodes on one thread of its own, so that long texts never block the event loop."""

    def __init__(self, args: AppArgs, recorder: EncodeRecorder) -> None:
        self._recorder = recorder
        registry = Registry.of(args)
        self._directories = {model.ref: model.directory for model in registry.open_models()}
        self._encoders, self._failed = registry.open_each(
            lambda model: Encoder(model.directory, model.manifest.max_tokens)
        )
        self._tables: dict[ModelRef, TokenTable] = {}  # opened when somebody first asks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._began_s: float | None = None  # what the thread does now
        # Encoders serve one caller at a time, and a list whose caller is gone is still encoded.
        self._encoders_in_use = threading.Lock()

    def configure(self, settings: TokenizerUserConfig) -> None:
        """Share the cache bytes among the models."""
        self._thread.submit(self._resize_caches, settings.cache_bytes)

    async def encode(self, batch: CallBatch) -> EncodedBatch:
        """The batch with token ids for texts; calls that cannot be encoded become errors."""
        if _is_short(batch) and self._encoders_in_use.acquire(blocking=False):
            try:
                return self._encode(batch)
            finally:
                self._encoders_in_use.release()
        return await self._in_thread(lambda: self._encode_in_thread(batch))

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...] | ServeError:
        """The tokens of each text."""
        return await self._by_table(
            request.model, lambda table: table.tokens(request.texts, special=request.special)
        )

    async def decode(self, request: DecodeRequest) -> tuple[str, ...] | ServeError:
        """The text of each sequence of token ids."""
        return await self._by_table(
            request.model,
            lambda table: table.texts(request.sequences, skip_special=request.skip_special),
        )

    async def check(self) -> None:
        """Raise when the thread no longer answers; a long line is no illness."""
        began_s = self._began_s
        if began_s is not None and time.perf_counter() - began_s > STUCK_AFTER_S:
            raise EngineFailed("the tokenizer's thread hangs")

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()

    def _resize_caches(self, cache_bytes: int) -> None:
        with self._encoders_in_use:
            for encoder in self._encoders.values():
                encoder.resize_cache(cache_bytes // len(self._encoders))

    async def _by_table(self, model: ModelRef, ask: Callable[[TokenTable], T]) -> T | ServeError:
        """What the model's table answers, in the thread; a ServeError is an answer too."""
        if model not in self._encoders:
            return why_not_loaded(model, self._failed)

        def asked() -> T | ServeError:
            try:
                return ask(self._table(model))
            except ServeError as error:
                return error

        return await self._in_thread(asked)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """What `work` gives, in the thread, whose beginning is noted."""

        def noted() -> T:
            self._began_s = time.perf_counter()
            try:
                return work()
            finally:
                self._began_s = None

        return await asyncio.get_running_loop().run_in_executor(self._thread, noted)

    def _table(self, model: ModelRef) -> TokenTable:
        if model not in self._tables:
            self._tables[model] = TokenTable(self._directories[model])
        return self._tables[model]

    def _encode_in_thread(self, batch: CallBatch) -> EncodedBatch:
        with self._encoders_in_use:
            return self._encode(batch)

    def _encode(self, batch: CallBatch) -> EncodedBatch:
        started_s = time.perf_counter()
        encoder = self._encoders.get(batch.key.model)
        if encoder is None:
            gone = why_not_loaded(batch.key.model, self._failed)
            return EncodedBatch(batch.key, b"", (gone,) * len(batch.calls), 0.0)
        ids = []
        calls: list[EncodedCall | ServeError] = []
        before = encoder.lookups
        now_s = time.time()  # nobody waits for what should have been there before
        in_time = [call for call in batch.calls if call.deadline_s >= now_s]
        encoded = iter(encoder.encode(in_time))
        for call in batch.calls:
            outcome = next(encoded) if call.deadline_s >= now_s else _late()
            if isinstance(outcome, ServeError):
                calls.append(outcome)
                continue
            ids += [item.ids for item in outcome.items]
            calls.append(_encoded_call(call, outcome))
        flat = np.concatenate(ids).tobytes() if ids else b""
        encode_s = time.perf_counter() - started_s
        texts, kept = (now - then for now, then in zip(encoder.lookups, before, strict=True))
        self._recorder.record(EncodeRecord(batch.key.model.id, encode_s, texts, kept))
        return EncodedBatch(batch.key, flat, tuple(calls), encode_s)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed while waiting for the tokenizer")


def _is_short(batch: CallBatch) -> bool:
    texts = (text for call in batch.calls for text in call.texts)
    return sum(map(characters, texts)) <= INLINE_CHARACTERS


def _encoded_call(call: Call, outcome: Encoded) -> EncodedCall:
    lengths = tuple(len(item.ids) for item in outcome.items)
    seconds = tuple(item.second_from for item in outcome.items)
    travelling = seconds if seconds != lengths else ()
    return EncodedCall(
        lengths, outcome.truncated, call.options, call.deadline_s, travelling, outcome.layouts
    )
