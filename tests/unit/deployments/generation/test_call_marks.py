"""Marks of tool calls that are special tokens: text for requests with tools only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from deployments.engines.decoder import DecoderInfo
from deployments.generation.call_marks import find_call_marks
from deployments.generation.preparation import RequestPreparer
from deployments.ingress.apis.openai.tool_calls import ToolCallParser
from deployments.messages import Chat, GenerationCall, GenerationOptions, Prompt
from deployments.registry import ModelRegistry
from deployments.tokenization.encodings import open_tokenizer
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.fakes import far_deadline
from tests.support.scheduler_harness import GREEDY

MARKS = ("<|tool_call_start|>", "<|tool_call_end|>", "<|other|>", "[ARGS]")
TOOL = {"type": "function", "function": {"name": "now"}}
HELLO = Chat(({"role": "user", "content": "hello"},))


def generate(
    store: Path,
    prompt: Prompt,
    *,
    stop: tuple[str, ...] = (),
    ordinary: tuple[str, ...] = (),
) -> tuple[str, list[bool]]:
    """Return the text of an answer with all MARKS, and whether its tokens are special.

    The marks `ordinary` are no special tokens of the tokenizer.
    """
    added_tokens = [AddedToken(mark, special=mark not in ordinary) for mark in MARKS]
    seal_tiny_decoder(store, added_tokens=added_tokens)
    model = ModelRegistry(store, ()).find(DECODER)
    info = DecoderInfo("cpu-fake", 2, 90, model.manifest.output_width)
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=20, logprobs=0, stop=stop)
    preparer = RequestPreparer(model, info)
    job = preparer.build_job(GenerationCall(model.ref, prompt, options, far_deadline()), None)
    tokenizer = open_tokenizer(model.directory)
    text, special = "", []
    for token in tokenizer.encode("a<|tool_call_start|>b<|other|>[ARGS]<|tool_call_end|>c").ids:
        logits = np.zeros((1, info.vocabulary), np.float32)
        logits[0, token] = 9
        chunk = job.accept_logits(logits).chunk
        assert chunk is not None
        text += chunk.text
        special += [each.special for each in chunk.tokens]
        if chunk.finished is not None:
            break
    return text, special


@pytest.mark.parametrize("ordinary", [(), MARKS[:1]])
def test_marks_are_text_in_one_form(ordinary: tuple[str, ...], tmp_path: Path) -> None:
    text, special = generate(tmp_path, HELLO._replace(tools=(TOOL,)), ordinary=ordinary)
    assert text == "a<tool_call>b[ARGS]</tool_call>c"
    assert special == [False, True, False, True, True, True, False]


@pytest.mark.parametrize("prompt", [HELLO, "hello"])
def test_answers_without_tools_omit_special_tokens(prompt: Prompt, tmp_path: Path) -> None:
    text, special = generate(tmp_path, prompt)
    assert text == "abc"
    assert special == [False, True, False, True, True, True, False]


def test_mark_may_be_a_stop_string(tmp_path: Path) -> None:
    text, _ = generate(tmp_path, HELLO._replace(tools=(TOOL,)), stop=("<|tool_call_end|>",))
    assert text == "a<tool_call>b[ARGS]"


def test_stop_strings_are_not_found_in_marks(tmp_path: Path) -> None:
    text, _ = generate(tmp_path, HELLO._replace(tools=(TOOL,)), stop=("<", "[ARGS", "b["))
    assert text == "a<tool_call>b[ARGS]</tool_call>c"


ROME = '{"city": "Rome"}'


@pytest.mark.parametrize(
    "pieces",
    [
        ("<|START_ACTION|>", f'[{{"tool_name": "now", "parameters": {ROME}}}]', "<|END_ACTION|>"),
        ("<TOOLCALL>", f'[{{"name": "now", "arguments": {ROME}}}]', "</TOOLCALL>"),
        ("<|tool_call_start|>", '[now(city="Rome")]', "<|tool_call_end|>"),
        (
            *(
                "<\uff5ctool\u2581calls\u2581begin\uff5c>",
                "<\uff5ctool\u2581call\u2581begin\uff5c>",
            ),
            *("now", "<\uff5ctool\u2581sep\uff5c>", ROME),
            *("<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        ),
    ],
    ids=lambda pieces: pieces[0],
)
def test_calls_of_other_models_are_found_by_their_marks(pieces: tuple[str, ...]) -> None:
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=pieces[0]))
    marks = find_call_marks(tokenizer, special_tokens=())
    text = "I look." + "".join(marks.get(vocabulary[piece], piece) for piece in pieces)
    parsed = ToolCallParser(frozenset({"now"})).parse_tool_calls(text)
    assert text[parsed.start : parsed.end] == "I look."
    (call,) = parsed.calls
    assert (call.name, orjson.loads(call.arguments)) == ("now", {"city": "Rome"})
