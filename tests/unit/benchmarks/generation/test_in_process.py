"""In-process generation with a tiny decoder, and the churn test.

In the churn test, half of the requests disconnect before their last token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.generation.in_process import InProcessGenerator
from benchmarks.generation.rounds import GenerationBenchmark, repeat_unbatched
from benchmarks.generation.scenarios import PromptSampler, churn, random_request
from benchmarks.generation.streams import (
    StreamingSystem,
    StreamRequest,
    StreamResult,
    run_streams,
)
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.fakes import TIMEOUT_S, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    store = tmp_path_factory.mktemp("store")
    seal_tiny_decoder(store)
    return LocalModel.open(store, DECODER)


@asynccontextmanager
async def running(model: LocalModel, kv_slots: int = 4) -> AsyncIterator[InProcessGenerator]:
    generator = InProcessGenerator(
        model, kv_slots=kv_slots, threads=1, events=asyncio.get_running_loop()
    )
    try:
        yield generator
    finally:
        await asyncio.to_thread(generator.close)


async def test_generate_records_the_time_of_every_token(model: LocalModel) -> None:
    async with running(model) as generator:
        answer = await generator.generate(StreamRequest(tuple(range(40)), 20))
    assert answer.tokens == len(answer.ids) == len(answer.arrivals_s) == 20
    assert answer.submitted_s < answer.arrivals_s[0]
    assert list(answer.arrivals_s) == sorted(set(answer.arrivals_s))
    assert answer.text


async def test_answers_are_batch_invariant_and_report_cached_tokens(model: LocalModel) -> None:
    requests = [StreamRequest((*range(number, 40), *range(number)), 12) for number in range(9)]
    async with running(model) as generator:
        together = await run_streams(generator, requests)
        alone = await run_streams(generator, requests, clients=1)
        again = await generator.generate(requests[-1])
    assert [one.ids for one in alone] == [one.ids for one in together]
    assert together[0].cached_tokens == 0
    assert (again.ids, again.cached_tokens) == (alone[-1].ids, 38)


async def test_prompts_of_another_scope_are_prefilled_again(model: LocalModel) -> None:
    request = StreamRequest(tuple(range(40)), 4)
    async with running(model) as generator:
        first = await generator.generate(request)
        again = await generator.generate(request._replace(prefix_cache_scope="other"))
    assert (again.ids, again.cached_tokens) == (first.ids, 0)


def test_unbatched_prompts_are_not_taken_from_the_prefix_cache(model: LocalModel) -> None:
    asked: list[StreamRequest] = []

    class ScopeRecorder:
        async def generate(self, request: StreamRequest) -> StreamResult:
            asked.append(request)
            return StreamResult(0.0, (1.0, 2.0), 2, (7, 8))

    with asyncio.Runner() as runner:
        benchmark = GenerationBenchmark(
            in_process=StreamingSystem("recorder", ScopeRecorder(), runner),
            baselines=[],
            missing={},
            prompts=PromptSampler.open(model, 3),
            rng=random.Random(3),
            streams=(2,),
            prompt_tokens=20,
            new_tokens=2,
            scenarios=(),
        )
        benchmark.run_round("round")
        assert repeat_unbatched(benchmark) is not None
    batched = {request.prefix_cache_scope for request in asked[:2]}
    unbatched = {request.prefix_cache_scope for request in asked[2:]}
    assert len(asked) == 4
    assert not batched & unbatched


@pytest.mark.parametrize("tokens", [0, 1, 5])
async def test_disconnect_releases_the_kv_slot(model: LocalModel, tokens: int) -> None:
    async with running(model, kv_slots=1) as generator:
        left = await generator.generate(
            StreamRequest(tuple(range(30)), 100, disconnect_after=tokens)
        )
        await wait_until(lambda: generator.slot_use == (0, 0))
    assert left.tokens == tokens


async def test_churn_is_clean(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.generation.scenarios.DRAIN_TIMEOUT_S", TIMEOUT_S)
    prompts = PromptSampler.open(model, 3)
    async with running(model) as generator:
        metrics = await churn(generator, prompts, random.Random(3), request_count=60, kv_slots=4)
    assert metrics.requests == 60 == metrics.disconnected + metrics.compared
    assert 15 < metrics.disconnected < 45
    assert metrics.is_clean
    assert metrics.resident_bytes_before > 0
    assert metrics.seconds > 0


class Leaky:
    """Generator that never frees its slot, and whose tokens depend on concurrent requests."""

    def __init__(self) -> None:
        self._running = 0

    @property
    def slot_use(self) -> tuple[int, int]:
        return (1, 0)

    async def generate(self, request: StreamRequest) -> StreamResult:
        self._running += 1
        await asyncio.sleep(0)
        ids = (self._running,) * request.new_tokens
        self._running -= 1
        return StreamResult(0.0, (1.0,) * request.new_tokens, request.new_tokens, ids)


async def test_churn_detects_leaks_and_wrong_answers(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.generation.scenarios.DRAIN_TIMEOUT_S", 0.05)
    prompts = PromptSampler.open(model, 3)
    metrics = await churn(Leaky(), prompts, random.Random(3), request_count=40, kv_slots=4)
    assert metrics.still_active == 1
    assert metrics.different > 0
    assert not metrics.is_clean


def test_random_request_disconnects_before_the_last_token() -> None:
    rng = random.Random(5)
    requests = [random_request([(1, 2), (3, 4)], rng) for _ in range(400)]
    leaving = [request for request in requests if request.disconnect_after is not None]
    assert 150 < len(leaving) < 250
    assert all(request.disconnect_after < request.new_tokens for request in leaving)
    assert any(request.disconnect_after == 0 for request in leaving)


async def test_encoder_model_is_rejected(tiny_store: Path) -> None:
    embedder = LocalModel.open(tiny_store, EMBEDDER)
    events = asyncio.get_running_loop()
    with pytest.raises(BenchmarkError, match="does not generate text"):
        InProcessGenerator(embedder, kv_slots=1, threads=1, events=events)
