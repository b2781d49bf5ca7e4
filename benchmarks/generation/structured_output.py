"""Answers that must follow JSON schemas: does a running server keep to every one of them?

Asked over HTTP as OpenAI's clients ask, a few at a time; judged by another program than the one
that made the server keep to them. What was cut by its number of tokens never counts as valid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import jsonschema
import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.statistics import percentiles_ms
from benchmarks.generation.http import HttpGenerator
from benchmarks.generation.schemas import MOST_TOKENS, SchemaTask

PATH = "/v1/chat/completions"
AT_ONCE = 4
_MOST_TOLD = 200  # characters of what is wrong


class SchemaOutcome(StrEnum):
    """What came of one form."""

    VALID = "valid"
    CUT = "cut short"  # by its number of tokens: nothing can be said about it
    WRONG = "wrong"  # ended, and is no JSON or breaks its schema
    REFUSED = "refused"  # no answer at all


class SchemaAnswer(NamedTuple):
    """One form and its answer."""

    name: str
    verdict: SchemaOutcome
    why: str = ""  # unless it is valid
    tokens: int = 0
    seconds: float = 0.0  # from the question to the whole answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaResults:
    """All forms together."""

    asked: int
    valid: int
    cut: int
    wrong: int
    refused: int
    answer_ms: Mapping[str, float]  # p50 to p99 of those that were answered; may be empty
    tokens: int
    seconds: float  # from the first question to the last answer
    faults: tuple[str, ...]  # a sentence for each that is not valid

    @classmethod
    def of(cls, filled: Sequence[SchemaAnswer], seconds: float) -> Self:
        """Counted."""
        verdicts = [one.verdict for one in filled]
        answered = [one for one in filled if one.verdict is not SchemaOutcome.REFUSED]
        return cls(
            asked=len(filled),
            valid=verdicts.count(SchemaOutcome.VALID),
            cut=verdicts.count(SchemaOutcome.CUT),
            wrong=verdicts.count(SchemaOutcome.WRONG),
            refused=verdicts.count(SchemaOutcome.REFUSED),
            answer_ms=percentiles_ms([one.seconds for one in answered]),
            tokens=sum(one.tokens for one in filled),
            seconds=seconds,
            faults=tuple(
                f"{one.name} is {one.verdict}: {one.why}"
                for one in filled
                if one.verdict is not SchemaOutcome.VALID
            ),
        )

    @property
    def sentence(self) -> str:
        """For people."""
        told = (
            f"schemas: {self.valid} of {self.asked} answers valid, {self.cut} cut short, "
            f"{self.wrong} wrong, {self.refused} refused"
        )
        if not self.answer_ms:
            return told
        p50_s, p95_s = (self.answer_ms[rank] / 1e3 for rank in ("p50", "p95"))
        rate = self.tokens / self.seconds
        return f"{told}; {p50_s:.2f} s an answer, p95 {p95_s:.2f} s, {rate:.1f} tokens/s"


async def answer_all(service: HttpGenerator, forms: Iterable[SchemaTask]) -> SchemaResults:
    """StreamRequest for all of them, `AT_ONCE` at a time. What fails is counted, never raised."""
    filled: list[SchemaAnswer] = []
    waiting = iter(forms)

    async def read() -> None:
        for form in waiting:
            filled.append(await answer_schema(service, form))

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as readers:
        for _ in range(AT_ONCE):
            readers.create_task(read())
    seconds = time.perf_counter() - began_s
    return SchemaResults.of(sorted(filled), seconds)


async def answer_schema(service: HttpGenerator, form: SchemaTask) -> SchemaAnswer:
    """One form, judged behind the clock."""
    submitted_s = time.perf_counter()
    try:
        status, body = await service.post(PATH, body_of(service.model_id, form))
    except BenchmarkError as exc:
        return SchemaAnswer(form.name, SchemaOutcome.REFUSED, exc.message)
    seconds = time.perf_counter() - submitted_s
    if status != 200:
        told = body[:_MOST_TOLD].decode(errors="replace")
        return SchemaAnswer(form.name, SchemaOutcome.REFUSED, f"{status}: {told}")
    return judged(form, body)._replace(seconds=seconds)


def body_of(model_id: str, form: SchemaTask) -> bytes:
    """The question as JSON."""
    named = {"name": form.name, "schema": form.schema, "strict": True}
    return orjson.dumps(
        {
            "model": model_id,
            "messages": [{"role": "user", "content": form.prompt}],
            "max_tokens": MOST_TOKENS,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": named},
        }
    )


def judged(form: SchemaTask, body: bytes) -> SchemaAnswer:
    """What is to be said about an answer with status 200."""
    try:
        told = orjson.loads(body)
        (choice,) = told["choices"]
        tokens = int(told["usage"]["completion_tokens"])
        text, reason = str(choice["message"]["content"]), choice["finish_reason"]
    except (ValueError, KeyError, TypeError) as exc:
        return SchemaAnswer(form.name, SchemaOutcome.WRONG, f"no chat completion: {exc!r}")
    if reason == "length":
        return SchemaAnswer(
            form.name, SchemaOutcome.CUT, f"after {tokens} tokens: {text[-40:]!r}", tokens
        )
    if reason != "stop":
        return SchemaAnswer(form.name, SchemaOutcome.WRONG, f"it ended with {reason!r}", tokens)
    fault = find_violation(text, form.schema)
    verdict = SchemaOutcome.VALID if fault is None else SchemaOutcome.WRONG
    return SchemaAnswer(form.name, verdict, fault or "", tokens)


def find_violation(text: str, schema: Mapping[str, Any]) -> str | None:
    """Where a text breaks a schema; None where it does not."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        return f"no JSON ({exc}): {text[:_MOST_TOLD]!r}"
    found = jsonschema.Draft202012Validator(schema).iter_errors(value)
    first = next(found, None)
    return None if first is None else f"{first.json_path}: {first.message}"[:_MOST_TOLD]
