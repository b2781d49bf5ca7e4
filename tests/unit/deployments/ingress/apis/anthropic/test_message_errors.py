"""Errors of `/v1/messages`: their format, and the names of the fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    InputTooLong,
    InvalidField,
    ModelUnavailable,
    Overloaded,
    ServeError,
)
from deployments.ingress.http.direct_requests import REQUEST_ID_KEY
from tests.support.chat_harness import CHAT, CHAT_BODY, USER, ChatHarness
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import ScriptedReply
from tests.support.keys import add_key
from tests.support.messages_harness import (
    COUNT,
    MESSAGES,
    MESSAGES_BODY,
    WEATHER,
    script_messages,
)

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}


async def fail(store: Path, path: str = MESSAGES, **changes: Any) -> tuple[int, str, str]:
    """Return the status, the error type and the message of the answer to a body with `changes`."""
    body = {key: value for key, value in {**MESSAGES_BODY, **changes}.items() if value is not None}
    response = await script_messages(store).post(path, body)
    parsed = response.json()
    assert parsed["type"] == "error"
    return response.status_code, parsed["error"]["type"], parsed["error"]["message"]


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}]}


def result(*blocks: Any) -> dict[str, Any]:
    return content({"type": "tool_result", "tool_use_id": "1", "content": list(blocks)})


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, {**WEATHER, **changes}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "Error in `max_tokens`: field required"),
        ({"max_tokens": 0}, "`max_tokens`: Input should be greater than or equal to 1"),
        ({"messages": []}, "`messages` is an empty list"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "`messages[0].role`: Input should be"),
        ({"messages": [{"role": "user"}]}, "Error in `messages[0].content`: field required"),
        ({"messages": [{"role": "user", "content": 5}]}, "`messages[0].content` must be a string"),
        (
            content({"type": "text", "text": "a"}, IMAGE),
            "`messages[1].content[1].type`: `image` is not supported; send blocks of the type",
        ),
        (content({"type": "document"}), "`messages[1].content[0].type`: `document` is not"),
        (content({}), "Error in `messages[1].content[0].type`: field required"),
        (content({"type": None}), "`messages[1].content[0].type`: Input should be 'text'"),
        (result(IMAGE), "`messages[1].content[0].content[0].type`: `image` is not supported"),
        (content(USE), "`messages[1].content[0].type` is `tool_use`; the role `user` may have"),
        (
            content({**USE, "input": "a"}, role="assistant"),
            "`messages[1].content[0].input` must be an object",
        ),
        ({"system": [IMAGE]}, "`system[0].type`: `image` is not supported"),
        (
            {"messages": [USER, {"role": "assistant", "content": "The"}]},
            "`messages` ends with a message of the role `assistant`, which this server does not",
        ),
        ({"temperature": 3}, "`temperature`: Input should be less than or equal to 2"),
        ({"stop_sequences": [""]}, "`stop_sequences[0]` is empty"),
        ({"stop_sequences": ["a"] * 17}, "`stop_sequences` may have up to 16 strings"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "`tools[0].type`: `web_search_20250305` is not supported; send tools with",
        ),
        (tool(type=5), "`tools[1].type`: Input should be 'custom'"),
        (tool(input_schema=None), "`tools[1].input_schema` must be an object"),
        (tool(name="a b"), "`tools[1].name`: String should match pattern"),
        ({"tools": [WEATHER] * 1_025}, "`tools`: List should have at most 1024 items"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` needs `tools`"),
        ({"tool_choice": {"type": "each"}}, "`tool_choice.type`: Input should be 'auto', 'any'"),
        (
            {**tool(), "tool_choice": {"type": "tool", "name": "clock"}},
            "`tool_choice.name` must be the name of one of the `tools`",
        ),
        ({"thinking": {"type": "deep"}}, "`thinking.type`: Input should be 'enabled', 'disabled'"),
        (
            {"thinking": {"type": "between_tools"}},
            "`thinking.type`: Input should be 'enabled', 'disabled' or 'adaptive'",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format.type`: Input"),
        ({"output_format": {"type": "json_schema"}}, "`output_format` is not supported; send `ou"),
        ({"options": {"priority": "high"}}, "`options.priority`"),
    ],
)
async def test_invalid_field_is_named(
    changes: dict[str, Any], message: str, writing_store: Path
) -> None:
    status, error_type, found = await fail(writing_store, **changes)
    assert (status, error_type) == (400, "invalid_request_error")
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"system": "a" * 101}, "system"),
        ({"messages": [USER, {"role": "user", "content": "a" * 101}]}, "messages[0].content"),
        (
            content(
                {"type": "tool_result", "tool_use_id": "1", "content": "a"},
                {"type": "tool_result", "tool_use_id": "2", "content": "a" * 101},
            ),
            "messages[1].content[1].content",
        ),
    ],
)
async def test_limit_of_a_text_names_it_in_the_body(
    changes: dict[str, Any], field: str, writing_store: Path
) -> None:
    limits = LimitSettings(item_chars=100)
    harness = ChatHarness(writing_store, settings=IngressUserConfig(limits=limits))
    response = await harness.post(MESSAGES, {**MESSAGES_BODY, **changes})
    assert response.status_code == 400
    assert f"`{field}` has " in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            InputTooLong(
                "`prompt` has 9 tokens. Shorten it or request truncation.", field="prompt"
            ),
            "prompt is too long: `messages` has 9 tokens. Shorten it.",
        ),
        (InvalidField("`grammar` is too costly", field="grammar"), "`tools` is too costly"),
        (InvalidField("`max_new_tokens` is 1", field="max_new_tokens"), "`max_tokens` is 1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_generator_name_fields_of_the_body(
    error: ServeError, message: str, stream: bool, writing_store: Path
) -> None:
    harness = script_messages(writing_store, refusal=error)
    body = {**MESSAGES_BODY, "tools": [WEATHER], "tool_choice": {"type": "any"}, "stream": stream}
    response = await harness.post(MESSAGES, body)
    assert response.json()["error"] == {
        "type": "invalid_request_error",
        "message": message,
        "details": {"error_code": error.code},
    }


async def test_grammar_of_an_answer_is_named_as_its_format(writing_store: Path) -> None:
    harness = script_messages(writing_store, refusal=InvalidField("`grammar`: no", field="grammar"))
    output = {"format": {"type": "json_schema", "schema": {}}}
    response = await harness.post(MESSAGES, {**MESSAGES_BODY, "output_config": output})
    assert response.json()["error"]["message"] == "`output_config.format`: no"


@pytest.mark.parametrize(
    ("error", "status", "error_type", "retry"),
    [
        (Overloaded("full"), 429, "rate_limit_error", "true"),
        (EngineFailed("broken"), 500, "api_error", "false"),
        (ModelUnavailable("failing"), 503, "overloaded_error", "true"),
        (DeadlineExceeded("late"), 504, "timeout_error", "false"),
    ],
)
async def test_type_of_an_error_follows_its_status(
    error: ServeError, status: int, error_type: str, retry: str, writing_store: Path
) -> None:
    response = await script_messages(writing_store, refusal=error).post(MESSAGES, MESSAGES_BODY)
    assert response.status_code == status
    assert response.headers["x-should-retry"] == retry
    assert response.json() == {
        "type": "error",
        "error": {
            "type": error_type,
            "message": error.message,
            "details": {"error_code": error.code},
        },
    }


async def post_with_id(harness: ChatHarness, path: str, body: Any) -> httpx.Response:
    """Send a request whose id is `abc`."""
    async with harness.in_process.application() as app:

        async def with_id(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, REQUEST_ID_KEY: b"abc"}, receive, send)

        transport = httpx.ASGITransport(with_id)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_error_has_the_id_of_its_request(stream: bool, writing_store: Path) -> None:
    harness = script_messages(writing_store, breaks=EngineFailed("broken"))
    response = await post_with_id(harness, MESSAGES, {**MESSAGES_BODY, "stream": stream})
    assert '"request_id":"abc"}' in response.text
    assert response.headers["request-id"] == "abc"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (MESSAGES, MESSAGES_BODY, "abc"),
        (MESSAGES, {**MESSAGES_BODY, "stream": True}, "abc"),
        (COUNT, MESSAGES_BODY, "abc"),
        (MESSAGES, {}, "abc"),
        (CHAT, CHAT_BODY, None),
    ],
)
async def test_responses_have_the_header_with_their_id_that_the_sdk_reads(
    path: str, body: dict[str, Any], named: str | None, writing_store: Path
) -> None:
    headers = (await post_with_id(script_messages(writing_store), path, body)).headers
    assert (headers.get("request-id"), headers["x-request-id"]) == (named, "abc")


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_missing_model_is_not_found(path: str, writing_store: Path) -> None:
    status, error_type, message = await fail(writing_store, path, model="no/such")
    assert (status, error_type) == (404, "not_found_error")
    assert "no/such" in message


async def test_large_body_is_too_large(writing_store: Path) -> None:
    limits = LimitSettings(body_bytes=50)
    harness = ChatHarness(writing_store, settings=IngressUserConfig(limits=limits))
    response = await harness.post(MESSAGES, {**MESSAGES_BODY, "system": "a" * 50})
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "request_too_large"


async def test_count_names_invalid_fields_too(writing_store: Path) -> None:
    assert await fail(writing_store, COUNT, tool_choice={"type": "any"}) == (
        400,
        "invalid_request_error",
        "`tool_choice` needs `tools`",
    )


async def test_key_of_anthropic_clients_is_accepted(writing_store: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "keys.json"
    key = add_key(key_file)
    settings = IngressUserConfig(key_file=key_file)
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(), settings)
    permitted = await harness.post(MESSAGES, MESSAGES_BODY, headers={"x-api-key": key})
    assert permitted.json()["model"] == DECODER
    refused = await harness.post(MESSAGES, MESSAGES_BODY, headers={"x-api-key": "-"})
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("field", ["mcp_servers", "container"])
async def test_field_that_would_change_the_answer_is_refused(
    field: str, writing_store: Path
) -> None:
    status, kind, message = await fail(writing_store, **{field: ["a"]})
    assert (status, kind) == (400, "invalid_request_error")
    assert f"`{field}` is not supported" in message


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_stored_conversation_is_refused_as_the_tool_runner_expects(
    path: str, writing_store: Path
) -> None:
    """The runner sends `thread` first, and the whole conversation after this error."""
    body = {**MESSAGES_BODY, "thread": {"type": "create"}}
    response = await script_messages(writing_store).post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
