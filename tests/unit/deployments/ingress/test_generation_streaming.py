"""Tests of streamed generation: order of chunks, errors, readers that leave or read slowly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig
from deployments.errors import DeadlineExceeded, EngineFailed, InvalidField, UnknownModel
from deployments.messages import FinishReason, GenerationCall
from tests.support.fakes import wait_until
from tests.support.generation_harness import (
    ASKED,
    GenerationHarness,
    build_request,
    read_chunks,
    seeded,
)
from tests.support.generators import ScriptedGeneratorClient, ScriptedReply


async def test_stream_yields_every_chunk_and_ends(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    stream = await harness.pipeline.stream(build_request(choices=2))
    assert [one.prompt_tokens for one in stream.started] == [4, 4]
    parts = [part async for part in read_chunks(stream)]
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
    async for part in read_chunks(stream):
        chunks.append(part)
        if part.chunk.finished is not None:
            break
    assert chunks[-1].choice == 1
    assert harness.generator.open == 1
    await stream.aclose()
    assert harness.is_idle()
    assert harness.statuses == [499]


async def test_tokens_of_a_stream_that_its_client_leaves_are_recorded(writing_store: Path) -> None:
    harness = GenerationHarness(
        writing_store, lambda call: ScriptedReply(("a", "b", "c"), hangs=True)
    )
    stream = await harness.pipeline.stream(build_request(choices=2))
    await wait_until(lambda: harness.generator.events_read == 2 * 4)
    await stream.aclose()
    (record,) = harness.recorder.records
    assert (record.status, record.timings.tokens) == (499, 4 + 2 * 3)
    assert record.timings.forward_s > 0


async def test_missing_model_before_the_first_token_is_not_recorded_yet(
    writing_store: Path,
) -> None:
    """The request may run again after a build."""
    gone = UnknownModel("gone")
    gone.model_id = "acme/gone"
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(refusal=gone))
    with pytest.raises(UnknownModel):
        await harness.pipeline.stream(build_request())
    assert harness.statuses == []
    assert harness.is_idle()


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
        async for part in read_chunks(stream):
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
        _ = [part async for part in read_chunks(stream)]
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


async def test_error_of_a_candidate_names_the_field_of_its_prompt(writing_store: Path) -> None:
    def reply(call: GenerationCall) -> ScriptedReply:
        error = InvalidField("`prompt` cannot be used", field="prompt")
        return ScriptedReply(refusal=error if call.prompt == "two" else None)

    harness = GenerationHarness(writing_store, reply)
    with pytest.raises(InvalidField) as raised:
        await harness.pipeline.stream(build_request(further_prompts=("two",), choices=2))
    assert raised.value.field == "prompt[1]"


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
