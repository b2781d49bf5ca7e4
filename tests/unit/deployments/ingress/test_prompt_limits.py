from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import InputTooLong, ServeError, TooManyItems
from deployments.ingress.limits import check_prompts
from deployments.messages import Chat, Prompt
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import ScriptedGeneratorClient
from tests.support.in_process import InProcess

LIMITS = LimitSettings(items=4, item_chars=100, request_chars=250)
LONG = "x" * 101
USER = {"role": "user", "content": "a"}
FUNCTION = {"type": "function", "function": {"name": "f", "arguments": "y" * 60}}


def chat(*contents: str, **more: Any) -> Chat:
    return Chat(tuple({"role": "user", "content": one, **more} for one in contents))


@pytest.mark.parametrize(
    ("prompts", "times"),
    [
        (["x" * 100], 1),
        ([(1,) * 100], 1),
        (["x" * 60] * 4, 1),
        (["x" * 60], 4),
        ([chat("x" * 50, "y" * 50)], 2),
    ],
)
def test_parameters_within_the_limits_are_accepted(prompts: list[Prompt], times: int) -> None:
    check_prompts(prompts, times, LIMITS)


@pytest.mark.parametrize(
    ("prompts", "times", "error", "field"),
    [
        ([LONG], 1, InputTooLong, "prompt"),
        ([(1,) * 101], 1, InputTooLong, "prompt"),
        (["a", LONG], 1, InputTooLong, "prompt[1]"),
        (["x" * 90] * 3, 1, InputTooLong, "prompt"),
        (["x" * 90], 3, InputTooLong, "prompt"),
        (["a"] * 5, 1, TooManyItems, "prompt"),
        ([chat("a", LONG)], 1, InputTooLong, "prompt[1].content"),
        ([chat("x" * 60, "y" * 60)], 1, InputTooLong, "prompt"),
        ([chat("x" * 60, tool_calls=[FUNCTION])], 1, InputTooLong, "prompt"),
        ([chat("x", reasoning_content=LONG)], 1, InputTooLong, "prompt"),
        ([chat("x", tool_call_id=LONG)], 1, InputTooLong, "prompt"),
        ([chat("x", name=LONG)], 1, InputTooLong, "prompt"),
        ([Chat(chat("x").messages, (FUNCTION, FUNCTION))], 1, InputTooLong, "prompt"),
        ([Chat(chat("x").messages, variables=(("key", LONG),))], 1, InputTooLong, "prompt"),
        ([chat(*["a"] * 5)], 1, TooManyItems, "prompt"),
    ],
)
def test_parameters_above_the_limits_are_named(
    prompts: list[Prompt], times: int, error: type[ServeError], field: str
) -> None:
    with pytest.raises(error, match=rf"`{field.replace('[', '.').replace(']', '.')}`") as raised:
        check_prompts(prompts, times, LIMITS)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("path", "body", "field", "status"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt", 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG}]},
            "messages",
            400,
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "assistant", "reasoning_content": LONG}, USER]},
            "messages",
            400,
        ),
        ("/v1/responses", {"input": LONG}, "input", 400),
        (
            "/v1/responses",
            {"input": [USER, {"type": "reasoning", "content": [{"text": LONG}]}, USER]},
            "input",
            400,
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": LONG}]},
                    USER,
                ],
                "max_tokens": 5,
            },
            "messages",
            400,
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
            "messages",
            400,
        ),
        ("/generate", {"inputs": LONG}, "inputs", 422),
        ("/generate_stream", {"inputs": LONG}, "inputs", 422),
        (f"/models/{DECODER}", {"inputs": ["a", LONG]}, "inputs[1]", 422),
    ],
)
async def test_every_api_applies_the_limits_with_its_field_names(
    path: str, body: dict[str, Any], field: str, status: int, writing_store: Path
) -> None:
    generator = ScriptedGeneratorClient()
    settings = IngressUserConfig(limits=LIMITS)
    server = InProcess(writing_store, models=(DECODER,), generator=generator, settings=settings)
    async with server.client() as http:
        response = await http.post(path, json=body)
    assert response.status_code == status
    assert f"`{field}" in response.text
    assert generator.calls == []
