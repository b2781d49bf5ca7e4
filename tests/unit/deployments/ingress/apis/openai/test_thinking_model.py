"""A tiny thinking model behind the OpenAI routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from deployments.generation.reasoning import KNOWN_MARKS, THINK
from tests.support.chat_harness import CHAT, COMPLETIONS, USER, events_in
from tests.support.decoder_artifacts import CHATML, seal_tiny_decoder
from tests.unit.deployments.ingress.apis.openai.test_with_a_model import ask_one_of, client

# As Qwen3: the model opens its reasoning itself, unless the template has closed it.
HYBRID = "tiny/hybrid"
# As GLM-4.5: white space before the reasoning.
INDENTED = "tiny/indented"
# As DeepSeek-R1: the template opens the reasoning.
THINKER = "tiny/thinker"
# The same model as HYBRID with a template that names no mark.
PLAIN = "tiny/plain"
# Models with the marks of Magistral, Seed-OSS, Command A and Gemma 4, by id.
OTHERS = {f"tiny/others{number}": marks for number, marks in enumerate(KNOWN_MARKS[1:])}
MODELS = (HYBRID, INDENTED, THINKER, PLAIN, *OTHERS)
OPEN, CLOSE = THINK.open, THINK.close
REASONING, CONTENT = "Hm.", "Yes!"
ENABLED = f"{{% if enable_thinking is false %}}{{{{ '{OPEN}\n\n{CLOSE}\n\n' }}}}{{% endif %}}"
PAST = "{% for m in messages if m.reasoning_content %}{{ m.reasoning_content }}{% endfor %}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("thinking")
    opens = f"{OPEN}{REASONING}{CLOSE} {CONTENT}"
    seal_tiny_decoder(
        store, HYBRID, says=opens, template=PAST + CHATML + ENABLED, added_tokens=THINK
    )
    seal_tiny_decoder(
        store, INDENTED, says=f"\t{opens}", template=CHATML + ENABLED, added_tokens=THINK
    )
    seal_tiny_decoder(store, PLAIN, says=opens, added_tokens=THINK)
    seal_tiny_decoder(
        store,
        THINKER,
        says=f"{REASONING}{CLOSE} {CONTENT}",
        template=CHATML + f"{{{{ '{OPEN}\n' }}}}",
        added_tokens=THINK,
    )
    for model, marks in OTHERS.items():
        seal_tiny_decoder(
            store,
            model,
            says=f"{marks.open}{REASONING}{marks.close} {CONTENT}",
            template=f"{{{{ '{marks.open}' if messages is undefined }}}}" + CHATML,
            added_tokens=(marks.open, marks.close),
        )
    return store


async def ask(store: Path, model: str, **more: Any) -> dict[str, Any]:
    return await ask_one_of(store, MODELS, model, **more)


@pytest.mark.parametrize(
    ("model", "reasoning_tokens"),
    [(HYBRID, 6), (INDENTED, 7), (THINKER, 5), *((model, 6) for model in OTHERS)],
)
async def test_reasoning_is_separated_from_the_content(
    model: str, reasoning_tokens: int, store: Path
) -> None:
    answer = await ask(store, model, n=2)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {
            "role": "assistant",
            "content": CONTENT,
            "reasoning_content": REASONING,
        }
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 2 * reasoning_tokens}


@pytest.mark.parametrize("model", [HYBRID, INDENTED, THINKER])
async def test_stream_equals_the_whole_answer(model: str, store: Path) -> None:
    body = {"model": model, "messages": [USER], "temperature": 0, "stream": True, "logprobs": True}
    async with client(store, MODELS) as http:
        *events, _ = events_in((await http.post(CHAT, json=body)).content)
    choices = [event["choices"][0] for event in events]
    sent = {
        key: "".join(choice["delta"].get(key, "") for choice in choices)
        for key in ("reasoning_content", "content")
    }
    assert sent == {"reasoning_content": REASONING, "content": CONTENT}
    tokens = [each["token"] for c in choices if c["logprobs"] for each in c["logprobs"]["content"]]
    assert "".join(tokens) == CONTENT


async def test_answer_may_be_cut_within_the_reasoning(store: Path) -> None:
    (choice,) = (await ask(store, HYBRID, max_tokens=3))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == REASONING[:2]


async def test_answers_without_reasoning_are_unchanged(store: Path) -> None:
    whole = f"{OPEN}{REASONING}{CLOSE} {CONTENT}"
    closed = await ask(store, HYBRID, chat_template_kwargs={"enable_thinking": False})
    for answer in (closed, await ask(store, PLAIN)):
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": whole}
        assert "completion_tokens_details" not in answer["usage"]
    body = {"model": HYBRID, "prompt": f"{USER['content']}\n", "temperature": 0}
    async with client(store, MODELS) as http:
        (completion,) = (await http.post(COMPLETIONS, json=body)).json()["choices"]
        generated = (await http.post("/generate", json={"inputs": body["prompt"]})).json()
    assert completion["text"] == whole
    assert generated["generated_text"] == whole


@pytest.mark.parametrize("model", [HYBRID, THINKER])
async def test_response_format_describes_the_content(model: str, store: Path) -> None:
    format_ = {"type": "regex", "value": "[0-9]{3}"}
    (choice,) = (await ask(store, model, response_format=format_))["choices"]
    assert choice["message"]["reasoning_content"] == REASONING
    assert choice["message"]["content"].isdecimal()
    assert len(choice["message"]["content"]) == 3
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("model", [HYBRID, THINKER])
async def test_forced_call_follows_the_reasoning(model: str, store: Path) -> None:
    tool = {"type": "function", "function": {"name": "measure"}}
    (choice,) = (await ask(store, model, tools=[tool], tool_choice="required"))["choices"]
    assert choice["message"]["reasoning_content"] == REASONING
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "measure"
    assert orjson.loads(call["function"]["arguments"]) == {}


async def test_earlier_reasoning_is_part_of_the_prompt(store: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "Yes."}, USER]
    without = await ask(store, HYBRID, messages=messages)
    messages[1]["reasoning_content"] = "1234567890"
    repeated = await ask(store, HYBRID, messages=messages)
    assert repeated["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] + 10
