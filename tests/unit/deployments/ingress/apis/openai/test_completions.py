from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.errors import EngineFailed
from deployments.ingress.apis.openai.completions import build_top_logprobs, locate_tokens
from deployments.ingress.apis.openai.responses import AlignedTokens
from deployments.messages import (
    Chunk,
    Completion,
    Finished,
    FinishReason,
    GenerationCall,
    GenerationTimings,
    Started,
    Token,
    TopLogprob,
)
from tests.support.chat_harness import COMPLETIONS, ChatHarness, events_in
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import ScriptedReply

PROMPT = "Once upon a"
BODY = {"prompt": PROMPT}


async def test_completion_has_the_openai_format(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    body = (await harness.post(COMPLETIONS, BODY)).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("system_fingerprint")
    assert body == {
        "object": "text_completion",
        "model": DECODER,
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert harness.call.options.max_new_tokens == 16
    assert harness.call.prompt == PROMPT


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["a", [7]], ["a", (7,)]),
    ],
)
async def test_prompts_may_be_texts_or_token_ids(
    prompt: Any, prompts: list[Any], writing_store: Path
) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply((f"{call.prompt}!",)))
    body = (await harness.post(COMPLETIONS, {"prompt": prompt})).json()
    assert [call.prompt for call in harness.generator.calls] == prompts
    result = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert result == [(i, f"{one}!") for i, one in enumerate(prompts)]


async def test_choices_of_several_prompts_have_consecutive_indices(writing_store: Path) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        return ScriptedReply((f"{call.prompt}{call.options.sampling.seed}",))

    harness = ChatHarness(writing_store, reply_to)
    body = (await harness.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 1})).json()
    assert [choice["text"] for choice in body["choices"]] == ["a1", "a2", "b1", "b2"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2


async def test_best_of_returns_the_most_likely_and_counts_all(writing_store: Path) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        seed = call.options.sampling.seed or 0
        return ScriptedReply((f"s{seed}",), logprob=-1.0 if seed == 2 else -2.0)

    harness = ChatHarness(writing_store, reply_to)
    body = (await harness.post(COMPLETIONS, {**BODY, "best_of": 3, "seed": 0})).json()
    assert [choice["text"] for choice in body["choices"]] == ["s2"]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 6


async def test_logprobs_have_columns_with_offsets(writing_store: Path) -> None:
    body = (await ChatHarness(writing_store).post(COMPLETIONS, {**BODY, "logprobs": 1})).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Hel", "lo", ""],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"alt0": -1.5, "Hel": -0.5},
            {"alt0": -1.5, "lo": -0.5},
            {"alt0": -1.5, "": -0.5},
        ],
        "text_offset": [0, 3, 5],
    }


def test_alternatives_with_equal_texts_have_names_of_their_own() -> None:
    others = (
        TopLogprob(5, "日", -0.5, raw_bytes=b"\xa5"),
        TopLogprob(6, " \ufffd", -1.0, raw_bytes=b" \xe6"),
        TopLogprob(7, "\ufffd", -2.0, raw_bytes=b"\xe7"),
    )
    top = build_top_logprobs(Token(5, "日", -0.5, False, others, b"\xa5"))
    assert top == {"日": -0.5, "bytes: \\xe6": -1.0, "bytes:\\xe7": -2.0}


@pytest.mark.parametrize(
    ("prompt", "shown"), [(PROMPT, [PROMPT]), ([5, 6], ["<5><6>"]), (["a", "b"], ["a", "b"])]
)
async def test_echo_prepends_the_prompt(prompt: Any, shown: list[str], writing_store: Path) -> None:
    body = (
        await ChatHarness(writing_store).post(COMPLETIONS, {"prompt": prompt, "echo": True})
    ).json()
    assert [choice["text"] for choice in body["choices"]] == [f"{one}Hello" for one in shown]


async def test_echo_prepends_the_logprobs_of_the_prompt(writing_store: Path) -> None:
    body = {**BODY, "echo": True, "logprobs": 0}
    result = (await ChatHarness(writing_store).post(COMPLETIONS, body)).json()["choices"][0][
        "logprobs"
    ]
    assert result["tokens"] == ["Once", " upon", " a", "Hel", "lo", ""]
    assert result["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5, -0.5]
    assert result["text_offset"] == [0, 4, 9, 11, 14, 16]
    assert result["top_logprobs"][:2] == [None, {" upon": -1.0}]


def prompt_tokens(*names: str) -> tuple[Token, ...]:
    return tuple(Token(i, name, -1.0, name.startswith("<")) for i, name in enumerate(names))


CHAT_TOKENS = prompt_tokens("<|im_start|>", "user", "\n", "Say", " ok", "<|im_end|>", "\n")


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nSay ok<|im_end|>\n", [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_of_an_echo_find_the_tokens_in_the_text(
    prompt: Any, stream: bool, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(prompt=CHAT_TOKENS))
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    if stream:
        choices = [event["choices"][0] for event in await harness.events(COMPLETIONS, body)]
    else:
        choices = (await harness.post(COMPLETIONS, body)).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert text == "<|im_start|>user\nSay ok<|im_end|>\nHello"
    assert tokens == [*(token.text for token in CHAT_TOKENS), "Hel", "lo", ""]
    assert [text[at : at + len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens


@pytest.mark.parametrize(
    ("names", "text", "offsets"),
    [
        (("<s>", "a", " b"), "a b", [0, 0, 1]),  # the tokenizer adds <s>
        (("<s>", "a"), "<s>a", [0, 3]),
        (("<s>", "<s>", "a"), "<s>a", [0, 3, 3]),
        (("<|user|>", "a", "<|end|>", "b"), "<|user|>\na <|end|>\n b", [0, 9, 11, 20]),
        (("<s>", "", "日"), "日", [0, 0, 0]),
    ],
)
def test_only_special_tokens_in_the_text_take_space(
    names: tuple[str, ...], text: str, offsets: list[int]
) -> None:
    assert locate_tokens(prompt_tokens(*names), text) == offsets


@pytest.mark.parametrize("reason", FinishReason)
async def test_max_tokens_0_with_echo_scores_the_prompt(
    reason: FinishReason, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(("x",), reason))
    body = {**BODY, "echo": True, "logprobs": 0, "max_tokens": 0}
    response = (await harness.post(COMPLETIONS, body)).json()
    (choice,) = response["choices"]
    assert harness.call.options.max_new_tokens == 1
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["tokens"] == ["Once", " upon", " a"]
    assert choice["finish_reason"] == "length"
    assert (response["usage"]["completion_tokens"], response["usage"]["total_tokens"]) == (0, 3)


async def test_stream_of_several_prompts_has_all_choices(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply((f"{call.prompt}", "!")))
    body = {"prompt": ["a", "b"], "stream_options": {"include_usage": True}}
    *events, last = await harness.events(COMPLETIONS, body)
    texts, ends = {0: "", 1: ""}, {}
    for event in events:
        assert event["object"] == "text_completion"
        assert event["usage"] is None
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "a!", 1: "b!"}
    assert ends == {0: "stop", 1: "stop"}
    assert last["usage"]["total_tokens"] == 2 + 6


async def test_stream_with_echo_continues_offsets(writing_store: Path) -> None:
    body = {**BODY, "echo": True, "logprobs": 0}
    events = await ChatHarness(writing_store).events(COMPLETIONS, body)
    choices = [event["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == [PROMPT, "Hel", "lo", ""]
    offsets = [choice["logprobs"]["text_offset"] for choice in choices]
    assert offsets == [[0, 4, 9], [11], [14], [16]]


async def test_error_within_a_completion_stream_is_an_event(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(breaks=EngineFailed("broken")))
    response = await harness.post(COMPLETIONS, {**BODY, "stream": True})
    assert events_in(response.content)[-1]["error"]["code"] == "engine_failed"


async def test_stop_string_ends_the_text(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(reason=FinishReason.STOP))
    body = (await harness.post(COMPLETIONS, {**BODY, "stop": ["\n", "."]})).json()
    assert harness.call.options.stop == ("\n", ".")
    assert not harness.call.options.include_stop_string
    assert body["choices"][0]["finish_reason"] == "stop"


STOPPED = Completion(
    Started(1, 0, 7, "cpu"),
    "Hello",
    (Token(1, "Hel", -0.1), Token(2, "lo", -0.2), Token(3, "", -0.3), Token(4, "\n\n", -0.4)),
    Finished(FinishReason.STOP, 4, GenerationTimings()),
)


def test_logprobs_lack_the_tokens_of_a_stop_string() -> None:
    assert [token.text for token in AlignedTokens().take(STOPPED)] == ["Hel", "lo"]
    ended = STOPPED._replace(finished=STOPPED.finished._replace(reason=FinishReason.END))
    assert len(AlignedTokens().take(ended)) == 4


def test_stream_sends_tokens_with_their_text() -> None:
    aligned, tokens = AlignedTokens(), STOPPED.tokens
    parts = [
        Chunk("Hel", tokens[:1]),
        Chunk("", tokens[1:2]),  # held back: it may begin a stop string
        Chunk("lo", tokens[2:3]),
        Chunk("", tokens[3:], STOPPED.finished),
    ]
    taken = [[token.text for token in aligned.take(part)] for part in parts]
    assert taken == [["Hel"], [], ["lo"], []]


def test_chosen_special_token_has_one_name() -> None:
    token = Token(2, "", -0.1, True, (TopLogprob(2, "<|im_end|>", -0.1), TopLogprob(3, "a", -3)))
    assert build_top_logprobs(token) == {"": -0.1, "a": -3}
