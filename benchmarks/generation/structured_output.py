"""Check of structured output: answers of a running server against their JSON schemas.

Requests use OpenAI's chat API, AT_ONCE at a time. The `jsonschema` package validates the answers,
independently of the server's grammar. An answer that reaches its token limit counts as truncated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import jsonschema
import orjson

from benchmarks.common.closed_loop import run_clients
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.statistics import percentiles_ms
from benchmarks.generation.http_system import HttpGenerator
from benchmarks.generation.schemas import MAX_TOKENS, SchemaTask

PATH = "/v1/chat/completions"
AT_ONCE = 4
_MAX_MESSAGE_CHARACTERS = 200  # maximum number of quoted characters of an invalid answer


class SchemaOutcome(StrEnum):
    VALID = "valid"
    TRUNCATED = "truncated"  # the answer reached its token limit
    INVALID = "invalid"  # no completion, wrong finish reason, no JSON, or against the schema
    REJECTED = "rejected"  # no response with status 200


class SchemaAnswer(NamedTuple):
    """Outcome of one schema task: a prompt whose answer must match a JSON schema."""

    name: str
    outcome: SchemaOutcome
    reason: str = ""  # empty if valid
    tokens: int = 0
    seconds: float = 0.0  # time from the request to the complete answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaResults:
    """Number of each outcome, latencies and faults over all schema tasks."""

    requests: int
    valid: int
    truncated: int
    invalid: int
    rejected: int
    answer_ms: Mapping[str, float]  # latency p50 to p99 of the answered requests; may be empty
    tokens: int
    seconds: float  # time from the first request to the last answer
    faults: tuple[str, ...]  # one sentence per answer that is not valid

    @classmethod
    def summarize(cls, answers: Sequence[SchemaAnswer], seconds: float) -> Self:
        outcomes = [answer.outcome for answer in answers]
        answered = [answer for answer in answers if answer.outcome is not SchemaOutcome.REJECTED]
        return cls(
            requests=len(answers),
            valid=outcomes.count(SchemaOutcome.VALID),
            truncated=outcomes.count(SchemaOutcome.TRUNCATED),
            invalid=outcomes.count(SchemaOutcome.INVALID),
            rejected=outcomes.count(SchemaOutcome.REJECTED),
            answer_ms=percentiles_ms([answer.seconds for answer in answered]),
            tokens=sum(answer.tokens for answer in answers),
            seconds=seconds,
            faults=tuple(
                f"{answer.name} is {answer.outcome}: {answer.reason}"
                for answer in answers
                if answer.outcome is not SchemaOutcome.VALID
            ),
        )

    @property
    def sentence(self) -> str:
        text = (
            f"schemas: {self.valid} of {self.requests} answers valid, {self.truncated} truncated, "
            f"{self.invalid} invalid, {self.rejected} rejected"
        )
        if not self.answer_ms:
            return text
        p50_s, p95_s = (self.answer_ms[rank] / 1e3 for rank in ("p50", "p95"))
        rate = self.tokens / self.seconds
        return f"{text}; {p50_s:.2f} s per answer, p95 {p95_s:.2f} s, {rate:.1f} tokens/s"


async def answer_all(generator: HttpGenerator, tasks: Iterable[SchemaTask]) -> SchemaResults:
    """Run all tasks, `AT_ONCE` at a time. Failures are counted, never raised."""
    answers: list[SchemaAnswer] = []

    async def run_task(task: SchemaTask) -> None:
        answers.append(await answer_schema(generator, task))

    started_s = time.perf_counter()
    await run_clients(AT_ONCE, tasks, run_task)
    seconds = time.perf_counter() - started_s
    return SchemaResults.summarize(sorted(answers), seconds)


async def answer_schema(generator: HttpGenerator, task: SchemaTask) -> SchemaAnswer:
    """Send one task. Check its answer outside of the timing."""
    submitted_s = time.perf_counter()
    try:
        status, body = await generator.post(PATH, build_body(generator.model_id, task))
    except BenchmarkError as exc:
        return SchemaAnswer(task.name, SchemaOutcome.REJECTED, exc.message)
    seconds = time.perf_counter() - submitted_s
    if status != 200:
        message = body[:_MAX_MESSAGE_CHARACTERS].decode(errors="replace")
        return SchemaAnswer(task.name, SchemaOutcome.REJECTED, f"{status}: {message}")
    return check_answer(task, body)._replace(seconds=seconds)


def build_body(model_id: str, task: SchemaTask) -> bytes:
    schema = {"name": task.name, "schema": task.schema, "strict": True}
    return orjson.dumps(
        {
            "model": model_id,
            "messages": [{"role": "user", "content": task.prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
    )


def check_answer(task: SchemaTask, body: bytes) -> SchemaAnswer:
    """Classify a response with status 200 as valid, truncated or invalid."""
    try:
        completion = orjson.loads(body)
        (choice,) = completion["choices"]
        tokens = int(completion["usage"]["completion_tokens"])
        text, reason = str(choice["message"]["content"]), choice["finish_reason"]
    except (ValueError, KeyError, TypeError) as exc:
        return SchemaAnswer(task.name, SchemaOutcome.INVALID, f"no chat completion: {exc!r}")
    if reason == "length":
        return SchemaAnswer(
            task.name, SchemaOutcome.TRUNCATED, f"after {tokens} tokens: {text[-40:]!r}", tokens
        )
    if reason != "stop":
        return SchemaAnswer(task.name, SchemaOutcome.INVALID, f"it ended with {reason!r}", tokens)
    violation = find_violation(text, task.schema)
    outcome = SchemaOutcome.VALID if violation is None else SchemaOutcome.INVALID
    return SchemaAnswer(task.name, outcome, violation or "", tokens)


def find_violation(text: str, schema: Mapping[str, Any]) -> str | None:
    """Return the first violation of the schema, or why the text is no JSON; None if it is valid."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        return f"no JSON ({exc}): {text[:_MAX_MESSAGE_CHARACTERS]!r}"
    violations = jsonschema.Draft202012Validator(schema).iter_errors(value)
    first = next(violations, None)
    return (
        None if first is None else f"{first.json_path}: {first.message}"[:_MAX_MESSAGE_CHARACTERS]
    )
