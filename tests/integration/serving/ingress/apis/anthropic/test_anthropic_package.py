"""Tests with the unmodified `anthropic` client, and a scripted generator behind a real server.

The client does not validate answers, so its program does, with the client's own types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.errors import EngineFailed
from deployments.messages import Chat, FinishReason, GenerationCall
from tests.support.client_environment import run_client
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.generators import ScriptedGeneratorClient, ScriptedReply
from tests.support.http_server import serve_http
from tests.support.in_process import InProcess
from tests.support.messages_harness import CALL, MESSAGES_BODY, WEATHER

BODY = {**MESSAGES_BODY, "model": DECODER}
# The text of a question selects the reply to it.
BROKEN, STOPPED = "break", "stop"


def reply(call: GenerationCall) -> ScriptedReply:
    assert isinstance(call.prompt, Chat)
    *_, last = call.prompt.messages
    if last["role"] == "tool":
        return ScriptedReply((f"It is {last['content']}.",))
    if call.prompt.tools:
        return ScriptedReply((f"<tool_call>{CALL}</tool_call>",), reasoning=("Hm",))
    if last["content"] == BROKEN:
        return ScriptedReply(breaks=EngineFailed("broken"))
    if last["content"] == STOPPED:
        return ScriptedReply(reason=FinishReason.STOP, stop="###")
    return ScriptedReply()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("messages")
    seal_tiny_decoder(store)
    server = InProcess(store, models=(DECODER,), generator=ScriptedGeneratorClient(reply))
    with serve_http(server) as running:
        yield running.url


def ask(url: str, method: str, **changes: Any) -> Any:
    return run_client("anthropic_messages.py", url, method, json.dumps({**BODY, **changes}))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_client_reads_a_message(url: str) -> None:
    message = ask(f"{url}/models/{DECODER}", "create", system="Be brief.", model="-")
    assert message["content"][0]["text"] == "Hello"
    assert (message["stop_reason"], message["model"]) == ("end_turn", DECODER)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 6


def test_client_reads_events(url: str) -> None:
    events = ask(url, "events", messages=user(STOPPED), stop_sequences=["###"])
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_sequence"] == "###"


@pytest.mark.parametrize("method", ["create", "stream"])
def test_client_reads_thinking_and_a_call(url: str, method: str) -> None:
    answer = ask(url, method, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024})
    message = answer if method == "create" else answer["message"]
    thinking, use = message["content"]
    assert (thinking["thinking"], thinking["signature"]) == ("Hm", "")
    assert (use["name"], use["input"]) == ("weather", {"city": "Rome"})
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 1}


def test_client_collects_a_streamed_text(url: str) -> None:
    answer = ask(url, "stream")
    assert answer["text"] == answer["message"]["content"][0]["text"] == "Hello"
    assert answer["message"]["stop_reason"] == "end_turn"


def test_client_runs_tools_until_the_answer(url: str) -> None:
    *_, last = ask(url, "run_tools")
    assert last["content"][0]["text"] == "It is Sunny in Rome."


def test_client_counts_tokens(url: str) -> None:
    body = {key: value for key, value in BODY.items() if key != "max_tokens"}
    counted = run_client("anthropic_messages.py", url, "count_tokens", json.dumps(body))
    assert counted == {"input_tokens": 4}


@pytest.mark.parametrize(
    ("method", "changes", "error"),
    [
        (
            "create",
            {"max_tokens": 0},
            ("BadRequestError", "invalid_request_error", "invalid_field"),
        ),
        ("events", {"model": "no/such"}, ("NotFoundError", "not_found_error", "model_not_found")),
        (
            "create",
            {"messages": user(BROKEN)},
            ("InternalServerError", "api_error", "engine_failed"),
        ),
        ("events", {"messages": user(BROKEN)}, ("APIStatusError", "api_error", "engine_failed")),
    ],
)
def test_client_raises_its_exceptions(
    url: str, method: str, changes: dict[str, Any], error: tuple[str, ...]
) -> None:
    assert tuple(ask(url, method, **changes).values()) == error
