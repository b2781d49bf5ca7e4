from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.generation_config import GenerationDefaults
from deployments.artifacts.store import resolve_version
from deployments.config import ModelSettings
from deployments.ingress.apis.openai.chat import build_logprobs
from deployments.messages import (
    Chat,
    FinishReason,
    GenerationOptions,
    SamplingParams,
    Token,
    TopLogprob,
)
from deployments.registry import ModelRegistry
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.chat_harness import (
    CHAT,
    CHAT_BODY,
    COMPLETIONS,
    USER,
    ChatHarness,
)
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.generators import COMPUTE_TYPE, ScriptedReply


async def test_chat_response_has_the_openai_format(writing_store: Path) -> None:
    response = await ChatHarness(writing_store).post(CHAT, CHAT_BODY)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    model = ModelRegistry(writing_store, [ModelSettings(id=DECODER)]).find(DECODER)
    assert body == {
        "object": "chat.completion",
        "model": DECODER,
        "system_fingerprint": model.ref.version,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_headers_have_compute_type_and_timings(writing_store: Path) -> None:
    headers = (await ChatHarness(writing_store).post(CHAT, CHAT_BODY)).headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == COMPUTE_TYPE
    assert headers["x-compute-tokens"] == "7"
    assert headers["x-sha"] == resolve_version(writing_store, DECODER, "latest")
    assert float(headers["x-compute-time"]) > 0
    assert (
        "tokenization;dur=0.50, queue;dur=1.00, prefill;dur=2.00, decode;dur=3.00"
        in headers["server-timing"]
    )


async def test_defaults_do_not_change_the_distribution(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    await harness.post(CHAT, CHAT_BODY)
    assert harness.call.options == GenerationOptions()
    assert harness.call.prompt == Chat((USER,))
    assert harness.call.model.id == DECODER


async def test_variables_of_the_template_reach_the_generator(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    sent = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert (await harness.post(CHAT, CHAT_BODY | sent)).status_code == 200
    variables = (("reasoning_effort", "low"), ("enable_thinking", False))
    assert harness.call.prompt == Chat((USER,), variables=variables)
    refused = await harness.post(CHAT, CHAT_BODY | {"chat_template_kwargs": {"messages": []}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs.messages"


OWN_WAY = GenerationDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, typical_p=0.9, repetition_penalty=1.1
)
LEFT_OUT = {
    name: getattr(OWN_WAY, name) for name in SamplingParams._fields if hasattr(OWN_WAY, name)
}


@pytest.mark.parametrize(
    ("options_sent", "expected"),
    [
        ({}, LEFT_OUT),
        ({"temperature": 0, "seed": 5}, LEFT_OUT | {"temperature": 0, "seed": 5}),
        ({"top_k": -1, "top_p": 1}, LEFT_OUT | {"top_k": None, "top_p": 1}),
        (
            {"min_p": 0, "typical_p": 1, "repetition_penalty": 1},
            LEFT_OUT | {"min_p": 0, "typical_p": 1, "repetition_penalty": 1},
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_checkpoint_defaults_replace_missing_parameters(
    path: str, options_sent: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    seal_tiny_decoder(tmp_path, defaults=OWN_WAY)
    harness = ChatHarness(tmp_path)
    body = CHAT_BODY if path == CHAT else {"prompt": "Once upon a"}
    assert (await harness.post(path, body | options_sent)).status_code == 200
    assert harness.call.options.sampling == SamplingParams(**expected)


async def test_all_chat_parameters_reach_the_generator(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    sampling = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": -1,
        "presence_penalty": 2,
        "seed": 5,
    }
    body = {
        **CHAT_BODY,
        **sampling,
        "logit_bias": {"12": -100, "7": 1.5},
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "stop": "\n",
        "logprobs": True,
        "top_logprobs": 3,
        "user": "u1",
        "store": False,
        "metadata": {"a": 1},
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
    }
    assert (await harness.post(CHAT, body)).status_code == 200
    assert harness.call.options == GenerationOptions(
        sampling=SamplingParams(**{**sampling, "logit_bias": ((12, -100.0), (7, 1.5))}),
        max_new_tokens=9,
        min_new_tokens=2,
        stop=("\n",),
        logprobs=3,
    )


async def test_the_newer_name_of_the_maximum_wins(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    await harness.post(CHAT, {**CHAT_BODY, "max_tokens": 9, "max_completion_tokens": 4})
    assert harness.call.options.max_new_tokens == 4


async def test_minimum_of_new_tokens_may_equal_the_maximum(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    response = await harness.post(CHAT, {**CHAT_BODY, "min_tokens": 2, "max_tokens": 2})
    assert response.status_code == 200
    assert (harness.call.options.min_new_tokens, harness.call.options.max_new_tokens) == (2, 2)


async def test_answer_that_ignores_end_tokens_has_the_maximum_of_tokens(
    writing_store: Path,
) -> None:
    """As benchmarks of vLLM want it. `min_tokens` is then no longer needed."""
    harness = ChatHarness(writing_store)
    body = {**CHAT_BODY, "ignore_eos": True, "max_completion_tokens": 5, "min_tokens": 2}
    assert (await harness.post(CHAT, body)).status_code == 200
    assert (harness.call.options.min_new_tokens, harness.call.options.max_new_tokens) == (5, 5)


@pytest.mark.parametrize(
    ("sent", "thinks"),
    [
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "clear_thinking": True}}, True),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, False),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
async def test_thinking_is_a_variable_of_the_template(
    sent: dict[str, Any], thinks: bool, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    assert (await harness.post(CHAT, CHAT_BODY | sent)).status_code == 200
    assert harness.call.prompt == Chat((USER,), variables=(("enable_thinking", thinks),))


async def test_minus_1_means_a_random_seed_and_no_limit(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    body = {**CHAT_BODY, "seed": -1, "max_tokens": -1, "n_predict": -1}
    assert (await harness.post(CHAT, body)).status_code == 200
    assert harness.call.options.sampling.seed is None
    assert harness.call.options.max_new_tokens is None


async def test_top_logprobs_0_needs_no_logprobs(writing_store: Path) -> None:
    response = await ChatHarness(writing_store).post(CHAT, {**CHAT_BODY, "top_logprobs": 0})
    assert response.json()["choices"][0]["logprobs"] is None


async def test_null_chat_parameters_are_ignored(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    keys = (
        "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed",
        "stream", "stream_options", "logprobs", "top_logprobs", "presence_penalty",
        "frequency_penalty", "logit_bias", "response_format", "tools", "tool_choice", "model",
        "options", "min_tokens", "top_k",
    )  # fmt: skip
    response = await harness.post(CHAT, {**CHAT_BODY, **dict.fromkeys(keys)})
    assert response.status_code == 200, response.text
    assert harness.call.options == GenerationOptions()


@pytest.mark.parametrize("top_k", [0, -1])
async def test_top_k_0_and_minus_1_mean_no_limit(top_k: int, writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    body = {**CHAT_BODY, "top_k": top_k, "stop": [], "logit_bias": {}, "top_p": 0, "seed": -2}
    await harness.post(CHAT, body)
    sampling = harness.call.options.sampling
    assert (sampling.top_k, harness.call.options.stop, sampling.logit_bias) == (None, (), ())
    assert 0 < (sampling.top_p or 0) < 1e-6
    assert sampling.seed == 2**64 - 2


async def test_choices_have_an_index(writing_store: Path) -> None:
    harness = ChatHarness(
        writing_store, lambda call: ScriptedReply((f"s{call.options.sampling.seed}",))
    )
    body = (await harness.post(CHAT, {**CHAT_BODY, "n": 3, "seed": 1})).json()
    result = [(one["index"], one["message"]["content"]) for one in body["choices"]]
    assert result == [(0, "s1"), (1, "s2"), (2, "s3")]
    assert body["usage"]["prompt_tokens"] == 4, "one prompt, however often it is answered"
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("reason", "finish"),
    [(FinishReason.LENGTH, "length"), (FinishReason.STOP, "stop"), (FinishReason.END, "stop")],
)
async def test_finish_reason_is_mapped(
    reason: FinishReason, finish: str, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(reason=reason))
    body = (await harness.post(CHAT, CHAT_BODY)).json()
    assert body["choices"][0]["finish_reason"] == finish


async def test_logprobs_have_alternatives(writing_store: Path) -> None:
    harness = ChatHarness(
        writing_store, lambda call: ScriptedReply(("é", "x"), logprob=float("-inf"))
    )
    body = {**CHAT_BODY, "logprobs": True, "top_logprobs": 1}
    response = (await harness.post(CHAT, body)).json()
    content = response["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["é", "x"], "the end token is omitted"
    assert content[0]["bytes"] == [0xC3, 0xA9]
    assert content[0]["logprob"] == -9999
    assert [one["token"] for one in content[0]["top_logprobs"]] == ["alt0"]


def test_bytes_of_a_part_of_a_character_are_not_those_of_its_text() -> None:
    others = (
        TopLogprob(5, "", -0.5, raw_bytes=b"\xe6"),
        TopLogprob(6, "\ufffd", -1.0, False, b"\xe7"),
    )
    (built,) = build_logprobs([Token(5, "", -0.5, False, others, b"\xe6")])["content"]
    assert (built["token"], built["bytes"]) == ("", [0xE6])
    assert [each["bytes"] for each in built["top_logprobs"]] == [[0xE6], [0xE7]]


async def test_logprobs_without_top_logprobs_have_no_alternatives(writing_store: Path) -> None:
    response = await ChatHarness(writing_store).post(CHAT, {**CHAT_BODY, "logprobs": True})
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [(one["logprob"], one["top_logprobs"]) for one in content] == [(-0.5, [])] * 2


async def test_template_receives_messages_with_text_content(writing_store: Path) -> None:
    harness = ChatHarness(writing_store)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7", "name": "f"},
    ]
    assert (await harness.post(CHAT, {"messages": messages})).status_code == 200
    prompt = harness.call.prompt
    assert isinstance(prompt, Chat)
    parsed = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize("role", ["tool", "function"])
async def test_empty_lists_of_calls_and_their_results_are_empty_texts(
    role: str, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {"role": role, "tool_call_id": "c1", "content": []},
    ]
    response = await harness.post(CHAT, {"messages": messages})
    assert response.status_code == 200, response.text
    prompt = harness.call.prompt
    assert isinstance(prompt, Chat)
    assert [message["content"] for message in prompt.messages[1:]] == ["", ""]


@pytest.mark.parametrize(
    "message",
    [
        {"refusal": "I cannot."},
        {"content": None, "refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": "I cannot.", "refusal": None},
    ],
)
async def test_template_receives_refusals_of_the_assistant_as_content(
    message: dict[str, Any], writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    messages = [USER, {"role": "assistant", **message}, USER]
    response = await harness.post(CHAT, {"messages": messages})
    assert response.status_code == 200, response.text
    prompt = harness.call.prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[1] == {"role": "assistant", "content": "I cannot."}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ({"arguments": ""}, {}),
        ({"arguments": " \n"}, {}),
        ({"arguments": None}, {}),
        ({}, {}),
        ({"arguments": {"a": 1}}, {"a": 1}),
        ({"arguments": f'{{"a": {10**30}}}'}, {"a": 10**30}),
        ({"arguments": "[1]"}, "[1]"),
        ({"arguments": '{"a": '}, '{"a": '),
        ({"arguments": '{"a":' * 40 + "1" + "}" * 40}, '{"a":' * 40 + "1" + "}" * 40),
    ],
)
async def test_template_receives_arguments_of_calls_as_objects(
    function: dict[str, Any], expected: Any, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    call = {"id": "c1", "type": "function", "function": {"name": "f", **function}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert (await harness.post(CHAT, {"messages": [USER, message]})).status_code == 200
    prompt = harness.call.prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("path", "model"),
    [
        (CHAT, DECODER),
        (CHAT, None),
        (CHAT, "dummy"),
        (f"/models/{DECODER}{CHAT}", "any"),
        (f"/models/tiny%2Fdecoder{CHAT}", "tgi"),
    ],
)
async def test_model_may_be_named_in_path_or_body(
    path: str, model: str | None, writing_store: Path
) -> None:
    response = await ChatHarness(writing_store).post(path, {**CHAT_BODY, "model": model})
    assert response.json()["model"] == DECODER
