"""Check of structured output against JSON schemas, on scripted answers of a fake server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from benchmarks.generation.http_system import HttpGenerator
from benchmarks.generation.schemas import MAX_TOKENS, SchemaTask, build_schema_tasks
from benchmarks.generation.structured_output import (
    AT_ONCE,
    SchemaAnswer,
    SchemaOutcome,
    SchemaResults,
    answer_all,
    answer_schema,
    find_violation,
)
from tests.support.benchmark_fakes import FakeAnswer, FakeServer, ReceivedRequest

SCHEMA = {
    "type": "object",
    "properties": {"stars": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["stars"],
    "additionalProperties": False,
}
TASK = SchemaTask("review_1", "How many stars?", SCHEMA)
GOOD = '{"stars": 4}'


def completion(text: str | None = GOOD, reason: str = "stop", tokens: int = 7) -> FakeAnswer:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": reason}
    body = {"choices": [choice], "usage": {"completion_tokens": tokens}}
    return FakeAnswer(body=orjson.dumps(body))


async def answer_with(answer: FakeAnswer) -> tuple[SchemaAnswer, Any]:
    async with FakeServer(lambda n, request: answer).running() as server:
        result = await answer_schema(HttpGenerator(server.target, "org/model"), TASK)
        (received,) = server.requests
    assert (received.method, received.path) == ("POST", "/v1/chat/completions")
    return result, orjson.loads(received.body)


async def test_answer_schema_sends_an_openai_request() -> None:
    result, body = await answer_with(completion())
    assert body == {
        "model": "org/model",
        "messages": [{"role": "user", "content": "How many stars?"}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "review_1", "schema": SCHEMA, "strict": True},
        },
    }
    assert (result.outcome, result.reason, result.tokens) == (SchemaOutcome.VALID, "", 7)
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("answer", "outcome", "why"),
    [
        pytest.param(completion('{"stars": 6}'), "invalid", "$.stars: 6 is greater", id="value"),
        pytest.param(completion('{"stars": 4'), "invalid", "no JSON", id="half"),
        pytest.param(completion('{"stars": NaN}'), "invalid", "no JSON", id="no number"),
        pytest.param(completion("Four stars!"), "invalid", "no JSON", id="prose"),
        pytest.param(completion(None), "invalid", "no JSON", id="no text"),
        pytest.param(completion(reason="tool_calls"), "invalid", "'tool_calls'", id="a call"),
        pytest.param(FakeAnswer(body=b"[]"), "invalid", "no chat completion", id="something else"),
        pytest.param(FakeAnswer(body=b"<html>"), "invalid", "no chat completion", id="html"),
        pytest.param(
            completion('{"sta', "length", 200), "truncated", "after 200 tokens: '{\"sta'", id="cut"
        ),
        pytest.param(completion(GOOD, "length", 4), "truncated", "after 4 tokens", id="cut behind"),
        pytest.param(FakeAnswer(400, b'{"error": "no"}'), "rejected", '400: {"error"', id="status"),
        pytest.param(FakeAnswer(hang_up=True), "rejected", "connection was closed", id="hung up"),
    ],
)
async def test_check_answer_reports_the_outcome(answer: FakeAnswer, outcome: str, why: str) -> None:
    result, _ = await answer_with(answer)
    assert (result.name, result.outcome) == ("review_1", outcome)
    assert why in result.reason


def test_find_violation_accepts_valid_text() -> None:
    assert find_violation(GOOD, SCHEMA) is None
    assert find_violation(' {"stars":1}\n', SCHEMA) is None
    assert "'stars' is a required property" in (find_violation("{}", SCHEMA) or "")


def rotate_order(*answers: FakeAnswer) -> Callable[[int, ReceivedRequest], FakeAnswer]:
    return lambda n, request: answers[n % len(answers)]


async def test_answer_all_counts_outcomes() -> None:
    tasks = build_schema_tasks(random.Random(1))
    script = rotate_order(
        completion("{}", tokens=1),
        completion("{", "length", 200),
        FakeAnswer(503, b"busy"),
        completion("no", tokens=3),
        completion("[", "length", 200),
    )
    async with FakeServer(script, delay_s=0.002).running() as server:
        metrics = await answer_all(HttpGenerator(server.target, "org/model"), tasks)
        prompts = {
            orjson.loads(request.body)["messages"][0]["content"] for request in server.requests
        }
    assert prompts == {task.prompt for task in tasks}
    assert (metrics.requests, metrics.valid, metrics.truncated) == (50, 0, 20)
    assert (metrics.invalid, metrics.rejected) == (20, 10)
    assert len(metrics.faults) == 50
    assert list(metrics.faults) == sorted(metrics.faults)
    assert metrics.tokens == 10 * (1 + 200 + 3 + 200)
    assert 2.0 <= metrics.answer_ms["p50"] <= metrics.answer_ms["p95"] <= metrics.seconds * 1e3


async def test_answer_all_limits_concurrency() -> None:
    under_way: list[int] = []

    class Counting(HttpGenerator):
        running = 0

        async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
            self.running += 1
            under_way.append(self.running)
            await asyncio.sleep(0)
            self.running -= 1
            return 200, completion().body

    generator = Counting(FakeServer().target, "org/model")
    metrics = await answer_all(generator, [TASK] * 30)
    assert (metrics.requests, metrics.valid, metrics.tokens) == (30, 30, 210)
    assert max(under_way) == AT_ONCE
    assert metrics.faults == ()


def test_sentence_without_answers_has_no_latency() -> None:
    metrics = SchemaResults.summarize(
        [SchemaAnswer("a_1", SchemaOutcome.REJECTED, "503: busy")], 1.0
    )
    assert metrics.answer_ms == {}
    assert metrics.sentence == "schemas: 0 of 1 answers valid, 0 truncated, 0 invalid, 1 rejected"
    assert metrics.faults == ("a_1 is rejected: 503: busy",)


def test_sentence_reports_latency_and_rate() -> None:
    answers = [SchemaAnswer(f"a_{n}", SchemaOutcome.VALID, "", 10, n / 10) for n in range(1, 10)]
    body = SchemaResults.summarize(answers, 3.0).sentence
    assert body.endswith("0 rejected; 0.50 s per answer, p95 0.86 s, 30.0 tokens/s")
