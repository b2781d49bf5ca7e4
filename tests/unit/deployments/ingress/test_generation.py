from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings, IngressUserConfig, LimitSettings, ModelSettings
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    UnknownModel,
    WrongTask,
)
from deployments.ingress.cluster_state import ClusterMonitor, ClusterSnapshot
from deployments.ingress.encoder_executor import EncoderExecutor
from deployments.ingress.generation_executor import GenerationExecutor
from deployments.ingress.http.request_options import RequestOptions
from deployments.ingress.pipeline import RequestPipeline
from deployments.ingress.requests import GenerationRequest
from deployments.ingress.resolver import RequestResolver
from deployments.ingress.routing import MicroBatchRouter
from deployments.ingress.tokenization import TokenizationService
from deployments.messages import (
    DecodeRequest,
    FinishReason,
    GenerationCall,
    GenerationOptions,
    SamplingParams,
    TextTokens,
    TokenizeRequest,
)
from deployments.records import RequestRecord
from deployments.registry import ModelRegistry
from deployments.transports.base import GeneratorClient
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import ListRecorder, send_unbatched, wait_until
from tests.support.generators import COMPUTE_TYPE, ScriptedGeneratorClient, ScriptedReply

ASKED = GenerationRequest(prompt="Once upon a time")


class UnusedTokenizer:
    """A TokenizerClient that generation never calls."""

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        raise AssertionError("unexpected call")

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        raise AssertionError("unexpected call")


@dataclass
class GenerationHarness:
    """A generation pipeline with one scripted generator, and its recorder."""

    store: Path
    reply_to: Callable[[GenerationCall], ScriptedReply] = lambda call: ScriptedReply()
    settings: IngressUserConfig = field(default_factory=IngressUserConfig)
    running: int = 1  # replicas that the next refresh reports
    models: tuple[str, ...] = (EMBEDDER, DECODER)
    recorder: ListRecorder[RequestRecord] = field(default_factory=ListRecorder)

    def __post_init__(self) -> None:
        self.generator = ScriptedGeneratorClient(self.reply_to)
        monitor = ClusterMonitor({}, self._read_status, {Device.CPU: GeneratorSettings()})
        monitor.apply(self._read_status())
        models = [ModelSettings(id=model_id) for model_id in self.models]
        router = MicroBatchRouter({}, send_unbatched, self.settings.batching)
        self.clients: dict[Device, GeneratorClient] = {Device.CPU: self.generator}
        self.pipeline = RequestPipeline(
            resolver=RequestResolver(ModelRegistry(self.store, models), monitor),
            encoders=EncoderExecutor(router, monitor, self.settings),
            generators=GenerationExecutor(self.clients, monitor, self.settings),
            tokenization=TokenizationService(UnusedTokenizer()),
            recorder=self.recorder,
            settings=self.settings,
        )

    def _read_status(self) -> ClusterSnapshot:
        return ClusterSnapshot({"CpuGenerator": self.running})

    def is_idle(self) -> bool:
        """Return whether no stream is open and no item is reserved."""
        return self.generator.open == 0 and self.pipeline.admission.generations.used == 0

    @property
    def statuses(self) -> list[int]:
        return [record.status for record in self.recorder.records]


def build_request(**fields: object) -> GenerationRequest:
    return GenerationRequest(**{"prompt": "Once upon a time", **fields})  # type: ignore[arg-type]


def seeded(seed: int) -> GenerationOptions:
    return GenerationOptions(sampling=SamplingParams(seed=seed))


async def test_prompt_without_a_model_uses_the_first_generative_model(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    response = await harness.pipeline.complete(ASKED)
    assert response.model.ref.id == DECODER
    assert [one.text for one in response.completions] == ["Hello"]
    assert response.total_s > 0
    (record,) = harness.recorder.records
    assert (record.model, record.task, record.status) == (DECODER, "text-generation", 200)
    assert (record.compute, record.items) == (COMPUTE_TYPE, 1)
    assert record.timings.tokens == response.timings.tokens == 4 + 3
    assert record.timings.forward_s == pytest.approx(0.005)
    assert record.total_s == response.total_s
    assert harness.is_idle()


async def test_choices_have_consecutive_seeds(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    response = await harness.pipeline.complete(build_request(choices=3, options=seeded(2**64 - 1)))
    assert [one.started.seed for one in response.completions] == [2**64 - 1, 0, 1]


async def test_choices_without_a_seed_send_none(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    await harness.pipeline.complete(build_request(choices=2))
    assert [call.options.sampling.seed for call in harness.generator.calls] == [None, None]


async def test_several_prompts_are_answered_in_order_and_recorded_once(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply((str(call.prompt),)))
    request = build_request(prompt="a", further_prompts=("b", "c"), choices=2)
    response = await harness.pipeline.complete(request)
    assert [one.text for one in response.completions] == ["a", "a", "b", "b", "c", "c"]
    (record,) = harness.recorder.records
    assert record.items == 3
    # Each prompt has one token and counts once. Each answer has one token and its end.
    assert record.timings.tokens == 3 + 6 * 2


async def test_best_of_returns_the_most_likely_candidates(writing_store: Path) -> None:
    logprobs = {0: -3.0, 1: -1.0, 2: -2.0}

    def reply_to(call: GenerationCall) -> ScriptedReply:
        seed = call.options.sampling.seed or 0
        return ScriptedReply((f"s{seed}",), logprob=logprobs[seed])

    harness = GenerationHarness(writing_store, reply_to)
    response = await harness.pipeline.complete(
        build_request(choices=2, best_of=3, options=seeded(0))
    )
    assert [one.text for one in response.completions] == ["s1", "s2"]
    assert [one.text for one in response.discarded] == ["s0"]
    assert {call.options.logprobs for call in harness.generator.calls} == {0}


@pytest.mark.parametrize(
    ("fields", "kind", "path"),
    [
        ({"model_id": EMBEDDER}, WrongTask, "model"),
        ({"model_id": "no/such"}, UnknownModel, "model"),
        ({"choices": 9}, InvalidField, "choices"),
        ({"choices": 0}, InvalidField, "choices"),
        ({"best_of": 9}, InvalidField, "best_of"),
        ({"choices": 3, "best_of": 2}, InvalidField, "best_of"),
        ({"further_prompts": ("a",) * 40, "choices": 8}, TooManyItems, "prompt"),
        (
            {"request_options": RequestOptions(require_gpu=True)},
            HardwareUnavailable,
            "options.use_gpu",
        ),
    ],
)
async def test_invalid_generation_requests_are_rejected_and_recorded(
    fields: dict[str, object], kind: type[ServeError], path: str, writing_store: Path
) -> None:
    harness = GenerationHarness(writing_store)
    for ask in (harness.pipeline.complete, harness.pipeline.stream):
        with pytest.raises(kind) as raised:
            await ask(build_request(**fields))
        assert raised.value.field == path
        assert raised.value.recorded
    assert harness.statuses == [kind.status] * 2
    assert harness.generator.calls == []
    assert harness.is_idle()


async def test_wrong_task_error_lists_the_tasks_of_the_model(writing_store: Path) -> None:
    with pytest.raises(WrongTask, match="`feature-extraction`"):
        await GenerationHarness(writing_store).pipeline.complete(build_request(model_id=EMBEDDER))
    with pytest.raises(WrongTask, match="no served model generates text"):
        await GenerationHarness(writing_store, models=(EMBEDDER,)).pipeline.complete(ASKED)


async def test_one_failure_ends_the_other_choices_first(writing_store: Path) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        if call.options.sampling.seed == 1:
            return ScriptedReply(breaks=EngineFailed("broken"))
        return ScriptedReply(hangs=True)

    harness = GenerationHarness(writing_store, reply_to)
    with pytest.raises(EngineFailed, match="broken"):
        await harness.pipeline.complete(build_request(choices=3, options=seeded(0)))
    assert len(harness.generator.calls) == 3
    assert harness.is_idle()
    assert harness.statuses == [500]


async def test_error_names_the_index_of_the_prompt(writing_store: Path) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        error = InputTooLong("`prompt` has 9 tokens", field="prompt")
        return ScriptedReply(refusal=error if call.prompt == "long" else None)

    harness = GenerationHarness(writing_store, reply_to)
    many = build_request(prompt="a", further_prompts=("b", "long"))
    for ask in (harness.pipeline.complete, harness.pipeline.stream):
        with pytest.raises(InputTooLong) as raised:
            await ask(many)
        assert raised.value.field == "prompt[2]"
        assert raised.value.message == "`prompt[2]` has 9 tokens"
        with pytest.raises(InputTooLong) as raised:
            await ask(build_request(prompt="long"))
        assert raised.value.field == "prompt"
    assert harness.statuses == [422] * 4


async def test_cancelled_caller_ends_every_choice(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True))
    asking = asyncio.ensure_future(harness.pipeline.complete(build_request(choices=4)))
    await wait_until(lambda: harness.generator.open == 4)
    assert harness.pipeline.admission.generations.used == 4
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert harness.is_idle()
    assert harness.statuses == [499]


async def test_full_item_limit_rejects_generation_at_once(writing_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(inflight_generations=4))
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True), settings)
    stream = await harness.pipeline.stream(build_request(choices=3))
    with pytest.raises(Overloaded):
        await harness.pipeline.complete(build_request(choices=2))
    await stream.aclose()
    assert harness.is_idle()
    again = await harness.pipeline.stream(build_request(choices=4))
    await again.aclose()
    assert harness.statuses == [429, 499, 499]


async def test_generation_beyond_its_deadline_raises_deadline_exceeded(writing_store: Path) -> None:
    settings = IngressUserConfig(generation_timeout_s=0.05)
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True), settings)
    with pytest.raises(DeadlineExceeded):
        await harness.pipeline.complete(ASKED)
    stream = await harness.pipeline.stream(ASKED)
    with pytest.raises(DeadlineExceeded):
        _ = [part async for part in stream]
    await stream.aclose()
    assert harness.is_idle()
    assert harness.statuses == [504, 504]


async def test_cold_generator_raises_model_loading_after_the_wait(
    writing_store: Path,
) -> None:
    settings = IngressUserConfig(cold_start_wait_s=0.02, generation_timeout_s=0.2)
    harness = GenerationHarness(
        writing_store, lambda call: ScriptedReply(is_silent=True), settings, running=0
    )
    for ask in (harness.pipeline.complete, harness.pipeline.stream):
        with pytest.raises(ModelLoading, match=DECODER):
            await ask(ASKED)
    assert harness.is_idle()
    assert harness.statuses == [503, 503]


async def test_generator_that_starts_during_the_wait_continues(writing_store: Path) -> None:
    settings = IngressUserConfig(cold_start_wait_s=0.02, generation_timeout_s=0.1)
    harness = GenerationHarness(
        writing_store, lambda call: ScriptedReply(hangs=True), settings, running=0
    )
    asking = asyncio.ensure_future(harness.pipeline.complete(ASKED))
    await wait_until(lambda: harness.generator.open == 1)
    harness.running = 1
    with pytest.raises(DeadlineExceeded):
        await asking


async def test_stream_yields_every_chunk_and_ends(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    stream = await harness.pipeline.stream(build_request(choices=2))
    assert [one.prompt_tokens for one in stream.started] == [4, 4]
    parts = [part async for part in stream]
    for choice in (0, 1):
        chunks = [part.chunk for part in parts if part.choice == choice]
        assert "".join(chunk.text for chunk in chunks) == "Hello"
        assert chunks[-1].finished is not None
        assert chunks[-1].finished.reason is FinishReason.END
    assert harness.is_idle()
    assert harness.statuses == [200]
    assert harness.recorder.records[0].timings.tokens == 4 + 2 * 3
    await stream.aclose()
    assert harness.statuses == [200], "recorded once"


async def test_chunks_of_several_choices_arrive_in_generation_order(writing_store: Path) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        return ScriptedReply(hangs=call.options.sampling.seed == 0)

    harness = GenerationHarness(writing_store, reply_to)
    stream = await harness.pipeline.stream(build_request(choices=2, options=seeded(0)))
    chunks = []
    async for part in stream:
        chunks.append(part)
        if part.chunk.finished is not None:
            break
    assert chunks[-1].choice == 1
    assert harness.generator.open == 1
    await stream.aclose()
    assert harness.is_idle()
    assert harness.statuses == [499]


async def test_error_before_the_first_token_is_raised_at_open(
    writing_store: Path,
) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        bad = InvalidField("no such form", field="grammar")
        return (
            ScriptedReply(refusal=bad)
            if call.options.sampling.seed == 1
            else ScriptedReply(hangs=True)
        )

    harness = GenerationHarness(writing_store, reply_to)
    with pytest.raises(InvalidField):
        await harness.pipeline.stream(build_request(choices=2, options=seeded(0)))
    assert harness.is_idle()
    assert harness.statuses == [400]


async def test_error_within_a_stream_follows_the_chunks_and_ends_other_choices(
    writing_store: Path,
) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        last = call.options.sampling.seed == 1
        return ScriptedReply(breaks=EngineFailed("broken")) if last else ScriptedReply(hangs=True)

    harness = GenerationHarness(writing_store, reply_to)
    stream = await harness.pipeline.stream(build_request(choices=2, options=seeded(0)))
    texts: list[str] = []

    async def read() -> None:
        async for part in stream:
            texts.extend([part.chunk.text] * part.choice)

    with pytest.raises(EngineFailed):
        await read()
    assert texts == ["Hel", "lo"]
    await wait_until(harness.is_idle)
    assert harness.statuses == [500]


async def test_generator_stream_without_a_finish_reason_fails(writing_store: Path) -> None:
    class Cut(ScriptedGeneratorClient):
        async def stream(self, call: GenerationCall):  # type: ignore[no-untyped-def]
            async for what in super().stream(call):
                if getattr(what, "finished", None) is None:
                    yield what

    harness = GenerationHarness(writing_store)
    harness.clients[Device.CPU] = Cut()
    stream = await harness.pipeline.stream(ASKED)
    with pytest.raises(EngineFailed):
        _ = [part async for part in stream]
    assert harness.statuses == [500]


async def test_reader_that_leaves_during_the_start_ends_every_choice(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(is_silent=True))
    asking = asyncio.ensure_future(harness.pipeline.stream(build_request(choices=2)))
    await wait_until(lambda: harness.generator.open == 2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert harness.is_idle()
    assert harness.statuses == [499]


async def test_chunks_that_are_ready_together_come_together(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(("x",) * 40))
    stream = await harness.pipeline.stream(ASKED)
    await wait_until(lambda: harness.is_idle())
    batches = [chunks async for chunks in stream.batches()]
    assert [len(chunks) for chunks in batches] == [41]


async def test_slow_reader_loses_its_stream_and_frees_its_generator(writing_store: Path) -> None:
    settings = IngressUserConfig(stream_buffer_tokens=20)
    endless = ScriptedReply(("x",) * 1_000)
    harness = GenerationHarness(writing_store, lambda call: endless, settings=settings)
    stream = await harness.pipeline.stream(ASKED)
    await wait_until(lambda: harness.is_idle())
    assert harness.generator.events_read < 30
    batches = stream.batches()
    assert len(await anext(batches)) == 21, "the chunks before the limit arrive"
    with pytest.raises(DeadlineExceeded, match="too slowly"):
        await anext(batches)
    assert harness.statuses == [504]


async def test_best_of_cannot_be_streamed(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    with pytest.raises(InvalidField) as raised:
        await harness.pipeline.stream(build_request(best_of=2))
    assert raised.value.field == "best_of"


async def test_immediate_answer_is_recorded_completely(writing_store: Path) -> None:
    class Quick(ScriptedGeneratorClient):
        async def stream(self, call: GenerationCall):  # type: ignore[no-untyped-def]
            for what in [what async for what in super().stream(call)]:
                yield what

    harness = GenerationHarness(writing_store)
    harness.clients[Device.CPU] = Quick()
    stream = await harness.pipeline.stream(ASKED)
    assert len([part async for part in stream]) == 3
    (record,) = harness.recorder.records
    assert (record.compute, record.timings.tokens) == (COMPUTE_TYPE, 7)
