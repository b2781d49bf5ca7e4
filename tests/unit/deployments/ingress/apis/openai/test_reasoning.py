"""The reasoning of thinking models in chats: `reasoning_content`, its tokens, earlier messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.messages import Chat, FinishReason, count_prompt
from tests.support.chat_harness import CHAT, CHAT_BODY, USER, ChatHarness
from tests.support.generators import ScriptedReply
from tests.unit.deployments.ingress.apis.openai.test_tool_calls import CALL, TOOLS

THINKING = ScriptedReply(reasoning=("\n", " Let", " me\n", "\n", " see. \n"))
REASONING = "Let me\n\n see."


def chat(store: Path, reply: ScriptedReply = THINKING) -> ChatHarness:
    return ChatHarness(store, lambda call: reply)


async def test_message_has_the_reasoning_beside_its_content(writing_store: Path) -> None:
    body = (await chat(writing_store).post(CHAT, CHAT_BODY)).json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": REASONING,
    }
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


async def test_stream_sends_the_reasoning_before_the_content(writing_store: Path) -> None:
    body = {**CHAT_BODY, "stream_options": {"include_usage": True}}
    *events, last = await chat(writing_store).events(CHAT, body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let"},
        {"reasoning_content": " me"},
        {"reasoning_content": "\n\n see."},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_blank_reasoning_is_left_out(writing_store: Path) -> None:
    harness = chat(writing_store, ScriptedReply(reasoning=("\n", "\n")))
    (choice,) = (await harness.post(CHAT, CHAT_BODY)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    deltas = [event["choices"][0]["delta"] for event in await harness.events(CHAT, CHAT_BODY)]
    assert not any("reasoning_content" in delta for delta in deltas)


async def test_answer_cut_within_the_reasoning_has_no_content(writing_store: Path) -> None:
    reply = ScriptedReply((), reasoning=("Hm",), reason=FinishReason.LENGTH)
    (choice,) = (await chat(writing_store, reply).post(CHAT, CHAT_BODY)).json()["choices"]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "Hm"
    assert choice["finish_reason"] == "length"


async def test_logprobs_are_those_of_the_content(writing_store: Path) -> None:
    harness = chat(writing_store)
    body = {**CHAT_BODY, "logprobs": True}
    (choice,) = (await harness.post(CHAT, body)).json()["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["Hel", "lo"]
    events = [event["choices"][0] for event in await harness.events(CHAT, body)]
    sent = [[each["token"] for each in e["logprobs"]["content"]] for e in events if e["logprobs"]]
    assert sent == [["Hel"], ["lo"]]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tool_call_follows_the_reasoning(choice: str, writing_store: Path) -> None:
    quoted = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    harness = chat(writing_store, ScriptedReply((CALL,), reasoning=(quoted, "\n")))
    body = {**TOOLS, "tool_choice": choice}
    (answer,) = (await harness.post(CHAT, body)).json()["choices"]
    assert answer["message"]["reasoning_content"] == quoted
    assert not answer["message"]["content"]
    assert len(answer["message"]["tool_calls"]) == 1
    assert answer["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in await harness.events(CHAT, body)]
    assert [key for delta in deltas[1:] for key in delta] == ["reasoning_content", "tool_calls"]


@pytest.mark.parametrize(
    "sent",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"reasoning_content": None, "reasoning": "Hm."},
    ],
)
@pytest.mark.parametrize("content", ["Yes.", "", None])
async def test_template_receives_the_reasoning_of_earlier_messages(
    content: str | None, sent: dict[str, Any], writing_store: Path
) -> None:
    harness = chat(writing_store)
    messages = [USER, {"role": "assistant", "content": content, **sent}, USER]
    assert (await harness.post(CHAT, {"messages": messages})).status_code == 200
    assert isinstance(harness.call.prompt, Chat)
    answer = {"role": "assistant", "content": content or "", "reasoning_content": "Hm."}
    assert harness.call.prompt.messages == (USER, answer, USER)


async def test_reasoning_of_other_roles_and_blank_reasoning_are_ignored(
    writing_store: Path,
) -> None:
    harness = chat(writing_store)
    messages = [
        {**USER, "reasoning_content": "Hm."},
        {**USER, "reasoning_content": 5, "reasoning": {"effort": "low"}},
        {"role": "assistant", "content": "Yes.", "reasoning_content": ""},
        {"role": "assistant", "content": "Yes.", "reasoning_content": None, "reasoning": None},
    ]
    assert (await harness.post(CHAT, {"messages": messages})).status_code == 200
    assert isinstance(harness.call.prompt, Chat)
    assert not any("reasoning_content" in message for message in harness.call.prompt.messages)


async def test_our_form_of_the_reasoning_may_be_asked_for(writing_store: Path) -> None:
    for format_ in ("auto", "deepseek"):
        form = {"include_reasoning": True, "separate_reasoning": True, "reasoning_format": format_}
        response = await chat(writing_store).post(CHAT, {**CHAT_BODY, **form})
        assert response.json()["choices"][0]["message"]["reasoning_content"] == REASONING


def test_reasoning_counts_towards_the_size_of_a_prompt() -> None:
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert count_prompt(Chat((answer,))) == len("Yes.Hm.")
