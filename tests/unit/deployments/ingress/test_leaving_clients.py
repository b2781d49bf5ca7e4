"""Tests that a KV slot is free two decode steps after its client disconnects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.config import GeneratorSettings
from deployments.engines.onnx.decoder import OnnxDecoder
from deployments.replicas.generator import GeneratorReplica
from tests.support.asgi_client import AsgiClient
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.fakes import TIMEOUT_S, wait_until
from tests.support.in_process import InProcess

BODY = {"model": DECODER, "prompt": "Once", "max_tokens": 200, "min_tokens": 200}


class GatedSteps:
    """Patch that makes every decode step wait for a permit. `done` counts the steps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self._permits = threading.Semaphore(1_000)  # enough for the warm-up
        decode = OnnxDecoder.decode

        def decode_with_permit(decoder, ids, lengths):
            assert self._permits.acquire(timeout=TIMEOUT_S)
            self.done += 1
            return decode(decoder, ids, lengths)

        patch.setattr(OnnxDecoder, "decode", decode_with_permit)

    def close(self) -> None:
        while self._permits.acquire(blocking=False):
            pass

    def permit(self, steps: int) -> None:
        self._permits.release(steps)


def start_and_append(replicas: list[GeneratorReplica]) -> Callable[[GeneratorReplica], None]:
    start = GeneratorReplica.start

    def started(replica: GeneratorReplica) -> None:
        replicas.append(replica)
        start(replica)

    return started


@pytest.mark.parametrize("how", ["streams", "streams, task cancelled", "waits, task cancelled"])
async def test_client_that_leaves_frees_its_slot_within_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """After a client leaves, Ray Serve cancels the request's task; plain ASGI sends a message."""
    seal_tiny_decoder(tmp_path)
    steps = GatedSteps(monkeypatch)
    served = InProcess(tmp_path, (DECODER,), writes=GeneratorSettings(kv_slots=2))
    replicas: list[GeneratorReplica] = []
    monkeypatch.setattr(GeneratorReplica, "start", start_and_append(replicas))
    async with served.application() as app:
        (replica,) = replicas
        (model,) = replica.pool.models()
        scheduler = model.scheduler
        steps.close()
        before = steps.done
        body = BODY | {"stream": how.startswith("streams")}
        client = AsgiClient(app, "/v1/completions", body)
        steps.permit(3)
        await wait_until(lambda: steps.done == before + 3)
        assert scheduler.slot_use == (1, 0)
        if how == "streams":
            client.disconnect()
        else:
            client.task.cancel()
        await asyncio.wait([client.task], timeout=TIMEOUT_S)
        assert client.task.done()
        await wait_until(lambda: not replica._readers)
        steps.permit(2)
        await wait_until(lambda: scheduler.slot_use == (0, 0))
        assert steps.done <= before + 3 + 2
        steps.permit(1_000)
