"""Streams ended early by their reader. test_generation has the other stream tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.errors import EngineFailed
from deployments.messages import FinishReason
from tests.support.fakes import wait_until
from tests.support.generators import ScriptedReply
from tests.unit.deployments.ingress.test_generation import GenerationHarness, build_request

HANGS = ScriptedReply(("a", "b", "c"), hangs=True)


async def test_finish_early_ends_completions_with_the_reason_length(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: HANGS)
    stream = await harness.pipeline.stream(build_request(choices=2))
    await wait_until(lambda: harness.generator.events_read == 2 * 4)
    parts = await stream.finish_early()
    texts = ["".join(p.chunk.text for p in parts if p.choice == choice) for choice in (0, 1)]
    assert texts == ["abc", "abc"]
    ends = [part.chunk.finished for part in parts if part.chunk.finished is not None]
    assert [(one.reason, one.generated_tokens) for one in ends] == [(FinishReason.LENGTH, 3)] * 2
    assert all(one.timings.decode_s > 0 for one in ends)
    assert harness.is_idle()
    (record,) = harness.recorder.records
    assert record.status == 200
    assert record.timings.tokens == 4 + 2 * 3
    await stream.aclose()
    assert harness.statuses == [200]


async def test_finish_early_after_the_end_has_no_effect(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    stream = await harness.pipeline.stream(build_request())
    await wait_until(lambda: len(stream.finished) == 1)
    parts = await stream.finish_early()
    (finished,) = [part.chunk.finished for part in parts if part.chunk.finished is not None]
    assert finished.reason is FinishReason.END
    assert await stream.finish_early() == []
    assert harness.statuses == [200]


async def test_finish_early_after_a_failure_raises_it(writing_store: Path) -> None:
    harness = GenerationHarness(
        writing_store, lambda call: ScriptedReply(breaks=EngineFailed("the engine failed"))
    )
    stream = await harness.pipeline.stream(build_request())
    await wait_until(harness.is_idle)
    with pytest.raises(EngineFailed):
        await stream.finish_early()
    await stream.aclose()
    assert harness.statuses == [500]
