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
    ModelRef,
    TextTokens,
    TokenizedBatch,
    TokenizedCall,
    TokenizeRequest,
    characters,
)
from deployments.records import TokenizeRecord, TokenizeRecorder
from deployments.registry import ModelRegistry, load_error
from deployments.tokenization.tokenizer import CachingTokenizer, TokenizedTexts
from deployments.tokenization.vocabulary import TokenInspector

T = TypeVar("T")

# Characters encoded on the event loop itself: a tenth of a millisecond, less than the way to the
# thread and back.
INLINE_CHARACTERS = 4_000
# What the thread does takes seconds for the longest lists: the tokenizer hangs.
HANG_TIMEOUT_S = 60.0


class TokenizerReplica:
    """Encodes on one thread of its own, so that long texts never block the event loop."""

    def __init__(self, args: AppArgs, recorder: TokenizeRecorder) -> None:
        self._recorder = recorder
        registry = ModelRegistry.of(args)
        self._directories = {model.ref: model.directory for model in registry.open_models()}
        self._tokenizers, self._failed = registry.load_each(
            lambda model: CachingTokenizer(model.directory, model.manifest.max_tokens)
        )
        self._tables: dict[ModelRef, TokenInspector] = {}  # opened when somebody first asks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._began_s: float | None = None  # what the thread does now
        # Encoders serve one caller at a time, and a list whose caller is gone is still encoded.
        self._tokenizers_in_use = threading.Lock()

    def configure(self, settings: TokenizerUserConfig) -> None:
        """Share the cache bytes among the models."""
        self._thread.submit(self._resize_caches, settings.cache_bytes)

    async def tokenize_batch(self, batch: CallBatch) -> TokenizedBatch:
        """The batch with token ids for texts; calls that cannot be encoded become errors."""
        if _is_short(batch) and self._tokenizers_in_use.acquire(blocking=False):
            try:
                return self._tokenize(batch)
            finally:
                self._tokenizers_in_use.release()
        return await self._in_thread(lambda: self._tokenize_in_thread(batch))

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...] | ServeError:
        """The tokens of each text."""
        return await self._inspect(
            request.model, lambda table: table.tokens(request.texts, special=request.special)
        )

    async def decode(self, request: DecodeRequest) -> tuple[str, ...] | ServeError:
        """The text of each sequence of token ids."""
        return await self._inspect(
            request.model,
            lambda table: table.texts(request.sequences, skip_special=request.skip_special),
        )

    async def check_health(self) -> None:
        """Raise when the thread no longer answers; a long line is no illness."""
        began_s = self._began_s
        if began_s is not None and time.perf_counter() - began_s > HANG_TIMEOUT_S:
            raise EngineFailed("the tokenizer's thread hangs")

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()

    def _resize_caches(self, cache_bytes: int) -> None:
        with self._tokenizers_in_use:
            for encoder in self._tokenizers.values():
                encoder.resize_cache(cache_bytes // len(self._tokenizers))

    async def _inspect(self, model: ModelRef, ask: Callable[[TokenInspector], T]) -> T | ServeError:
        """What the model's table answers, in the thread; a ServeError is an answer too."""
        if model not in self._tokenizers:
            return load_error(model, self._failed)

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

    def _table(self, model: ModelRef) -> TokenInspector:
        if model not in self._tables:
            self._tables[model] = TokenInspector(self._directories[model])
        return self._tables[model]

    def _tokenize_in_thread(self, batch: CallBatch) -> TokenizedBatch:
        with self._tokenizers_in_use:
            return self._tokenize(batch)

    def _tokenize(self, batch: CallBatch) -> TokenizedBatch:
        started_s = time.perf_counter()
        encoder = self._tokenizers.get(batch.key.model)
        if encoder is None:
            gone = load_error(batch.key.model, self._failed)
            return TokenizedBatch(batch.key, b"", (gone,) * len(batch.calls), 0.0)
        ids = []
        calls: list[TokenizedCall | ServeError] = []
        before = encoder.lookups
        now_s = time.time()  # nobody waits for what should have been there before
        in_time = [call for call in batch.calls if call.deadline_s >= now_s]
        encoded = iter(encoder.tokenize(in_time))
        for call in batch.calls:
            outcome = next(encoded) if call.deadline_s >= now_s else _expired()
            if isinstance(outcome, ServeError):
                calls.append(outcome)
                continue
            ids += [item.ids for item in outcome.items]
            calls.append(_tokenized_call(call, outcome))
        flat = np.concatenate(ids).tobytes() if ids else b""
        tokenize_s = time.perf_counter() - started_s
        texts, kept = (now - then for now, then in zip(encoder.lookups, before, strict=True))
        self._recorder.record(TokenizeRecord(batch.key.model.id, tokenize_s, texts, kept))
        return TokenizedBatch(batch.key, flat, tuple(calls), tokenize_s)


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed while waiting for the tokenizer")


def _is_short(batch: CallBatch) -> bool:
    texts = (text for call in batch.calls for text in call.texts)
    return sum(map(characters, texts)) <= INLINE_CHARACTERS


def _tokenized_call(call: Call, outcome: TokenizedTexts) -> TokenizedCall:
    lengths = tuple(len(item.ids) for item in outcome.items)
    seconds = tuple(item.second_segment_start for item in outcome.items)
    travelling = seconds if seconds != lengths else ()
    return TokenizedCall(
        lengths, outcome.truncated, call.options, call.deadline_s, travelling, outcome.token_offsets
    )
