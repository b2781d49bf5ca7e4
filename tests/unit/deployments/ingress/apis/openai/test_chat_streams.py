from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.config import IngressUserConfig
from deployments.errors import EngineFailed, InputTooLong
from deployments.messages import FinishReason
from tests.support.asgi_client import AsgiClient
from tests.support.chat_harness import (
    CHAT,
    CHAT_BODY,
    ChatHarness,
    events_in,
)
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import wait_until
from tests.support.generators import COMPUTE_TYPE, ScriptedReply

STREAM = {**CHAT_BODY, "stream": True}


def only(events: list[Any], key: str) -> list[Any]:
    """Return the value of `key` of the single choice of each event."""
    return [event["choices"][0][key] for event in events]


async def test_stream_has_role_deltas_and_finish_reason(writing_store: Path) -> None:
    events = await ChatHarness(writing_store).events(CHAT, CHAT_BODY)
    assert only(events, "delta") == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert only(events, "finish_reason") == [None, None, None, "stop"]
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert event["model"] == DECODER
        assert event["id"] == events[0]["id"]
        assert event["created"] == events[0]["created"]
        assert event["system_fingerprint"]
        assert "usage" not in event


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_stream_has_usage_only_if_requested(options: Any, writing_store: Path) -> None:
    events = await ChatHarness(writing_store).events(CHAT, {**CHAT_BODY, "stream_options": options})
    assert all("usage" not in event for event in events)


async def test_stream_usage_is_last_and_null_before(writing_store: Path) -> None:
    body = {**CHAT_BODY, "stream_options": {"include_usage": True}, "n": 2}
    *events, last = await ChatHarness(writing_store).events(CHAT, body)
    assert [event["usage"] for event in events] == [None] * len(events)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert last["timings"] == {
        "tokenize_ms": 0.5,
        "queue_ms": 1.0,
        "prefill_ms": 2.0,
        "decode_ms": 3.0,
    }


async def test_stream_headers_have_compute_type_and_revision(writing_store: Path) -> None:
    headers = (await ChatHarness(writing_store).post(CHAT, STREAM)).headers
    assert headers["x-compute-type"] == COMPUTE_TYPE
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


async def test_stream_choices_have_an_index(writing_store: Path) -> None:
    def reply_to(call: Any) -> ScriptedReply:
        seed = call.options.sampling.seed
        reason = FinishReason.LENGTH if seed == 6 else FinishReason.END
        return ScriptedReply((f"a{seed}", "b"), reason)

    events = await ChatHarness(writing_store, reply_to).events(
        CHAT, {**CHAT_BODY, "n": 2, "seed": 5}
    )
    texts, ends = {0: "", 1: ""}, {}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "a5b", 1: "a6b"}
    assert ends == {0: "stop", 1: "length"}


async def test_stream_logprobs_belong_to_their_deltas(writing_store: Path) -> None:
    body = {**CHAT_BODY, "logprobs": True, "top_logprobs": 2}
    events = await ChatHarness(writing_store).events(CHAT, body)
    result = [one["content"] for one in only(events, "logprobs") if one]
    assert [[token["token"] for token in content] for content in result] == [["Hel"], ["lo"]]
    assert [len(token["top_logprobs"]) for content in result for token in content] == [2, 2]


async def test_error_before_the_first_token_sets_the_status(writing_store: Path) -> None:
    error = InputTooLong("`prompt` has 900 tokens, the model reads 256", field="prompt")
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(refusal=error))
    response = await harness.post(CHAT, STREAM)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert response.json()["error"]["message"].startswith("`messages` has 900 tokens")
    assert "content-length" in response.headers


async def test_error_within_a_stream_is_the_last_event(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(breaks=EngineFailed("broken")))
    response = await harness.post(CHAT, STREAM)
    assert response.status_code == 200
    *arguments, last = events_in(response.content)
    assert (
        "".join(only(arguments, "delta")[i].get("content", "") for i in range(len(arguments)))
        == "Hello"
    )
    error = {"message": "broken", "type": "server_error", "param": None, "code": "engine_failed"}
    assert last == {"error": error}
    assert [record.status for record in harness.in_process.recorder.records] == [500]


async def test_client_disconnect_frees_slots(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(hangs=True))
    async with harness.in_process.application() as app:
        client = AsgiClient(app, CHAT, {**STREAM, "n": 3})
        await client.wait_for_text('"content":"lo"')
        assert harness.generator.open == 3
        client.disconnect()
        await client.task
    assert harness.generator.open == 0
    assert [record.status for record in harness.in_process.recorder.records] == [499]


async def test_cancelled_handler_frees_slots(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(hangs=True))
    async with harness.in_process.application() as app:
        for body in (STREAM, CHAT_BODY):
            client = AsgiClient(app, CHAT, {**body, "n": 2})
            await wait_until(lambda: harness.generator.open == 2)
            client.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client.task
            assert harness.generator.open == 0
    assert [record.status for record in harness.in_process.recorder.records] == [499, 499]


async def test_slow_reader_frees_slots(writing_store: Path) -> None:
    settings = IngressUserConfig(stream_write_timeout_s=0.5, stream_buffer_tokens=100)
    endless = ScriptedReply(("word ",) * 10_000)
    harness = ChatHarness(writing_store, lambda call: endless, settings)
    async with harness.in_process.application() as app:
        client = AsgiClient(app, CHAT, STREAM, max_messages=3)
        await client.task
    assert harness.generator.open == 0
    assert harness.generator.events_read < 1_000
    assert [record.status for record in harness.in_process.recorder.records] == [504]


async def test_finished_stream_is_recorded_once(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    await harness.post(CHAT, STREAM)
    (record,) = harness.in_process.recorder.records
    assert (record.status, record.task, record.compute) == (200, "text-generation", COMPUTE_TYPE)
    assert record.timings.tokens == 7
