"""The reasoning of a thinking model is separated from the text of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deployments.generation.job import ModelContext, SamplingJob
from deployments.generation.reasoning import (
    KNOWN_MARKS,
    THINK,
    MarkTexts,
    ReasoningMarks,
    ReasoningSplitter,
    find_named_marks,
)
from deployments.messages import FinishReason, GenerationOptions, Token
from tests.support.fakes import far_deadline
from tests.support.scheduler_harness import GREEDY
from tests.support.small_tokenizers import END, START, byte_level, byte_token

OPEN, CLOSE = THINK.open, THINK.close
OPENED, CLOSED = f"{OPEN}\n", f"{OPEN}\n\n{CLOSE}\n\n"
NEITHER = "assistant\n"


@dataclass
class Digits:
    """A grammar of digits that begins with a space, as Constraint."""

    tokens: Sequence[int]
    vocabulary: int
    is_complete: bool = False
    accepted: list[int] = field(default_factory=list)

    def compute_allowed(self) -> NDArray[np.bool_]:
        return np.isin(np.arange(self.vocabulary), self.tokens)

    def accept(self, token: int) -> None:
        assert token in self.tokens
        self.accepted.append(token)


class SplitAnswer(NamedTuple):
    text: str
    reasoning: str
    reason: FinishReason
    reasoning_tokens: int
    tokens: tuple[Token, ...]


def thinking_tokenizer(texts: MarkTexts = THINK, *, special: bool = False) -> Tokenizer:
    tokenizer = byte_level()
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add([texts.open, texts.close])
    return tokenizer


def spell_token(tokenizer: Tokenizer, text: bytes) -> str:
    """Return the token of these bytes as the vocabulary writes it."""
    return "".join(tokenizer.id_to_token(byte_token(tokenizer, byte)) for byte in text)


def spell(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    """Return the token `text`, or else one token for each of its bytes. Bytes are one token."""
    if isinstance(text, bytes):
        return [tokenizer.token_to_id(spell_token(tokenizer, text))]
    token = tokenizer.token_to_id(text) if text.isascii() else None
    return [byte_token(tokenizer, byte) for byte in text.encode()] if token is None else [token]


def generate(
    prompt: str,
    *texts: str | bytes,
    tokenizer: Tokenizer | None = None,
    grammar: str | None = None,
    **options: Any,
) -> SplitAnswer:
    """Generate an answer of a model that prefers the tokens of `texts`, one after the other."""
    tokenizer = tokenizer or thinking_tokenizer()
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    special = frozenset(
        id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )
    (marks,) = ReasoningMarks.find_all(tokenizer, size)
    ids = tokenizer.encode(prompt).ids
    constraint: Any = None
    if grammar is not None:
        constraint = Digits([token for c in grammar for token in spell(tokenizer, c)], size)
    job = SamplingJob(
        ids,
        GenerationOptions(**{"sampling": GREEDY, "max_new_tokens": 40, **options}),
        ModelContext(tokenizer, size, (end,), special, context=200),
        constraint,
        far_deadline(),
        ReasoningSplitter.after_prompt(ids, marks, tokenizer, trims_text=constraint is None),
    )
    answer = run_job(job, tokenizer, (*texts, END))
    assert all(token.reasoning for token in answer.tokens[: answer.reasoning_tokens])
    return answer


def run_job(job: SamplingJob, tokenizer: Tokenizer, texts: Sequence[str | bytes]) -> SplitAnswer:
    """Run a job whose model prefers the tokens of `texts`, until one of them ends the answer."""
    size = tokenizer.get_vocab_size()
    chunks = []
    for token in [token for text in texts for token in spell(tokenizer, text)]:
        chunk = job.accept_logits(np.eye(size, dtype=np.float32)[[token]]).chunk
        if chunk is None:
            continue
        chunks.append(chunk)
        if chunk.finished is not None:
            break
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    finished = chunks[-1].finished
    assert finished is not None
    assert finished.generated_tokens == len(tokens)
    assert finished.reasoning_tokens == sum(token.reasoning for token in tokens)
    return SplitAnswer(
        "".join(chunk.text for chunk in chunks),
        "".join(token.text for token in tokens if token.reasoning),
        finished.reason,
        finished.reasoning_tokens,
        tokens,
    )


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("after", [(), ("\n\n",), (START, "\n\n")])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (OPENED, ("hm",)),
        (NEITHER, (OPEN, "hm")),
        (NEITHER, ("\n", OPEN, "hm")),
        (NEITHER, (START, "\n", OPEN, "hm")),
    ],
)
def test_reasoning_is_separated(
    prompt: str, texts: tuple[str, ...], after: tuple[str, ...], special: bool
) -> None:
    tokenizer = thinking_tokenizer(special=special)
    texts = (*texts, CLOSE, *after)
    answer = generate(prompt, *texts, "ok", tokenizer=tokenizer)
    assert answer.text == "ok"
    assert answer.reasoning.strip() == "hm"
    assert answer.reasoning_tokens == sum(len(spell(tokenizer, text)) for text in texts)
    assert answer.reason is FinishReason.END


def test_blank_text_is_held_back_until_the_reasoning_begins() -> None:
    answer = generate(NEITHER, "\n", OPEN, "a", CLOSE, "ok", stop=("\n",))
    assert (answer.text, answer.reason) == ("ok", FinishReason.END)
    cut = generate(NEITHER, "\n", OPEN, "a", max_new_tokens=2)
    assert (cut.text, cut.reasoning) == ("", "\n")


def test_blank_text_without_reasoning_stays() -> None:
    cut = generate(NEITHER, "\n", " ", "a", max_new_tokens=2)
    assert (cut.text, cut.reason, cut.reasoning_tokens) == ("\n ", FinishReason.LENGTH, 0)
    stopped = generate(NEITHER, "\n", "a", stop=("\n",))
    assert (stopped.text, stopped.reason) == ("", FinishReason.STOP)
    ended = generate(NEITHER, "\n", START, "a", stop=(START,))
    assert (ended.text, ended.reason) == ("\n", FinishReason.STOP)


def test_white_space_between_reasoning_and_text_is_left_out_of_the_text() -> None:
    answer = generate(OPENED, "hm\n", CLOSE, "\n\n ", "a b\n")
    assert (answer.text, answer.reasoning) == ("a b\n", "hm\n\n\n ")
    assert "".join(token.text for token in answer.tokens if not token.reasoning) == "a b\n"


def test_text_starts_within_a_token() -> None:
    tokenizer = thinking_tokenizer()
    tokenizer.add_tokens([" yes"])
    answer = generate(OPENED, CLOSE, " yes", "!", tokenizer=tokenizer, logprobs=1)
    assert answer.text == "yes!"
    tokens = [token for token in answer.tokens if not token.reasoning]
    assert [token.text for token in tokens] == ["yes", "!", ""]
    (alternative,) = tokens[0].alternatives
    assert alternative.text == "yes"
    assert tokens[0].raw_bytes is alternative.raw_bytes is None, "the bytes are those of the text"


def test_reasoning_has_no_logprobs() -> None:
    answer = generate(NEITHER, "\n", OPEN, "hm", CLOSE, "\n", "ok", logprobs=1)
    thought, said = answer.tokens[: answer.reasoning_tokens], answer.tokens[-3:]
    assert all(token.logprob is None and not token.alternatives for token in thought)
    assert all(token.logprob is not None and token.alternatives for token in said)


@pytest.mark.parametrize("texts", [("ok",), ("\n", "ok"), (f"a {OPEN[:-1]} b",), ("é",)])
@pytest.mark.parametrize("prompt", [NEITHER, CLOSED, f"{OPEN}a{CLOSE}b"])
def test_answer_without_reasoning_is_all_text(prompt: str, texts: tuple[str, ...]) -> None:
    answer = generate(prompt, *texts)
    assert (answer.text, answer.reasoning_tokens) == ("".join(texts), 0)


def test_later_marks_are_text() -> None:
    assert generate(OPENED, "a", CLOSE, "b", OPEN, "c", CLOSE).text == f"b{OPEN}c{CLOSE}"
    assert generate(NEITHER, "b", OPEN, "c", CLOSE).text == f"b{OPEN}c{CLOSE}"


def test_prompt_that_closed_the_reasoning_starts_with_text() -> None:
    assert generate(CLOSED, OPEN, "a").text == f"{OPEN}a"


def test_mark_of_several_tokens_is_no_mark() -> None:
    answer = generate(OPENED, *CLOSE, "a", CLOSE, "b")
    assert (answer.text, answer.reasoning) == ("b", f"{CLOSE}a")


def test_answer_may_be_cut_within_the_reasoning() -> None:
    answer = generate(OPENED, "hmm", max_new_tokens=2)
    assert (answer.text, answer.reasoning) == ("", "hm")
    assert (answer.reason, answer.reasoning_tokens) == (FinishReason.LENGTH, 2)
    ended = generate(OPENED, "hm", END)
    assert (ended.text, ended.reasoning, ended.reason) == ("", "hm", FinishReason.END)
    assert ended.reasoning_tokens == 2


@pytest.mark.parametrize("special", [False, True])
def test_incomplete_character_ends_with_the_reasoning(special: bool) -> None:
    tokenizer = thinking_tokenizer(special=special)
    answer = generate(OPENED, "a", b"\xc3", CLOSE, b"\xa9", "é", tokenizer=tokenizer)
    assert (answer.text, answer.reasoning) == ("\ufffdé", "a\ufffd")


@pytest.mark.parametrize(("prompt", "texts"), [(OPENED, (CLOSE,)), (NEITHER, ())])
def test_text_may_start_with_a_token_that_ends_within_a_character(
    prompt: str, texts: tuple[str, ...]
) -> None:
    tokenizer = thinking_tokenizer()
    tokenizer.add_tokens([spell_token(tokenizer, b" \xf0\x9f")])
    rest = (b" \xf0\x9f", b"\x98", b"\x80")
    answer = generate(prompt, *texts, *rest, tokenizer=tokenizer)
    assert answer.text.lstrip() == "😀"
    assert answer.reasoning_tokens == len(texts)


def test_stop_strings_are_found_in_the_text_only() -> None:
    answer = generate(OPENED, "a\n\nb", CLOSE, "\n\n", "c\n\nd", stop=("\n\n", "b"))
    assert (answer.text, answer.reason) == ("c", FinishReason.STOP)


@pytest.mark.parametrize("mark", [CLOSE, START])
def test_token_as_stop_string_ends_the_reasoning(mark: str) -> None:
    answer = generate(OPENED, "a", mark, "b", stop=(mark,))
    assert (answer.text, answer.reasoning, answer.reason) == ("", "a", FinishReason.STOP)


@pytest.mark.parametrize(("prompt", "opening"), [(OPENED, ()), (NEITHER, (OPEN,))])
def test_grammar_begins_after_the_reasoning(prompt: str, opening: tuple[str, ...]) -> None:
    texts = (*opening, "a", CLOSE, " ", "1", "2")
    answer = generate(prompt, *texts, grammar=" 12", max_new_tokens=len(texts))
    assert (answer.text, answer.reasoning) == (" 12", "a")


def test_white_space_that_a_grammar_allows_before_the_reasoning_follows_it() -> None:
    answer = generate(NEITHER, " ", OPEN, "a", CLOSE, "1", grammar=" 1", max_new_tokens=5)
    assert (answer.text, answer.reasoning) == (" 1", "a")
    cut = generate(NEITHER, " ", OPEN, "a", grammar=" 1", max_new_tokens=3)
    assert (cut.text, cut.reasoning) == (" ", "a")


def test_grammar_applies_to_an_answer_without_reasoning() -> None:
    answer = generate(NEITHER, "1", "a", grammar="1", max_new_tokens=2)
    assert (answer.text, answer.reasoning_tokens) == ("11", 0)
    assert generate(CLOSED, OPEN, grammar="1", max_new_tokens=1).text == "1"


def test_reasoning_before_a_grammar_cannot_end_the_answer() -> None:
    answer = generate(OPENED, "a", END, CLOSE, "1", grammar="1", max_new_tokens=4)
    assert answer.text == "1"
    assert END not in answer.reasoning


def test_reasoning_starts_at_most_once_before_a_grammar() -> None:
    answer = generate(OPENED, CLOSE, OPEN, "1", grammar="1", max_new_tokens=3)
    assert answer.text == "11"


def test_tokenizer_without_both_marks_does_not_think() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([OPEN])
    assert not ReasoningMarks.find_all(tokenizer, 1_000)
    complete = thinking_tokenizer()
    size = complete.get_vocab_size()
    assert ReasoningMarks.find_all(complete, size) == ((size - 2, size - 1, THINK),)
    assert not ReasoningMarks.find_all(complete, size - 1), "the model cannot generate the mark"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("texts", KNOWN_MARKS)
def test_each_known_pair_of_marks_separates_the_reasoning(texts: MarkTexts, special: bool) -> None:
    tokenizer = thinking_tokenizer(texts, special=special)
    answer = generate(NEITHER, texts.open, "hm", texts.close, "yes", tokenizer=tokenizer)
    assert (answer.reasoning, answer.text, answer.reasoning_tokens) == ("hm", "yes", 4)


@pytest.mark.parametrize(
    ("texts", "reasoning"),
    [
        (("thought", "\n", "hm"), "hm"),
        (("thought\nhm",), "hm"),
        ((), ""),
        (("a thought",), "a thought"),
        (("thought", "ful"), "thoughtful"),
        (("though", "ts"), "thoughts"),
    ],
)
def test_label_of_the_reasoning_is_no_part_of_it(texts: tuple[str, ...], reasoning: str) -> None:
    marks = KNOWN_MARKS[-1]
    assert marks.label == "thought\n"
    tokenizer = thinking_tokenizer(marks)
    tokenizer.add_tokens(list(texts))
    answer = generate(NEITHER, marks.open, *texts, marks.close, "yes", tokenizer=tokenizer)
    assert (answer.reasoning, answer.text) == (reasoning, "yes")


def test_template_names_a_pair_by_either_mark() -> None:
    assert find_named_marks("{{ '[/THINK]' }}<think>") == KNOWN_MARKS[:2]
    assert not find_named_marks("{{ messages }} THINK")
