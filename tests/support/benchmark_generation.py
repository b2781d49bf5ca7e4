"""Text generators for tests of benchmarks: one with scripted tokens, one with a tiny decoder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from benchmarks.generation.streams import StreamRequest, StreamResult
from deployments.artifacts.types import Device
from deployments.config import AppArgs, GeneratorSettings, ModelSettings
from deployments.messages import Chunk, Completion, GenerationCall, Started
from deployments.replicas.generator import GeneratorReplica
from tests.support.fakes import ListRecorder
from tests.support.local_clients import LocalGeneratorClient


def answer(
    arrivals_s: Sequence[float], *, submitted_s: float = 0.0, ids: Sequence[int] = ()
) -> StreamResult:
    """Build a result with these arrival times. Without `ids`, token ids count from 0."""
    numbered = tuple(ids) or tuple(range(len(arrivals_s)))
    return StreamResult(submitted_s, tuple(arrivals_s), len(arrivals_s), numbered)


class ScriptedText:
    """TextGenerator that emits the tokens of `script(request)`, one every millisecond."""

    def __init__(self, script: Callable[[StreamRequest], Sequence[int]] | None = None) -> None:
        self.requests: list[StreamRequest] = []
        self.max_concurrent = 0
        self._script = script or (lambda request: range(request.new_tokens))
        self._running = 0

    async def generate(self, request: StreamRequest) -> StreamResult:
        self.requests.append(request)
        self._running += 1
        self.max_concurrent = max(self.max_concurrent, self._running)
        submitted_s = time.perf_counter()
        ids = list(self._script(request))[: request.disconnect_after]
        arrivals_s = []
        try:
            for _ in ids:
                await asyncio.sleep(0.001)
                arrivals_s.append(time.perf_counter())
                if request.first_token is not None:
                    request.first_token.set()
        finally:
            self._running -= 1
        return StreamResult(submitted_s, tuple(arrivals_s), len(ids), tuple(ids))


class DecodingGenerator:
    """GeneratorClient of a real replica. The first call starts the replica on its event loop."""

    def __init__(self, store: Path, model_id: str, settings: GeneratorSettings) -> None:
        self._args = AppArgs(
            store=store,
            models=(ModelSettings(id=model_id),),
            encoders={},
            generators={Device.CPU: settings},
        )
        self._made: LocalGeneratorClient | None = None

    @property
    def _client(self) -> LocalGeneratorClient:
        if self._made is None:
            replica = GeneratorReplica(self._args, Device.CPU, ListRecorder())
            replica.start()
            self._made = LocalGeneratorClient(replica)
        return self._made

    async def complete(self, call: GenerationCall) -> Completion:
        return await self._client.complete(call)

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        async with aclosing(self._client.stream(call)) as stream:
            async for event in stream:
                yield event
