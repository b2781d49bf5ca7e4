from __future__ import annotations

from contextlib import AbstractContextManager

import orjson
import pytest

from benchmarks.rivals.answers import RawAnswer, ReferenceEmbeddings, check_answers
from benchmarks.rivals.apis import CompletionApi, completion_api, inputs_api
from benchmarks.rivals.rounds import Meter
from benchmarks.rivals.summary import compare_lengths
from benchmarks.rivals.workloads import GENERATION
from benchmarks.servers.processes import ServerProcess

API: CompletionApi = completion_api("model")


def answer(prompt: str, tokens: int, text: str = "text") -> RawAnswer:
    body = orjson.dumps({"choices": [{"text": text}], "usage": {"completion_tokens": tokens}})
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
    return RawAnswer((prompt,), head.encode() + body)


def start() -> AbstractContextManager[ServerProcess]:
    raise AssertionError("no server is needed")


def meter(*answers: RawAnswer) -> Meter:
    return Meter("toy", [API], 0.9, start, answers={GENERATION: list(answers)})


def test_lengths_are_compared_for_prompts_that_both_answered() -> None:
    ours = meter(answer("a", 10), answer("b", 30), answer("c", 60))
    assert compare_lengths(ours, meter(answer("a", 10))) == 1.0
    assert compare_lengths(ours, meter(answer("a", 20), answer("b", 20))) == 1.0
    assert compare_lengths(ours, meter(answer("b", 15))) == 2.0


def test_repeated_prompts_count_once() -> None:
    ours = meter(answer("a", 10), answer("a", 10), answer("a", 10), answer("b", 40))
    assert compare_lengths(ours, meter(answer("a", 10), answer("b", 40))) == 1.0


def test_completion_without_text_has_no_tokens() -> None:
    ours = meter(answer("a", 10), answer("b", 7, text=""))
    assert compare_lengths(ours, meter(answer("a", 10), answer("b", 10))) == 0.5
    references = ReferenceEmbeddings(lambda texts: pytest.fail("no embedding is needed"))
    check = check_answers(API, ours.answers[GENERATION], references, 0.9)
    assert (check.compared, check.tokens_per_response) == (1, 5.0)


def test_embeddings_have_no_lengths() -> None:
    embedder = Meter("toy", [inputs_api()], 0.9, start)
    assert compare_lengths(meter(answer("a", 10)), embedder) == 1.0
