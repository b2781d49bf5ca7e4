from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import Device, TaskName
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import InferenceRequest, ResolvedRequest
from deployments.ingress.shadow_traffic import (
    MAX_ENCODER_REQUESTS,
    MAX_GENERATIONS,
    ShadowTraffic,
    agree,
)
from deployments.messages import CallResult, Completion, FinishReason, ModelRef, Truncation
from deployments.plan import changes
from deployments.plan.plan import Shadow
from deployments.tasks import TaskInput
from tests.support.artifacts import tiny_manifest
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.fakes import far_deadline, wait_until
from tests.support.generation_harness import GenerationHarness, build_request, read_chunks
from tests.support.generators import ScriptedReply

DEFAULT = ModelRef("tiny/model", "0123456789ab")
SHADOW = Shadow(version="ba9876543210", percent=100)


REQUEST = ResolvedRequest(
    model=SimpleNamespace(ref=DEFAULT),  # type: ignore[arg-type]
    task=TaskName.FEATURE_EXTRACTION,
    request=InferenceRequest("a"),
    inputs=TaskInput(("a",), ("inputs",), None, Truncation.REFUSE),
    characters=1,
    shortened=0,
    device=Device.CPU,
    fallback=None,
    options=RequestOptions(),
    deadline_s=far_deadline(),
)
RESULT = CallResult("value", "fake")


def parse(_request: InferenceRequest, _task: str, _model: Any) -> tuple[TaskInput, int]:
    return REQUEST.inputs, 0


class Registry:
    """A registry in which every model has the same shadow version."""

    def find_shadow(self, _name: str, _ref: ModelRef) -> Shadow:
        return SHADOW

    def find(self, name: str) -> SimpleNamespace:
        ref = ModelRef(*name.split("@"))
        return SimpleNamespace(ref=ref, tasks=(REQUEST.task,), manifest=tiny_manifest(ref.id))


class OnePrompt:
    """A GenerationPlan of one prompt."""

    model = SimpleNamespace(ref=DEFAULT)

    def repeat_with(self, model: Any, _seeds: list[int]) -> Any:
        return model


async def test_encoder_requests_do_not_take_the_places_of_generations() -> None:
    answers = asyncio.Event()
    running: list[str] = []

    async def execute(_request: Any) -> tuple[CallResult, bool]:
        running.append("encoder")
        await answers.wait()
        return RESULT, False

    async def complete(_plan: Any) -> list[Completion]:
        running.append("generator")
        await answers.wait()
        return []

    shadows = ShadowTraffic(Registry(), parse, execute, complete)  # type: ignore[arg-type]
    for _ in range(MAX_ENCODER_REQUESTS + 1):
        shadows.mirror(REQUEST, RESULT)
    for _ in range(MAX_GENERATIONS + 1):
        shadows.mirror_answers(None, OnePrompt(), [], [])  # type: ignore[arg-type]
    await wait_until(lambda: len(running) == MAX_ENCODER_REQUESTS + MAX_GENERATIONS)
    assert running.count("generator") == MAX_GENERATIONS
    answers.set()
    await wait_until(lambda: sum(c.total for c in shadows.comparisons.values()) == len(running))


async def test_shadow_that_breaks_the_comparison_is_counted_as_failed() -> None:
    async def execute(_request: Any) -> tuple[CallResult, bool]:
        raise TypeError("unhashable")

    async def complete(_plan: Any) -> list[Completion]:
        return []

    shadows = ShadowTraffic(Registry(), parse, execute, complete)  # type: ignore[arg-type]
    shadows.mirror(REQUEST, RESULT)
    await wait_until(lambda: [c.failed for c in shadows.comparisons.values()] == [1])


@pytest.mark.parametrize("thought", ["Hm.", "Oh?"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_answers_cut_within_their_reasoning_agree_if_it_is_equal(
    tmp_path: Path, thought: str, is_stream: bool
) -> None:
    thoughts = {"000000000001": "Hm.", "000000000002": thought}
    for version in thoughts:
        seal_tiny_decoder(tmp_path, version=version)
    changes.promote(tmp_path, DECODER, "000000000001")
    changes.set_shadow(tmp_path, DECODER, "000000000002", 100)
    harness = GenerationHarness(
        tmp_path,
        lambda call: ScriptedReply(
            (), reason=FinishReason.LENGTH, reasoning=(thoughts[call.model.version],)
        ),
        models=(DECODER,),
    )
    if is_stream:
        stream = await harness.pipeline.stream(build_request())
        assert [part async for part in read_chunks(stream)]
    else:
        await harness.pipeline.complete(build_request())
    comparisons = harness.pipeline.shadows.comparisons
    await wait_until(lambda: sum(each.total for each in comparisons.values()) == 1)
    (comparison,) = comparisons.values()
    assert comparison.agreed == (thought == "Hm.")
    assert comparison.failed == 0


def sparse(weights: dict[int, float]) -> dict[str, np.ndarray]:
    return {
        "indices": np.array(list(weights), np.int32),
        "values": np.array(list(weights.values()), np.float32),
    }


@pytest.mark.parametrize(
    ("first", "second", "do_agree"),
    [
        ({5: 2.0, 200_000: 1.0}, {5: 2.0, 200_000: 1.0}, True),
        ({5: 2.0}, {5: 2.01, 7: 0.001}, True),
        ({5: 2.0}, {9_000: 2.0}, False),
        ({5: 2.0, 7: 1.0}, {5: 1.0, 7: 2.0}, False),
        ({}, {}, True),
        ({5: 2.0}, {}, False),
    ],
)
def test_sparse_vectors_are_compared_by_token(
    first: dict[int, float], second: dict[int, float], do_agree: bool
) -> None:
    assert agree([sparse(first)], [sparse(second)]) is do_agree


def test_vectors_of_zeros_agree() -> None:
    assert agree(np.zeros((2, 3)), np.zeros((2, 3)))
    assert not agree(np.zeros((1, 3)), np.ones((1, 3)))


TIED = [{"label": "A", "score": 0.501}, {"label": "B", "score": 0.499}]
ZERO_SHOT = {"sequence": "text", "labels": ["A", "B"], "scores": [0.501, 0.499]}


@pytest.mark.parametrize(
    ("first", "second", "do_agree"),
    [
        (np.ones((2, 3)), np.ones((2, 3)) * 1.01, True),
        (np.ones((2, 3)), np.array([[1, 1, 1], [1, -1, 1]]), False),
        (np.ones((2, 3)), np.ones((3, 2)), False),
        ([{"label": "A", "score": 0.9}], [{"label": "A", "score": 0.88}], True),
        ([{"label": "A", "score": 0.9}], [{"label": "B", "score": 0.9}], False),
        ([{"label": "A", "score": 0.9}], [], False),
        ([0.6, -0.8], [0.61, -0.79], True),
        ([0.6, -0.8], [-0.6, 0.8], False),
        ([[0.6], [-0.8]], [[0.6], [0.8]], False),
        ([0.6, -0.8], [0.6], False),
        (TIED, TIED[::-1], True),
        ([TIED], [TIED[::-1]], True),
        (ZERO_SHOT, ZERO_SHOT | {"labels": ["B", "A"]}, True),
        (ZERO_SHOT, ZERO_SHOT | {"labels": ["B", "C"]}, False),
        (ZERO_SHOT, ZERO_SHOT | {"scores": [0.6, 0.4]}, False),
        ({"a": 1.0}, {"b": 1.0}, False),
        ("text", "text", True),
    ],
)
def test_answers_agree_but_for_rounding(first: object, second: object, do_agree: bool) -> None:
    assert agree(first, second) is do_agree
