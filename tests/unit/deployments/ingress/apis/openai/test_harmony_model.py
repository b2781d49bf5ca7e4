"""A tiny model that writes GPT-OSS's format behind the OpenAI routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from deployments.generation.harmony import CHANNEL, END, MESSAGE, START
from tests.support.chat_harness import CHAT, COMPLETIONS, USER, events_in
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.unit.deployments.ingress.apis.openai.test_with_a_model import ask_one_of, client

WRITER, CALLER = "tiny/harmony-writer", "tiny/harmony-caller"
MODELS = (WRITER, CALLER)
# The tiny models say no token twice, so words with repeated letters are tokens.
TOKENS = (START, CHANNEL, MESSAGE, END, "commentary", "assistant", " to=", "functions.")
# The template begins the reasoning, so that the models need each mark only once.
TEMPLATE = (
    f"{{% for m in messages %}}{START}{{{{ m.role }}}}{MESSAGE}"
    f"{{{{ m.thinking }}}}{{{{ m.content }}}}{END}{{% endfor %}}"
    f"{{{{ tools | length if tools }}}}{START}assistant{CHANNEL}analysis{MESSAGE}{{{{ '\n' }}}}"
)
REASONING, CONTENT = "Hm.", "Yes?"
TOOL = {"type": "function", "function": {"name": "go"}}
RULED = {"type": "regex", "value": "[0-9]{3}"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("harmony")
    for model, says in (
        (WRITER, f"assistant{CHANNEL}final{MESSAGE}{CONTENT}"),
        (CALLER, f"assistant to=functions.go{CHANNEL}commentary{MESSAGE}{{}}"),
    ):
        said = f"{REASONING}{END}{START}{says}"
        seal_tiny_decoder(store, model, says=said, template=TEMPLATE, added_tokens=TOKENS)
    return store


async def ask(store: Path, model: str, **more: Any) -> dict[str, Any]:
    return await ask_one_of(store, MODELS, model, **more)


async def test_channels_are_fields_of_the_message(store: Path) -> None:
    answer = await ask(store, WRITER)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {
        "role": "assistant", "content": CONTENT, "reasoning_content": REASONING,
    }  # fmt: skip
    hidden = len(REASONING) + len(
        (END, START, "assistant", CHANNEL, *("f", "in", "a", "l"), MESSAGE)
    )
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": hidden}


async def test_message_to_a_function_is_a_tool_call(store: Path) -> None:
    (choice,) = (await ask(store, CALLER, tools=[TOOL]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == REASONING
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "go", "arguments": "{}"}
    assert not choice["message"]["content"]


@pytest.mark.parametrize(("model", "kind"), [(WRITER, "content"), (CALLER, "tool_calls")])
async def test_stream_has_the_same_parts(model: str, kind: str, store: Path) -> None:
    body = {"model": model, "messages": [USER], "temperature": 0, "tools": [TOOL], "stream": True}
    async with client(store, MODELS) as http:
        *events, _ = events_in((await http.post(CHAT, json=body)).content)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == REASONING
    sent = [delta[kind] for delta in deltas if delta.get(kind)]
    if kind == "content":
        assert "".join(sent) == CONTENT
    else:
        assert sent[0][0]["function"] == {"name": "go", "arguments": "{}"}


@pytest.mark.parametrize("model", MODELS)
async def test_grammar_describes_the_final_message(model: str, store: Path) -> None:
    (choice,) = (await ask(store, model, response_format=RULED))["choices"]
    assert choice["message"]["reasoning_content"] == REASONING
    assert choice["message"]["content"].isdecimal()
    assert len(choice["message"]["content"]) == 3


@pytest.mark.parametrize("model", MODELS)
async def test_forced_call_is_written_in_the_final_message(model: str, store: Path) -> None:
    (choice,) = (await ask(store, model, tools=[TOOL], tool_choice="required"))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "go"
    assert not orjson.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("content", "calls", "added"), [("Yes.", None, 10), (None, 1, 10), ("Yes.", 1, 12)]
)
async def test_earlier_reasoning_is_named_as_in_the_template(
    content: str | None, calls: int | None, added: int, store: Path
) -> None:
    """The template of GPT-OSS rejects it next to content and calls, so it includes the content."""
    past: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        past["tool_calls"] = [{"id": "1", "function": {"name": "go", "arguments": "{}"}}]
    without = await ask(store, WRITER, messages=[USER, past, USER])
    past["reasoning_content"] = "1234567890"
    repeated = await ask(store, WRITER, messages=[USER, past, USER])
    assert repeated["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] + added


async def test_completions_are_all_text(store: Path) -> None:
    body = {"model": WRITER, "prompt": "a\n", "temperature": 0}
    async with client(store, MODELS) as http:
        (choice,) = (await http.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["text"].startswith(REASONING)
    assert choice["text"].endswith(CONTENT)
