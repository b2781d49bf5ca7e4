"""Answers in GPT-OSS's format are split into reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from deployments.generation.harmony import (
    CHANNEL,
    END,
    MESSAGE,
    START,
    TURN_ENDS,
    adapt_messages,
    adapt_tools,
    is_harmony,
)
from deployments.generation.harmony_splitter import HarmonySplitter, HarmonyTokens
from deployments.generation.job import ModelContext, SamplingJob
from deployments.ingress.apis.openai.tool_calls import FunctionCall, ToolCallParser
from deployments.messages import FinishReason, GenerationOptions
from tests.support.fakes import far_deadline
from tests.support.scheduler_harness import GREEDY
from tests.support.small_tokenizers import byte_level
from tests.unit.deployments.generation.test_reasoning import Digits, SplitAnswer, run_job, spell

(RETURN, CALL), CONSTRAIN = TURN_ENDS, "<|constrain|>"
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
    *texts: str,
    prompt: str = PROMPT,
    grammar: str | None = None,
    functions: Sequence[str] = ("measure", "go"),
    ends: Sequence[str] = TURN_ENDS,
    **options: Any,
) -> SplitAnswer:
    """Generate an answer of a model that prefers the tokens of `texts`, one after the other."""
    tokenizer = harmony_tokenizer()
    size = tokenizer.get_vocab_size()
    end_ids = tuple(tokenizer.token_to_id(end) for end in ends)
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
        ModelContext(tokenizer, size, end_ids, special, context=400),
        constraint,
        far_deadline(),
        HarmonySplitter.after_prompt(
            ids, marks, tokenizer, functions, is_constrained=grammar is not None
        ),
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
    assert TOOLS.parse_tool_calls(answer.text) == (0, 0, (FunctionCall("measure", arguments),))


def test_several_calls_follow_text() -> None:
    answer = generate(
        *message("commentary", "I measure."), *NEXT,
        *message("commentary to=functions.measure", '{"a":1}'), *NEXT,
        *message("commentary to=functions.go", "{}"), CALL,
    )  # fmt: skip
    _, end, calls = TOOLS.parse_tool_calls(answer.text)
    assert answer.text[:end] == "I measure."
    assert calls == (FunctionCall("measure", '{"a":1}'), FunctionCall("go", "{}"))


def test_call_may_be_cut() -> None:
    answer = generate(*message("commentary to=functions.go", '{"a": "bcd'), max_new_tokens=36)
    _, _, (call,) = TOOLS.parse_tool_calls(answer.text, is_cut=True)
    assert (call.name, call.is_complete) == ("go", False)
    assert '{"a": "bcd"}'.startswith(call.arguments)
    assert len(call.arguments) > 3


@pytest.mark.parametrize("channel", ["commentary to=browser.search", "analysis to=python code"])
def test_messages_to_other_recipients_are_reasoning(channel: str) -> None:
    answer = generate(*message(channel, "x=1"), *NEXT, *message("final", "Yes!"), RETURN)
    assert (answer.text, answer.reasoning) == ("Yes!", "x=1")


def test_texts_of_several_messages_are_apart() -> None:
    answer = generate(
        *message("analysis", "a"), *NEXT, *message("commentary", "One."), *NEXT,
        *message("analysis", "b"), *NEXT, *message("final", "Two."), RETURN,
    )  # fmt: skip
    assert (answer.text, answer.reasoning) == ("One.\n\nTwo.", "a\n\nb")


def test_message_to_a_function_that_is_not_offered_is_reasoning() -> None:
    """The model wrote no call of a form that clients know, so none is shown."""
    answer = generate(*message("commentary to=functions.go", "{}"), CALL, functions=["measure"])
    assert (answer.text, answer.reasoning) == ("", "{}")


@pytest.mark.parametrize("recipient", ["functions.web.search-2", "web.search-2"])
def test_names_may_have_dots(recipient: str) -> None:
    answer = generate(
        *message(f"commentary to={recipient}", "{}"), CALL, functions=["web.search-2"]
    )
    assert '"name": "web.search-2"' in answer.text


@pytest.mark.parametrize(
    ("texts", "text", "reasoning"),
    [
        (message(f"final{CONSTRAIN}json", "Yes!"), "Yes!", ""),
        (message(f"analysis{CONSTRAIN}text", "Hm."), "", "Hm."),
        (message("final to=user", "Yes!"), "Yes!", ""),
        # Invented messages of others.
        ((*message("final", "Yes!"), END, START, "user", MESSAGE, "More?"), "Yes!", "More?"),
        (
            (*message("final", "Yes!"), END, START, "f to=assistant", *message("a", "5")),
            "Yes!",
            "5",
        ),
        # Ends of messages and starts of headers that the model forgot.
        ((*message("analysis", "Hm."), *message("final", "Yes!")), "Yes!", "Hm."),
        ((*message("analysis", "Hm."), END, "final", MESSAGE, "Yes!"), "Yes!", "Hm."),
        ((*message("analysis", "Hm."), END), "", "Hm."),
        ((*message("final", "Yes!"), END, "analysis", MESSAGE, "Hm."), "Yes!", "Hm."),
        (("analysis", MESSAGE, "Hm."), "", "Hm."),
        ((CHANNEL, "analysis", *message("final", "Yes!")), "Yes!", ""),
        ((" to=functions.go",), "", ""),
        (("final answer",), "final answer", ""),
        (("to=5 is",), "to=5 is", ""),
    ],
)
def test_unusual_headers(texts: tuple[str, ...], text: str, reasoning: str) -> None:
    answer = generate(*texts, RETURN)
    assert (answer.text, answer.reasoning) == (text, reasoning)


def test_call_ends_at_its_token_even_if_that_does_not_end_the_answer() -> None:
    call = message("commentary to=functions.go", "{}")
    answer = generate(
        *call, CALL, START, "assistant", *message("final", "Yes!"), RETURN, ends=[RETURN]
    )
    assert answer.text == '<tool_call>{"name": "go", "arguments": {}}</tool_call>Yes!'


def test_no_stop_string_is_found_in_the_texts_of_marks() -> None:
    texts = (*message("commentary", "One."), *NEXT, *message("final", "Two."), RETURN)
    assert generate(*texts, stop=("\n\n", ".\n")).text == "One.\n\nTwo."
    assert generate(*texts, stop=("Two", "e.T")).text == "One.\n\n"
    call = (*message("commentary to=functions.go", '{"a":{}}'), CALL)
    assert TOOLS.parse_tool_calls(generate(*call, stop=("}}}", '"name"')).text).calls


def test_text_without_a_header_has_logprobs() -> None:
    answer = generate("to be", RETURN, logprobs=1)
    assert all(token.logprob is not None for token in answer.tokens)


def test_prompt_that_begins_a_call_is_answered_with_text() -> None:
    prompt = f"{PROMPT}{CHANNEL}commentary to=functions.go{MESSAGE}"
    assert generate('{"a":1}', CALL, prompt=prompt).text == '{"a":1}'


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


@pytest.mark.parametrize(
    "texts",
    [
        (*message("analysis", "ab"), RETURN, *NEXT, *message("final")),
        (*message("analysis", "ab"), *NEXT, *message("commentary to=functions.go", "{}")),
        message("final"),
        message(f"final{CONSTRAIN}json"),
        message("commentary to=functions.go", "{}", CALL),
        (" to=functions.go", CHANNEL, "commentary", MESSAGE, "{}", CALL),
        ("x" * 100,),
        (CHANNEL, "x" * 100),
        (RETURN,),
    ],
)
def test_grammar_describes_one_final_message(texts: tuple[str, ...]) -> None:
    """Whatever the model writes, it comes to the text after at most one message of reasoning."""
    answer = generate(*texts, "x" * 200, grammar="12", max_new_tokens=130)
    assert answer.reason is FinishReason.LENGTH
    assert answer.text == "1" * len(answer.text), "the first token that the grammar allows"
    assert 0 < answer.reasoning_tokens < 110
    assert answer.reasoning_tokens + len(answer.text) == 130


@pytest.mark.parametrize(
    ("opened", "texts"),
    [
        (f"{CHANNEL}commentary{MESSAGE}I look", ("ab", END)),
        (f"{CHANNEL}analysis{MESSAGE}Hm", ("ab", END)),
        (f"{CHANNEL}", ("final", MESSAGE)),
        (f"{CHANNEL}final{MESSAGE}", ()),
        (f"{CHANNEL}final{MESSAGE}Yes{END}", ()),
    ],
)
def test_prompt_may_open_a_message_before_a_grammar(opened: str, texts: tuple[str, ...]) -> None:
    answer = generate(*texts, "x" * 100, prompt=PROMPT + opened, grammar="1", max_new_tokens=40)
    assert answer.text == "1" * len(answer.text)
    assert len(answer.text) > 10


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
    assert is_harmony(f"{START}{{{{ role }}}}{CHANNEL}final{MESSAGE}{END}")
    assert not is_harmony("<|im_start|>{{ role }}")


def test_messages_have_the_fields_of_the_template() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name * 2} for name in "bac"]
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    user = {"role": "user", "content": "Hi"}
    adapted = list(adapt_messages([user, {**said, "tool_calls": calls}, *results, said, user]))
    first = {**said, "content": "", "thinking": "Hm.\n\nI look.", "tool_calls": calls[:1]}
    second = {"role": "assistant", "content": "", "tool_calls": calls[1:]}
    assert adapted == [
        user, first, results[1], second, results[0], results[2], said | {"thinking": "Hm."}, user,
    ]  # fmt: skip
    assert list(adapt_messages([user, said | {"tool_calls": calls[:1], "content": ""}])) == [
        user, said | {"tool_calls": calls[:1], "content": "", "thinking": "Hm."},
    ]  # fmt: skip


def test_tools_have_descriptions() -> None:
    described = {"type": "function", "function": {"name": "a", "description": "A."}}
    others = [{"function": {"name": "b"}}, {"function": {"name": "b", "description": None}}]
    *first, last = adapt_tools([*others, described])
    assert first == [{"function": {"name": "b", "description": ""}}] * 2
    assert last == described


@pytest.mark.parametrize("id_", [None, "same"])
def test_results_without_ids_of_their_own_follow_calls_in_order(id_: str | None) -> None:
    ids = {} if id_ is None else {"id": id_}
    calls = [{**ids, "function": {"name": name}} for name in "ab"]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": name} for name in "xyz"]
    if id_ is not None:
        results = [{**each, "tool_call_id": id_} for each in results]
    adapted = list(adapt_messages([said, *results]))
    assert [each["content"] for each in adapted] == ["", "x", "", "y", "z"]
