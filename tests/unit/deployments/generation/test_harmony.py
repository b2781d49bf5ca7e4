"""Answers in GPT-OSS's format are split into reasoning, text and calls."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from deployments.generation.harmony import (
    CHANNEL,
    END,
    MESSAGE,
    START,
    HarmonySplitter,
    HarmonyTokens,
    is_harmony,
)
from deployments.generation.job import ModelContext, SamplingJob
from deployments.ingress.apis.openai.tools import FunctionCall, ToolCallParser
from deployments.messages import FinishReason, GenerationOptions
from tests.support.fakes import far_deadline
from tests.support.scheduler_harness import GREEDY
from tests.support.small_tokenizers import byte_level
from tests.unit.deployments.generation.test_reasoning import Digits, SplitAnswer, run_job, spell

RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
PROMPT = f"{START}user{MESSAGE}Hi{END}{START}assistant"
NEXT = (END, START, "assistant")
TOOLS = ToolCallParser(frozenset({"measure", "go"}))


def harmony_tokenizer() -> Tokenizer:
    tokenizer = byte_level()
    # START and END are part of the vocabulary.
    tokenizer.add_special_tokens([CHANNEL, MESSAGE, RETURN, CALL, CONSTRAIN])
    return tokenizer


def message(channel: str, *texts: str) -> tuple[str, ...]:
    return (CHANNEL, channel, MESSAGE, *texts)


def generate(
    *texts: str, prompt: str = PROMPT, grammar: str | None = None, **options: Any
) -> SplitAnswer:
    """Generate an answer of a model that prefers the tokens of `texts`, one after the other."""
    tokenizer = harmony_tokenizer()
    size = tokenizer.get_vocab_size()
    ends = (tokenizer.token_to_id(RETURN), tokenizer.token_to_id(CALL))
    special = frozenset(tokenizer.get_added_tokens_decoder())
    marks = HarmonyTokens.find(tokenizer, size)
    assert marks is not None
    constraint: Any = None
    if grammar is not None:
        constraint = Digits([token for c in grammar for token in spell(tokenizer, c)], size)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    job = SamplingJob(
        ids,
        GenerationOptions(**{"sampling": GREEDY, "max_new_tokens": 200, **options}),
        ModelContext(tokenizer, size, ends, special, context=400),
        constraint,
        far_deadline(),
        HarmonySplitter.after_prompt(ids, marks, tokenizer, is_constrained=grammar is not None),
    )
    return run_job(job, tokenizer, texts)


def test_channels_are_reasoning_and_text() -> None:
    texts = (*message("analysis", "Hm."), *NEXT, *message("final", "Yes!"))
    answer = generate(*texts, RETURN)
    assert (answer.text, answer.reasoning) == ("Yes!", "Hm.")
    assert answer.reason is FinishReason.END
    assert answer.reasoning_tokens == len(answer.tokens) - len("Yes!") - 1


def test_answer_may_have_no_reasoning() -> None:
    answer = generate(*message("final", "Yes!"), RETURN)
    assert (answer.text, answer.reasoning) == ("Yes!", "")


def test_prompt_may_begin_the_text() -> None:
    answer = generate("Yes!", RETURN, prompt=f"{PROMPT}{CHANNEL}final{MESSAGE}")
    assert (answer.text, answer.reasoning_tokens) == ("Yes!", 0)
    cut = generate(
        "m.",
        *NEXT,
        *message("final", "Yes!"),
        RETURN,
        prompt=PROMPT + CHANNEL + "analysis" + MESSAGE + "H",
    )
    assert (cut.text, cut.reasoning) == ("Yes!", "m.")


def test_prompt_without_an_open_message_has_no_splitter() -> None:
    tokenizer = harmony_tokenizer()
    marks = HarmonyTokens.find(tokenizer, tokenizer.get_vocab_size())
    assert marks is not None
    assert HarmonySplitter.after_prompt([1, 2], marks, tokenizer, is_constrained=False) is None


@pytest.mark.parametrize(
    "header",
    [
        (CHANNEL, "commentary to=functions.measure ", CONSTRAIN, "json"),
        (CHANNEL, "commentary to=functions.measure"),
        (" to=functions.measure", CHANNEL, "commentary ", CONSTRAIN, "json"),
        (CHANNEL, "analysis to=functions.measure code"),
    ],
)
@pytest.mark.parametrize(("written", "arguments"), [('{"a": [1]}', '{"a": [1]}'), ("", "{}")])
def test_message_to_a_function_is_a_call(
    header: tuple[str, ...], written: str, arguments: str
) -> None:
    answer = generate(*message("analysis", "Hm."), *NEXT, *header, MESSAGE, written, CALL)
    assert answer.reasoning == "Hm."
    assert TOOLS.parse_tool_calls(answer.text) == (0, (FunctionCall("measure", arguments),))


def test_several_calls_follow_text() -> None:
    answer = generate(
        *message("commentary", "I measure."), *NEXT,
        *message("commentary to=functions.measure", '{"a":1}'), *NEXT,
        *message("commentary to=functions.go", "{}"), CALL,
    )  # fmt: skip
    end, calls = TOOLS.parse_tool_calls(answer.text)
    assert answer.text[:end] == "I measure."
    assert calls == (FunctionCall("measure", '{"a":1}'), FunctionCall("go", "{}"))


def test_call_may_be_cut() -> None:
    answer = generate(*message("commentary to=functions.go", '{"a": "bcd'), max_new_tokens=36)
    _, (call,) = TOOLS.parse_tool_calls(answer.text, is_cut=True)
    assert (call.name, call.is_complete) == ("go", False)
    assert '{"a": "bcd"}'.startswith(call.arguments)
    assert len(call.arguments) > 3


@pytest.mark.parametrize("channel", ["commentary to=browser.search", "analysis to=python code"])
def test_messages_to_other_recipients_are_reasoning(channel: str) -> None:
    answer = generate(*message(channel, "x=1"), *NEXT, *message("final", "Yes!"), RETURN)
    assert (answer.text, answer.reasoning) == ("Yes!", "x=1")


def test_texts_of_several_messages_are_apart() -> None:
    answer = generate(*message("commentary", "One."), *NEXT, *message("final", "Two."), RETURN)
    assert answer.text == "One.\n\nTwo."


@pytest.mark.parametrize("text", ["Yes!", "to be", "tomorrow", " ok", "assistants", "2"])
def test_text_without_a_header_is_text(text: str) -> None:
    answer = generate(text, RETURN)
    assert (answer.text, answer.reasoning_tokens) == (text, 0)


def test_endless_header_is_text() -> None:
    answer = generate(CHANNEL, "x" * 100, RETURN)
    assert answer.text == "x" * 100


def test_answer_may_be_cut_within_a_header() -> None:
    answer = generate(*message("analysis", "Hm."), *NEXT, CHANNEL, "fi", max_new_tokens=25)
    assert (answer.text, answer.reasoning) == ("", "Hm.")
    assert answer.reason is FinishReason.LENGTH


def test_grammar_describes_the_final_text_only() -> None:
    hidden = (
        *message("analysis", "a"), RETURN, *NEXT, *message("commentary to=functions.go", "{}"),
        *NEXT, *message("final"),
    )  # fmt: skip
    count = sum(len(spell(harmony_tokenizer(), text)) for text in hidden)
    answer = generate(*hidden, "1", "2", grammar="12", max_new_tokens=count + 2)
    assert answer.text == "12"
    assert answer.reasoning_tokens == count, "a forbidden end token does not end the reasoning"
    assert answer.reasoning.startswith("a")
    assert answer.reasoning.endswith("{}")


def test_reasoning_and_headers_have_no_logprobs() -> None:
    answer = generate(
        *message("analysis", "Hm."), *NEXT, *message("final", "Yes!"), RETURN, logprobs=1
    )
    assert all((token.logprob is None) == token.reasoning for token in answer.tokens)


def test_vocabulary_needs_all_marks() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([START, END, CHANNEL])
    assert HarmonyTokens.find(tokenizer, 1_000) is None
    complete = harmony_tokenizer()
    last = complete.token_to_id(MESSAGE)
    assert HarmonyTokens.find(complete, last) is None, "the model cannot generate the mark"
    assert HarmonyTokens.find(complete, last + 1) is not None


def test_template_names_the_marks() -> None:
    assert is_harmony(f"{START}{{{{ role }}}}{CHANNEL}final{MESSAGE}")
    assert not is_harmony("<|im_start|>{{ role }}")
