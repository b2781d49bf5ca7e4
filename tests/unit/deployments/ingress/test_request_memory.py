"""Requests leave memory with their response. None of them waits for a garbage collection."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from starlette.requests import Request

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.errors import EngineFailed, Overloaded
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.micro_batches import PendingCall
from deployments.ingress.requests import GenerationRequest, InferenceRequest
from deployments.messages import CallBatch, CallResult
from deployments.transports.base import Deliver, EncoderClient
from tests.support.artifacts import EMBEDDER
from tests.support.asgi_client import AsgiClient
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import FailingEncoder, HangingEncoder, wait_until
from tests.support.generators import ScriptedGeneratorClient, ScriptedReply
from tests.support.in_process import InProcess

KINDS = (Request, InferenceRequest, PendingCall, GenerationRequest, GenerationStream)
REQUESTS = 3

# The garbage collector would hide objects that leave by it only.
pytestmark = pytest.mark.usefixtures("no_collection")


def count_requests() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, KINDS))


async def check_that_requests_leave(
    send: Callable[[int], AsgiClient], expected: str, *, leaves: bool = False
) -> None:
    """Send several requests, whose responses contain `expected`. With `leaves`, disconnect."""
    before = count_requests()
    for number in range(REQUESTS):
        client = send(number)
        if leaves:
            await asyncio.sleep(0.01)
            await client.wait_for_text(expected)
            client.disconnect()
        await client.task
        assert expected in client.text
    del client
    await wait_until(lambda: count_requests() == before)


class FullCpu:
    """Encoders of which the one on the CPU refuses all calls."""

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        refusal = Overloaded("full")
        if batch.key.device is Device.CPU:
            raise refusal
        for index in range(len(batch.calls)):
            deliver(index, CallResult(np.ones((1, 2), np.float32), "gpu-fake"))


@pytest.mark.parametrize("cache_bytes", [0, 100_000])
@pytest.mark.parametrize(
    ("build", "inputs", "expected"),
    [
        (lambda: FailingEncoder(Overloaded("full")), "text", "overloaded"),
        (HangingEncoder, "text", "deadline_exceeded"),
        (HangingEncoder, 5, "invalid_field"),
    ],
    ids=["refused", "deadline", "invalid"],
)
async def test_failed_request(
    writing_store: Path,
    build: Callable[[], EncoderClient],
    inputs: object,
    expected: str,
    cache_bytes: int,
) -> None:
    settings = IngressUserConfig.model_validate({"cache": {"max_bytes": cache_bytes}})
    server = InProcess(writing_store, (EMBEDDER,), encoder=build(), settings=settings)
    async with server.application() as app:

        def send(number: int) -> AsgiClient:
            options = {"deadline_ms": 20 + number}
            return AsgiClient(app, f"/models/{EMBEDDER}", {"inputs": inputs, "options": options})

        await check_that_requests_leave(send, expected)


@pytest.mark.parametrize("cache_bytes", [0, 100_000])
async def test_request_whose_client_leaves(writing_store: Path, cache_bytes: int) -> None:
    settings = IngressUserConfig.model_validate({"cache": {"max_bytes": cache_bytes}})
    server = InProcess(writing_store, (EMBEDDER,), encoder=HangingEncoder(), settings=settings)
    async with server.application() as app:
        await check_that_requests_leave(
            lambda number: AsgiClient(app, f"/models/{EMBEDDER}", {"inputs": f"text {number}"}),
            "",
            leaves=True,
        )


async def test_request_that_another_device_answers(writing_store: Path) -> None:
    server = InProcess(writing_store, (EMBEDDER,), gpus=1, encoder=FullCpu())
    async with server.application() as app:
        body = {"inputs": "text", "options": {"compute": "auto", "use_cache": False}}
        await check_that_requests_leave(
            lambda _: AsgiClient(app, f"/models/{EMBEDDER}", body), "1.0"
        )


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (lambda: ScriptedReply(), "finish_reason"),
        (lambda: ScriptedReply(refusal=Overloaded("full")), "full"),
        (lambda: ScriptedReply(breaks=EngineFailed("broken")), "broken"),
    ],
    ids=["answered", "refused", "broken"],
)
async def test_generation(
    writing_store: Path, reply: Callable[[], ScriptedReply], expected: str, is_stream: bool
) -> None:
    generator = ScriptedGeneratorClient(lambda call: reply())
    async with InProcess(writing_store, (DECODER,), generator=generator).application() as app:
        body = {"model": DECODER, "prompt": ["a", "b"], "n": 2, "stream": is_stream}
        await check_that_requests_leave(
            lambda _: AsgiClient(app, "/v1/completions", body), expected
        )


async def test_stream_whose_client_leaves(writing_store: Path) -> None:
    generator = ScriptedGeneratorClient(lambda call: ScriptedReply(hangs=True))
    async with InProcess(writing_store, (DECODER,), generator=generator).application() as app:
        body = {"model": DECODER, "prompt": "a", "n": 2, "stream": True}
        await check_that_requests_leave(
            lambda _: AsgiClient(app, "/v1/completions", body), "Hel", leaves=True
        )
