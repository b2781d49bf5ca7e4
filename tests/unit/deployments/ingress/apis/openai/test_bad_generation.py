from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import (
    TRUNCATION_ADVICE,
    DeadlineExceeded,
    InputTooLong,
    InvalidField,
    Overloaded,
    ServeError,
    UnknownToken,
)
from tests.support.chat_harness import (
    CHAT,
    CHAT_BODY,
    COMPLETIONS,
    USER,
    ChatHarness,
)
from tests.support.generators import ScriptedReply

IMAGE = {"type": "image_url", "image_url": {"url": "data:..."}}
TOOL = {"type": "function", "function": {"name": "f"}}
LIMITS = LimitSettings(items=4, item_chars=100, request_chars=150, choices=3)


def saying(characters: int) -> dict[str, str]:
    return {**USER, "content": "x" * characters}


async def read_error(store: Path, path: str, body: Any) -> tuple[int, str, str | None]:
    asking = ChatHarness(store, settings=IngressUserConfig(limits=LIMITS))
    response = await asking.post(path, body)
    error = response.json()["error"]
    assert error["message"]
    assert asking.generator.calls == []
    return response.status_code, error["code"], error["param"]


CALL_WITH_A_NUMBER = {"function": {"name": "f", "arguments": 7}}


@pytest.mark.parametrize(
    ("error", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 4}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 7}, "stop"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": None}}, "logit_bias.1"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["json"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "schema": []}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "regex"}}, "response_format.value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 7]}, "guided_choice[1]"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"choice": {"a": 1}}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"json_schema": 7}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"regex": ["a"]}, "regex"),
        ({"regex": "a", "json_schema": {}}, "json_schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"allowed_token_ids": [2]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stop_token_ids": [2]}, "stop_token_ids"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"logprob_token_ids": [2]}, "logprob_token_ids"),
        ({"thinking_token_budget": 4}, "thinking_token_budget"),
        ({"repetition_detection": True}, "repetition_detection"),
        ({"n_predict": 5}, "n_predict"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"mirostat": 2}, "mirostat"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"no_stop_trim": True}, "no_stop_trim"),
        ({"thinking": {"type": "adaptive"}}, "thinking.type"),
        (
            {"messages": [USER, {"role": "assistant", "content": "Once", "prefix": True}]},
            "messages[1].prefix",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        (
            {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": 5}]},
            "messages[1].reasoning_content",
        ),
        ({"messages": [{"role": "user", "refusal": "No."}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}]},
            "messages[0].content[0].refusal",
        ),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[1].function_call",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL_WITH_A_NUMBER]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": True}, "stream_options"),
        ({"options": {"require_gpu": True}}, "options.require_gpu"),
        ({"model": 7}, "model"),
    ],
)
async def test_invalid_chat_field_is_named(
    error: dict[str, Any], param: str, writing_store: Path
) -> None:
    status, _, named = await read_error(writing_store, CHAT, {**CHAT_BODY, **error})
    assert (status, named) == (400, param)


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type",
            "`image_url` is not supported; models read only texts: send parts of the type `text`",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "tools[0].type",
            "`custom` is not supported; this server runs no tools: offer a tool of the type "
            "`function`",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]},
                ]
            },
            "messages[1].tool_calls[0].type",
            "`custom` is not supported; send calls of the type `function`",
        ),
    ],
)
async def test_unsupported_types_are_named_with_what_to_send(
    error: dict[str, Any], param: str, message: str, writing_store: Path
) -> None:
    response = await ChatHarness(writing_store).post(CHAT, {**CHAT_BODY, **error})
    body = response.json()["error"]
    assert (response.status_code, body["param"]) == (400, param)
    assert body["message"] == f"`{param}`: {message}"


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
async def test_empty_list_is_no_message(role: str, writing_store: Path) -> None:
    body = {"messages": [USER, {"role": role, "content": []}]}
    named = (400, "empty_input", "messages[1].content")
    assert await read_error(writing_store, CHAT, body) == named


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        ({"messages": []}, 400, "empty_input", "messages"),
        ({"stop": ["a", ""]}, 400, "empty_input", "stop[1]"),
        ({"messages": [USER] * 5}, 400, "too_many_items", "messages"),
        ({"messages": [saying(101)]}, 400, "context_length_exceeded", "messages[0].content"),
        ({"messages": [saying(80)] * 2}, 400, "context_length_exceeded", "messages"),
        ({"model": "no/such"}, 404, "model_not_found", "model"),
    ],
)
async def test_limits_and_missing_fields_are_named(
    error: dict[str, Any], status: int, code: str, param: str, writing_store: Path
) -> None:
    body = {**CHAT_BODY, **error}
    assert await read_error(writing_store, CHAT, body) == (status, code, param)


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        ({"prompt": None}, 400, "invalid_field", "prompt"),
        ({"suffix": "after"}, 400, "invalid_field", "suffix"),
        ({"add_special_tokens": False}, 400, "invalid_field", "add_special_tokens"),
        ({"guided_choice": ["a", ""]}, 400, "empty_input", "guided_choice[1]"),
        ({"guided_grammar": "root ::= x"}, 400, "invalid_field", "guided_grammar"),
        ({"grammar": 'root ::= "a"'}, 400, "invalid_field", "grammar"),
        ({"prompt_logprobs": 1}, 400, "invalid_field", "prompt_logprobs"),
        ({"prompt": ""}, 400, "empty_input", "prompt"),
        ({"prompt": []}, 400, "empty_input", "prompt"),
        ({"prompt": ["a", ""]}, 400, "empty_input", "prompt[1]"),
        ({"prompt": [[1], []]}, 400, "empty_input", "prompt[1]"),
        ({"prompt": [1, -1]}, 400, "invalid_field", "prompt[1]"),
        ({"prompt": {"a": 1}}, 400, "invalid_field", "prompt"),
        ({"prompt": ["a"] * 5}, 400, "too_many_items", "prompt"),
        ({"prompt": ["a", "x" * 101]}, 400, "context_length_exceeded", "prompt[1]"),
        ({"prompt": [1] * 101}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": ["x" * 80] * 2}, 400, "context_length_exceeded", "prompt"),
        ({"max_tokens": 0}, 400, "invalid_field", "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, 400, "invalid_field", "max_tokens"),
        ({"logprobs": 21}, 400, "invalid_field", "logprobs"),
        ({"best_of": 2, "n": 3}, 400, "invalid_field", "best_of"),
        ({"best_of": 4}, 400, "invalid_field", "best_of"),
        ({"min_tokens": 17}, 400, "invalid_field", "min_tokens"),  # 16 is the default maximum
        ({"best_of": 2, "stream": True}, 400, "invalid_field", "best_of"),
    ],
)
async def test_invalid_completion_has_the_openai_error_format(
    error: dict[str, Any], status: int, code: str, param: str, writing_store: Path
) -> None:
    body = {"prompt": "Once", **error}
    assert await read_error(writing_store, COMPLETIONS, body) == (status, code, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "more", "param"),
    [
        (InvalidField("`grammar` is bad", field="grammar"), {}, "response_format"),
        (InvalidField("`grammar` is bad", field="grammar"), {"regex": "(a"}, "regex"),
        (
            InvalidField("`grammar` is bad", field="grammar"),
            {"tools": [TOOL], "tool_choice": "required"},
            "tools",
        ),
        (InvalidField("`max_new_tokens` is bad", field="max_new_tokens"), {}, "max_tokens"),
        (
            InvalidField("`max_new_tokens` is bad", field="max_new_tokens"),
            {"max_completion_tokens": 9, "max_tokens": 8},
            "max_completion_tokens",
        ),
        (InvalidField("`inputs` is bad", field="inputs"), {}, "messages"),
        (InvalidField("`messages[0]` is bad", field="messages[0]"), {}, "messages[0]"),
        (UnknownToken("`prompt` is bad", field="prompt"), {}, "messages"),
    ],
)
async def test_generator_errors_have_the_openai_format(
    error: ServeError, more: dict[str, Any], param: str, stream: bool, writing_store: Path
) -> None:
    asking = ChatHarness(writing_store, lambda call: ScriptedReply(refusal=error))
    response = await asking.post(CHAT, {**CHAT_BODY, **more, "stream": stream})
    body = response.json()["error"]
    assert (response.status_code, body["code"], body["param"]) == (400, error.code, param)
    assert body["message"] == f"`{param}` is bad"
    assert len(asking.in_process.recorder.records) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompt_gets_no_advice_to_truncate(
    stream: bool, writing_store: Path
) -> None:
    error = InputTooLong(f"`prompt` has 9 tokens. Shorten it{TRUNCATION_ADVICE}.", field="prompt")
    asking = ChatHarness(writing_store, lambda call: ScriptedReply(refusal=error))
    response = await asking.post(COMPLETIONS, {"prompt": "Once", "stream": stream})
    body = response.json()["error"]
    assert (response.status_code, body["code"]) == (400, "context_length_exceeded")
    assert body["message"] == "`prompt` has 9 tokens. Shorten it."


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_clients_do_not_repeat_a_generation_that_was_late(
    path: str, writing_store: Path
) -> None:
    late = DeadlineExceeded("late")
    asking = ChatHarness(writing_store, lambda call: ScriptedReply(refusal=late))
    response = await asking.post(path, {**CHAT_BODY, "prompt": "Once"})
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"


async def test_best_of_error_names_no_internal_field(writing_store: Path) -> None:
    body = {"prompt": "Once", "best_of": 1, "n": 2}
    response = await ChatHarness(writing_store).post(COMPLETIONS, body)
    assert "choices" not in response.json()["error"]["message"]


async def test_overloaded_generator_sets_retry_after(writing_store: Path) -> None:
    asking = ChatHarness(writing_store, lambda call: ScriptedReply(refusal=Overloaded("full")))
    response = await asking.post(CHAT, CHAT_BODY)
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-should-retry"] == "true"
