from __future__ import annotations

from contextlib import AbstractContextManager

import orjson
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.rivals.answers import AnswerBounds, RawAnswer, check_answers, require_right
from benchmarks.rivals.apis import CompletionApi, completion_api, inputs_api
from benchmarks.rivals.references import ReferenceCompletions, ReferenceEmbeddings, References
from benchmarks.rivals.results import AnswerCheck
from benchmarks.rivals.rounds import Meter
from benchmarks.rivals.summary import compare_lengths
from benchmarks.rivals.workloads import GENERATION
from benchmarks.servers.processes import ServerProcess

API: CompletionApi = completion_api("model")
BOUNDS = AnswerBounds(0.9)
OURS = AnswerBounds(0.9, has_our_completions=True)


def answer(prompt: str, tokens: int, text: str = "text") -> RawAnswer:
    body = orjson.dumps({"choices": [{"text": text}], "usage": {"completion_tokens": tokens}})
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
    return RawAnswer((prompt,), head.encode() + body)


def start() -> AbstractContextManager[ServerProcess]:
    raise AssertionError("no server is needed")


def meter(*answers: RawAnswer) -> Meter:
    return Meter("toy", [API], BOUNDS, start, answers={GENERATION: list(answers)})


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


def check(bounds: AnswerBounds, *texts: str) -> AnswerCheck:
    """Check answers to as many prompts, to which the artifact answers `one two three four`."""
    references = References(
        ReferenceEmbeddings(lambda texts: pytest.fail("no embedding is needed")),
        ReferenceCompletions(
            lambda prompts: ["one two three four"] * len(prompts),
            lambda text: tuple(map(hash, text.split())),
        ),
    )
    answers = [answer(str(n), len(text.split()), text) for n, text in enumerate(texts)]
    return check_answers(API, answers, references, bounds)


def test_equal_leading_tokens_of_completions_are_reported() -> None:
    checked = check(BOUNDS, " one two three four", "one two 3 4", "1 2 3 4", "one two")
    assert checked.completions is not None
    assert checked.completions.equal_leading_share == pytest.approx((1 + 0.5 + 0 + 0.5) / 4)
    assert (checked.completions.same, checked.completions.empty) == (0, 0)
    require_right("a rival", checked)


def test_our_completions_are_those_of_the_artifact() -> None:
    require_right("ours", check(OURS, "one two three four"))
    with pytest.raises(
        BenchmarkError, match=r"ours are wrong: 2 compared, 0 without text, 1 equal"
    ):
        require_right("ours", check(OURS, "one two three four", "one two three 4"))


def test_every_answer_has_a_text() -> None:
    checked = check(BOUNDS, "one two three four", "")
    assert checked.tokens_per_response == 2.0
    with pytest.raises(BenchmarkError, match="2 compared, 1 without text"):
        require_right("a rival", checked)


def test_embeddings_have_no_lengths() -> None:
    embedder = Meter("toy", [inputs_api()], BOUNDS, start)
    assert compare_lengths(meter(answer("a", 10)), embedder) == 1.0
