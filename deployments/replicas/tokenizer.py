"""The tokenizer deployment: lists of calls in, ragged token ids out."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deployments.config import AppArgs, TokenizerUserConfig
from deployments.encoding.encoder import Encoded, Encoder
from deployments.errors import ServeError, UnknownModel
from deployments.messages import Call, CallBatch, EncodedBatch, EncodedCall, characters
from deployments.records import EncodeRecorder
from deployments.registry import Registry

# Characters encoded on the event loop itself: a tenth of a millisecond, less than the way to the
# thread and back.
INLINE_CHARACTERS = 4_000


class TokenizerReplica:
    """Encodes on one thread of its own, so that long texts never block the event loop."""

    def __init__(self, args: AppArgs, recorder: EncodeRecorder) -> None:
        self._recorder = recorder
        self._encoders, self._failed = Registry.of(args).open_each(
            lambda model: Encoder(model.directory, model.manifest.max_tokens)
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
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
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._encode_in_thread, batch)

    async def check(self) -> None:
        """Raise unless the thread answers."""
        await asyncio.get_running_loop().run_in_executor(self._thread, time.perf_counter)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()

    def _resize_caches(self, cache_bytes: int) -> None:
        with self._encoders_in_use:
            for encoder in self._encoders.values():
                encoder.resize_cache(cache_bytes // len(self._encoders))

    def _encode_in_thread(self, batch: CallBatch) -> EncodedBatch:
        with self._encoders_in_use:
            return self._encode(batch)

    def _encode(self, batch: CallBatch) -> EncodedBatch:
        started_s = time.perf_counter()
        encoder = self._encoders.get(batch.key.model)
        if encoder is None:
            unknown = UnknownModel(f"Model {batch.key.model.id} is not loaded here", field="model")
            gone = self._failed.get(batch.key.model, unknown)
            return EncodedBatch(batch.key, b"", (gone,) * len(batch.calls), 0.0)
        ids = []
        calls: list[EncodedCall | ServeError] = []
        for call, outcome in zip(batch.calls, encoder.encode(batch.calls), strict=True):
            if isinstance(outcome, ServeError):
                calls.append(outcome)
                continue
            ids += [item.ids for item in outcome.items]
            calls.append(_encoded_call(call, outcome))
        flat = np.concatenate(ids).tobytes() if ids else b""
        encode_s = time.perf_counter() - started_s
        self._recorder.record(batch.key.model.id, encode_s)
        return EncodedBatch(batch.key, flat, tuple(calls), encode_s)


def _is_short(batch: CallBatch) -> bool:
    texts = (text for call in batch.calls for text in call.texts)
    return sum(map(characters, texts)) <= INLINE_CHARACTERS


def _encoded_call(call: Call, outcome: Encoded) -> EncodedCall:
    lengths = tuple(len(item.ids) for item in outcome.items)
    seconds = tuple(item.second_from for item in outcome.items)
    travelling = seconds if seconds != lengths else ()
    return EncodedCall(lengths, outcome.truncated, call.options, call.deadline_s, travelling)
