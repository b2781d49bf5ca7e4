"""Forced tokens in combination with a grammar, and special tokens as stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.generation.job import JobTimes, ModelContext, SamplingJob
from deployments.messages import Chunk, FinishReason, GenerationOptions, GenerationTimings
from tests.support.fake_decoder import VOCABULARY
from tests.support.fakes import far_deadline
from tests.support.scheduler_harness import GREEDY, build_model_context
from tests.support.small_tokenizers import END, START, byte_level, byte_token

FIRST, LAST, ALLOWED = 5, 6, 7


@dataclass
class OneWord:
    """A grammar that allows the token ALLOWED any number of times, and no other token."""

    is_complete: bool = False
    accepted: list[int] = field(default_factory=list)

    def compute_allowed(self) -> NDArray[np.bool_]:
        return np.arange(VOCABULARY) == ALLOWED

    def accept(self, token: int) -> None:
        assert token == ALLOWED
        self.accepted.append(token)


def test_forced_tokens_are_not_passed_to_the_grammar() -> None:
    source = EncoderDecoderConfig(
        max_source_tokens=8,
        decoder_start_token_id=1,
        forced_bos_token_id=FIRST,
        forced_eos_token_id=LAST,
    )
    grammar = OneWord()
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=4)
    job = SamplingJob(
        [3, 4],
        options,
        replace(build_model_context(20), encoder_decoder=source),
        grammar,
        far_deadline(),
    )  # type: ignore[arg-type]
    written = []
    for _ in range(4):
        job.accept_logits(np.zeros((1, VOCABULARY), np.float32))
        written += job.last_tokens
    assert written == [FIRST, ALLOWED, ALLOWED, LAST]
    assert grammar.accepted == [ALLOWED, ALLOWED]


def generate(options: GenerationOptions, *texts: str) -> list[Chunk]:
    """Return the chunks up to the finished one. The model's tokens are bytes, START and END."""
    tokenizer = byte_level()
    start, end = (tokenizer.token_to_id(name) for name in (START, END))
    size = tokenizer.get_vocab_size()
    model = ModelContext(tokenizer, size, (end,), frozenset((start, end)), context=90)
    job = SamplingJob([start], options, model, None, far_deadline())
    chunks: list[Chunk] = []
    for text in texts:
        token = tokenizer.token_to_id(text)
        token = byte_token(tokenizer, ord(text)) if token is None else token
        chunk = job.accept_logits(np.eye(size, dtype=np.float32)[[token]]).chunk
        assert chunk is not None
        chunks.append(chunk)
        if chunk.finished is not None:
            break
    return chunks


@pytest.mark.parametrize("include_stop_string", [False, True])
def test_special_token_as_stop_string_ends_the_answer(*, include_stop_string: bool) -> None:
    """The text does not contain the token, as in text-generation-inference."""
    options = GenerationOptions(
        sampling=GREEDY, stop=("ac", START), include_stop_string=include_stop_string
    )
    chunks = generate(options, "b", "a", START, "c")
    finished = chunks[-1].finished
    assert finished is not None
    assert (finished.reason, finished.generated_tokens) == (FinishReason.STOP, 3)
    assert finished.stop == START
    assert "".join(chunk.text for chunk in chunks) == "ba"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="no stop string"),
        pytest.param({"stop": (END,)}, id="another token"),
        pytest.param({"stop": (f"{START}a",)}, id="more than the token"),
        pytest.param({"stop": (START,), "min_new_tokens": 2}, id="too early"),
    ],
)
def test_special_token_that_is_no_stop_string_is_ignored(options: dict[str, Any]) -> None:
    chunks = generate(
        GenerationOptions(sampling=GREEDY, max_new_tokens=3, **options), START, "a", "b"
    )
    finished = chunks[-1].finished
    assert finished is not None
    assert (finished.reason, finished.generated_tokens) == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize(("min_new_tokens", "text"), [(0, ""), (1, "a")])
def test_stop_string_counts_from_the_first_token_after_the_minimum(
    min_new_tokens: int, text: str
) -> None:
    options = GenerationOptions(sampling=GREEDY, stop=("b", "a"), min_new_tokens=min_new_tokens)
    chunks = generate(options, *"aaa")
    finished = chunks[-1].finished
    assert finished is not None
    assert (finished.reason, finished.stop) == (FinishReason.STOP, "a")
    assert "".join(chunk.text for chunk in chunks) == text


def test_end_token_is_special_although_the_tokenizer_has_no_special_tokens() -> None:
    model = replace(build_model_context(20), special_tokens=frozenset())
    assert model.is_special(model.eos_token_ids[0])


def test_source_of_an_encoder_decoder_takes_no_room_of_the_answer() -> None:
    source = EncoderDecoderConfig(max_source_tokens=16, decoder_start_token_id=1)
    model = replace(build_model_context(20), encoder_decoder=source)
    job = SamplingJob(range(15), GenerationOptions(sampling=GREEDY), model, None, far_deadline())
    assert job.demand.max_new_tokens == 20 - 1


def test_times_of_a_job_are_the_durations_of_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    times = JobTimes(tokenize_s=0.5, submitted_s=1.0, started_s=3.0, first_token_s=6.0)
    monkeypatch.setattr(
        "deployments.generation.job.time", SimpleNamespace(perf_counter=lambda: 10.0)
    )
    assert times.timings() == GenerationTimings(
        queue_s=2.0, prefill_s=3.0, decode_s=4.0, tokenize_s=0.5
    )


def test_end_token_as_stop_string_is_the_end() -> None:
    chunks = generate(GenerationOptions(sampling=GREEDY, stop=(END,)), "a", END)
    finished = chunks[-1].finished
    assert finished is not None
    assert finished.reason is FinishReason.END
