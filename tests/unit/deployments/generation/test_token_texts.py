"""Texts and bytes of prompt tokens, generated tokens and alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deployments.generation.job import ModelContext, SamplingJob
from deployments.messages import GenerationOptions, Token
from tests.support.fakes import far_deadline
from tests.support.scheduler_harness import GREEDY
from tests.support.small_tokenizers import END, byte_level, byte_token


def build_job(
    tokenizer: Tokenizer, prompt: Sequence[int], *, prompt_logprobs: bool, logprobs: int | None
) -> SamplingJob:
    end = tokenizer.token_to_id(END)
    model = ModelContext(tokenizer, tokenizer.get_vocab_size(), (end,), frozenset((end,)), 90)
    options = GenerationOptions(
        sampling=GREEDY, max_new_tokens=20, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    return SamplingJob(prompt, options, model, None, far_deadline())


def rank(tokenizer: Tokenizer, *ids: int) -> NDArray[np.float32]:
    """Return logits [V] in which `ids` are the most likely tokens, in this order."""
    logits = np.zeros(tokenizer.get_vocab_size(), np.float32)
    logits[list(ids)] = np.arange(len(ids), 0, -1)
    return logits


def generate(job: SamplingJob, *rows: NDArray[np.float32]) -> list[Token]:
    """Return the tokens that the job generates from logits."""
    tokens: list[Token] = []
    for logits in rows:
        chunk = job.accept_logits(logits[None]).chunk
        assert chunk is not None
        tokens += chunk.tokens
    return tokens


def test_texts_of_prompt_tokens_concatenate_to_the_prompt() -> None:
    tokenizer = byte_level()
    text = "Zażółć 日本 😀 the river"
    ids = tokenizer.encode(text).ids
    job = build_job(tokenizer, ids, prompt_logprobs=True, logprobs=None)
    for start in range(0, len(ids), 3):
        rows = [rank(tokenizer, token) for token in ids[start : start + 3]]
        job.accept_prompt_chunk(len(rows), np.stack(rows))
    prompt = job.build_started("cpu-fake").prompt
    assert [token.id for token in prompt] == ids
    assert "".join(token.text for token in prompt) == text
    assert prompt[0].logprob is None
    assert all(token.logprob is not None for token in prompt[1:])


def test_character_that_a_prompt_begins_is_the_text_of_the_first_token() -> None:
    tokenizer = byte_level()
    first, *others = (byte_token(tokenizer, byte) for byte in "日".encode())
    job = build_job(tokenizer, [first], prompt_logprobs=True, logprobs=None)
    job.accept_prompt_chunk(1, rank(tokenizer, others[0])[None])
    assert [token.text for token in job.build_started("cpu-fake").prompt] == [""]
    tokens = generate(job, *(rank(tokenizer, token) for token in others))
    assert [token.text for token in tokens] == ["", "日"]


def test_special_tokens_of_a_prompt_have_their_names() -> None:
    tokenizer = byte_level()
    end, a = tokenizer.token_to_id(END), byte_token(tokenizer, ord("a"))
    job = build_job(tokenizer, [end, a, end], prompt_logprobs=True, logprobs=1)
    job.accept_prompt_chunk(3, np.stack([rank(tokenizer, a)] * 3))
    prompt = job.build_started("cpu-fake").prompt
    assert [(token.text, token.special) for token in prompt] == [
        (END, True),
        ("a", False),
        (END, True),
    ]


def test_prompt_tokens_have_the_requested_alternatives() -> None:
    tokenizer = byte_level()
    a, b, c, d = (byte_token(tokenizer, byte) for byte in b"abcd")
    job = build_job(tokenizer, [a, b, c], prompt_logprobs=True, logprobs=2)
    rows = [rank(tokenizer, b, d), rank(tokenizer, d, a), rank(tokenizer, a)]
    job.accept_prompt_chunk(3, np.stack(rows))
    first, second, third = job.build_started("cpu-fake").prompt
    assert (first.logprob, first.alternatives) == (None, ())
    assert [each.text for each in second.alternatives] == ["b", "d"]
    assert second.alternatives[0].logprob == second.logprob
    assert [each.text for each in third.alternatives] == ["d", "a"]
    assert third.logprob is not None
    assert third.logprob < third.alternatives[1].logprob


def test_parts_of_characters_keep_their_bytes() -> None:
    tokenizer = byte_level()
    first, second, third = (byte_token(tokenizer, byte) for byte in "日".encode())
    other = byte_token(tokenizer, 0xE7)
    job = build_job(tokenizer, [third], prompt_logprobs=False, logprobs=2)
    tokens = generate(
        job, rank(tokenizer, first, other), rank(tokenizer, second), rank(tokenizer, third, second)
    )
    assert [(token.text, token.raw_bytes) for token in tokens] == [
        ("", b"\xe6"),
        ("", b"\x97"),
        ("日", b"\xa5"),
    ]
    seen = [[(each.id, each.text, each.raw_bytes) for each in t.alternatives] for t in tokens]
    assert seen[0] == [(first, "", b"\xe6"), (other, "\ufffd", b"\xe7")]
    assert seen[2] == [(third, "日", b"\xa5"), (second, "\ufffd", b"\x97")]


def test_whole_characters_and_special_tokens_have_no_bytes_of_their_own() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id(END)
    a, b = (byte_token(tokenizer, byte) for byte in b"ab")
    job = build_job(tokenizer, [a], prompt_logprobs=False, logprobs=2)
    word, last = generate(job, rank(tokenizer, b, end), rank(tokenizer, end, b))
    for token in (word, last):
        assert {each.raw_bytes for each in (token, *token.alternatives)} == {None}
    assert [each.text for each in word.alternatives] == ["b", END]
    assert (last.text, [each.text for each in last.alternatives]) == ("", [END, "b"])


def test_tokens_without_log_probabilities_have_no_bytes() -> None:
    tokenizer = byte_level()
    first = byte_token(tokenizer, 0xE6)
    job = build_job(tokenizer, [first], prompt_logprobs=False, logprobs=None)
    (token,) = generate(job, rank(tokenizer, first))
    assert token.raw_bytes is None
