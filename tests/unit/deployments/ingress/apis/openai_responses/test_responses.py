"""Whole responses of the Responses API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.messages import FinishReason
from tests.support.decoder_artifacts import DECODER
from tests.support.responses_harness import CALL, QUESTION, WEATHER, respond, script_responses

REASONING = ("\n", " Let", " me", " see. \n")


def without_ids(items: list[Any]) -> list[Any]:
    """Drop the random ids of items, after a check of their prefixes."""
    prefixes = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
    for item in items:
        assert item.pop("id").startswith(prefixes[item["type"]])
    return items


def message_item(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


def reasoning_item(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "status": status, "summary": [], "content": [part]}


async def test_response_has_a_message_and_its_usage(writing_store: Path) -> None:
    body = await respond(script_responses(writing_store), QUESTION)
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", DECODER)
    assert body["completed_at"] >= body["created_at"]
    assert without_ids(body["output"]) == [message_item("Hello")]
    assert body["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


async def test_response_repeats_the_fields_of_the_request(writing_store: Path) -> None:
    sent = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "tools": [WEATHER],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_object"}},
        "metadata": {"run": "7"},
        "user": "ada",
        "truncation": "disabled",
    }
    body = await respond(script_responses(writing_store), {**QUESTION, **sent})
    assert {name: body[name] for name in sent} == sent


async def test_top_p_of_zero_is_repeated(writing_store: Path) -> None:
    body = await respond(script_responses(writing_store), {**QUESTION, "top_p": 0})
    assert body["top_p"] == 0


async def test_omitted_fields_have_the_values_that_apply(writing_store: Path) -> None:
    body = await respond(script_responses(writing_store), QUESTION)
    expected: dict[str, Any] = {
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
        "metadata": {},
        "truncation": "disabled",
    }
    assert {name: body[name] for name in expected} == expected


async def test_no_response_is_stored_whatever_the_request_asks(writing_store: Path) -> None:
    for store in (True, False, None):
        body = await respond(script_responses(writing_store), {**QUESTION, "store": store})
        assert body["store"] is False


async def test_answer_that_is_cut_is_incomplete(writing_store: Path) -> None:
    harness = script_responses(writing_store, reason=FinishReason.LENGTH)
    body = await respond(harness, QUESTION)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "completed_at" not in body
    assert without_ids(body["output"]) == [message_item("Hello", "incomplete")]


async def test_empty_answer_is_an_empty_message(writing_store: Path) -> None:
    body = await respond(script_responses(writing_store, ""), QUESTION)
    assert without_ids(body["output"]) == [message_item("")]


async def test_reasoning_is_an_item_before_the_message(writing_store: Path) -> None:
    body = await respond(script_responses(writing_store, reasoning=REASONING), QUESTION)
    assert without_ids(body["output"]) == [reasoning_item("Let me see."), message_item("Hello")]
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


async def test_answer_that_is_cut_within_the_reasoning_has_no_message(writing_store: Path) -> None:
    harness = script_responses(writing_store, "", reasoning=("Hm",), reason=FinishReason.LENGTH)
    body = await respond(harness, QUESTION)
    assert body["status"] == "incomplete"
    assert without_ids(body["output"]) == [reasoning_item("Hm", "incomplete")]


async def test_call_is_an_item_whose_call_id_templates_accept(writing_store: Path) -> None:
    harness = script_responses(writing_store, CALL, reasoning=REASONING)
    body = await respond(harness, {**QUESTION, "tools": [WEATHER]})
    reasoning, call = without_ids(body["output"])
    assert body["status"] == "completed"
    assert reasoning == reasoning_item("Let me see.")
    assert len(call.pop("call_id")) == 9, "the form that Mistral's templates accept"
    assert call == {
        "type": "function_call",
        "status": "completed",
        "name": "weather",
        "arguments": '{"city": "Rome"}',
    }


async def test_calls_follow_the_text_before_them(writing_store: Path) -> None:
    text = f"I look.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    body = await respond(script_responses(writing_store, text), {**QUESTION, "tools": [WEATHER]})
    message, *calls = without_ids(body["output"])
    assert message == message_item("I look.")
    assert [call["type"] for call in calls] == ["function_call"] * 2
    assert calls[0]["call_id"] != calls[1]["call_id"]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_forced_call_that_is_cut_is_incomplete(
    reason: FinishReason, writing_store: Path
) -> None:
    harness = script_responses(writing_store, CALL[:-5], reason=reason)
    sent = {**QUESTION, "tools": [WEATHER], "tool_choice": "required"}
    body = await respond(harness, sent)
    (call,) = body["output"]
    assert (body["status"], call["status"]) == ("incomplete", "incomplete")
    assert call["arguments"] == '{"city": "Ro'


async def test_calls_before_the_one_that_is_cut_are_complete(writing_store: Path) -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL[:-5]}"
    harness = script_responses(writing_store, text, reason=FinishReason.LENGTH)
    body = await respond(harness, {**QUESTION, "tools": [WEATHER]})
    assert body["status"] == "incomplete"
    assert [(call["status"], call["arguments"]) for call in body["output"]] == [
        ("completed", '{"city": "Rome"}'),
        ("incomplete", '{"city": "Ro'),
    ]


async def test_logprobs_are_parts_of_the_text(writing_store: Path) -> None:
    sent = {**QUESTION, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    body = await respond(script_responses(writing_store, reasoning=REASONING), sent)
    (part,) = body["output"][1]["content"]
    assert [token["token"] for token in part["logprobs"]] == ["Hel", "lo"]
    assert part["logprobs"][0]["top_logprobs"][0]["token"] == "alt0"
    assert body["top_logprobs"] == 1


async def test_tokens_of_a_call_have_no_logprobs(writing_store: Path) -> None:
    pieces = ("I look", ".", "\n", f"<tool_call>{CALL}</tool_call>")
    sent = {**QUESTION, "tools": [WEATHER], "top_logprobs": 1}
    body = await respond(script_responses(writing_store, *pieces), sent)
    (part,) = body["output"][0]["content"]
    assert [token["token"] for token in part["logprobs"]] == ["I look", "."]


async def test_model_may_be_named_by_the_path(writing_store: Path) -> None:
    harness = script_responses(writing_store)
    reply = await harness.post(f"/models/{DECODER}/v1/responses", {**QUESTION, "model": "no/such"})
    assert reply.json()["model"] == DECODER
    assert reply.headers["x-compute-type"] == "cpu-fake"
    assert "x-sha" in reply.headers


@pytest.mark.parametrize("base", ["", f"/models/{DECODER}"])
@pytest.mark.parametrize(
    ("method", "below"),
    [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")],
)
async def test_routes_of_stored_responses_tell_that_nothing_is_stored(
    base: str, method: str, below: str, writing_store: Path
) -> None:
    async with script_responses(writing_store).in_process.client() as http:
        reply = await http.request(method, f"{base}/v1/responses/resp_1{below}")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "response_not_found")
    assert "send the whole conversation in `input`" in error["message"]


@pytest.mark.parametrize("base", ["", f"/models/{DECODER}"])
async def test_compaction_is_refused_with_advice(base: str, writing_store: Path) -> None:
    harness = script_responses(writing_store)
    reply = await harness.post(f"{base}/v1/responses/compact", QUESTION)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "compaction_unsupported")
    assert "leave the oldest items out of `input`" in error["message"]


async def test_tokens_of_the_prompt_are_counted(writing_store: Path) -> None:
    harness = script_responses(writing_store)
    sent = {**QUESTION, "instructions": "Be brief.", "tools": [WEATHER]}
    path = f"/models/{DECODER}/v1/responses/input_tokens"
    reply = (await harness.post(path, sent)).json()
    counted = harness.call.prompt
    response = await respond(harness, sent)
    assert counted == harness.call.prompt
    assert reply == {
        "object": "response.input_tokens",
        "input_tokens": response["usage"]["input_tokens"],
    }


async def test_count_names_invalid_fields(writing_store: Path) -> None:
    path = "/v1/responses/input_tokens"
    reply = await script_responses(writing_store).post(path, {"previous_response_id": "resp_1"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "previous_response_id"
