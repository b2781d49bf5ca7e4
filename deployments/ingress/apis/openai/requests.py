"""Requests of OpenAI's generation API, parsed into generation requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from deployments.artifacts.generation_config import GenerationDefaults
from deployments.errors import EmptyInput, InvalidField, MalformedBody
from deployments.ingress.apis.openai.answer_grammar import find_grammar_field, parse_grammar
from deployments.ingress.apis.openai.schemas import (
    ChatBody,
    ChatRequestMessage,
    ChoicesBody,
    CompletionBody,
    GenerationBody,
    ToolCall,
)
from deployments.ingress.apis.openai.tool_choice import forced_tools, offered_tools
from deployments.ingress.apis.openai.tool_grammar import call_grammar, call_or_answer_grammar
from deployments.ingress.apis.shared.unsupported_fields import (
    UnsupportedFields,
    reject_unsupported_fields,
)
from deployments.ingress.http.bodies import parse_json
from deployments.ingress.limits import MAX_STOP_CHARS, MAX_STOPS
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import GenerationRequest
from deployments.ingress.token_ids import TEXTS_OR_IDS
from deployments.messages import (
    TEMPLATE_ARGUMENTS,
    Chat,
    GenerationOptions,
    SamplingParams,
)
from deployments.registry import RegisteredModel
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many

MAX_LOGIT_BIASES = 1_024
MAX_LOGIT_BIAS = 100.0
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context
RANDOM_SEED = -1  # as in vLLM and llama.cpp
MIN_TOP_P = 1e-9  # replaces `top_p` 0; keeps only the most likely token
STOPS: Inputs[str | list[str]] = Inputs(
    one_or_many(NonEmptyText), "a string or a list of strings, none of them empty"
)
# Fields of other servers that change the text or its parts: of llama.cpp and SGLang, then vLLM's.
# Some have a counterpart of another name.
UNSUPPORTED_FIELDS: UnsupportedFields = {
    **dict.fromkeys(
        ("grammar", "ebnf", "structural_tag", "guided_grammar"),
        (("", False), "send `regex` or `json_schema`"),
    ),
    "n_predict": ((-1,), "send `max_tokens`"),
    "repeat_penalty": ((1,), "send `repetition_penalty`"),
    "mirostat": ((0,), "omit it"),
    "stop_regex": ((), "send `stop`"),
    "no_stop_trim": ((False,), "append the text of `stop`"),
    "chat_template": (("", False), "send `messages` that the template of the model renders"),
    "prompt_logprobs": ((), "send `echo` and `logprobs` to /v1/completions"),
    "allowed_token_ids": ((), "send `logit_bias` or `regex`"),
    "bad_words": (([],), "send `logit_bias`"),
    "documents": (([],), "put their texts into a message"),
    "include_stop_str_in_output": ((False,), "append the text of `stop`"),
    "skip_special_tokens": ((True,), "omit it"),
    "return_tokens_as_token_ids": ((False,), "omit it"),
    "return_token_ids": ((False,), "omit it"),
    "logprob_token_ids": (([],), "send `logprobs`"),
    "thinking_token_budget": ((), "send `max_tokens`"),
    "repetition_detection": ((False,), "send `frequency_penalty`"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "use_beam_search": ((False,), "omit it"),
    "stop_token_ids": (([],), "send `stop`"),
    "continue_final_message": ((False,), "send a `prompt` to /v1/completions"),
    "add_generation_prompt": ((True,), "send a `prompt` to /v1/completions"),
}
# The same of chats only: former fields of OpenAI, those of completions, and other forms of the
# reasoning, of vLLM, SGLang and llama.cpp.
UNSUPPORTED_CHAT_FIELDS: UnsupportedFields = {
    "functions": (([],), "send `tools`"),
    "function_call": ((), "send `tool_choice`"),
    "echo": ((False,), "add the last message to the answer"),
    "best_of": ((1,), "send `n`"),
    "include_reasoning": ((True,), "ignore `reasoning_content`"),
    "separate_reasoning": ((True,), "join `reasoning_content` and `content`"),
    "reasoning_format": (("auto", "deepseek"), "join `reasoning_content` and `content`"),
}
UNSUPPORTED_COMPLETION_FIELDS: UnsupportedFields = {
    "suffix": (("",), "omit it"),
    "add_special_tokens": ((True,), "send a `prompt` of token ids"),
}
# Fields of messages, with what to do instead. With `prefix`, of DeepSeek and Mistral, the answer
# would continue the message.
_UNSUPPORTED_MESSAGE_FIELDS = {
    "function_call": "send `tool_calls`",
    "prefix": "send a `prompt` to /v1/completions",
}
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


def parse_completion_request(
    body: CompletionBody, model: RegisteredModel, request_options: RequestOptions
) -> GenerationRequest:
    """Parse a body of `/v1/completions`. Raises InvalidField or EmptyInput."""
    reject_unsupported_fields(body, UNSUPPORTED_COMPLETION_FIELDS)
    prompts = parse_prompts(body.prompt)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and (not body.echo or body.stream):
        raise InvalidField(
            "`max_tokens` must be at least 1. 0 needs `echo` and excludes `stream`.",
            field="max_tokens",
        )
    # Only the generator can decode a prompt of token ids. It returns the text only together with
    # the logprobs of the prompt. An echo of token ids therefore requests these logprobs.
    has_token_ids = any(isinstance(prompt, tuple) for prompt in prompts)
    return GenerationRequest(
        prompt=prompts[0],
        further_prompts=tuple(prompts[1:]),
        options=build_options(body, model.generation_config.defaults, max_tokens)._replace(
            max_new_tokens=max(1, max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=bool(body.echo) and (body.logprobs is not None or has_token_ids),
        ),
        model=model,
        choices=body.n or 1,
        best_of=body.best_of,
        request_options=request_options,
    )


def parse_chat_request(
    body: ChatBody, model: RegisteredModel, request_options: RequestOptions
) -> GenerationRequest:
    """Parse a body of `/v1/chat/completions`. Raises InvalidField or EmptyInput."""
    reject_unsupported_fields(body, UNSUPPORTED_CHAT_FIELDS)
    _reject_message_fields(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidField("`top_logprobs` needs `logprobs` to be true", field="top_logprobs")
    messages = tuple(parse_message(message, i) for i, message in enumerate(body.messages))
    tools = [tool.model_dump(exclude_unset=True) for tool in offered_tools(body)]
    newer, older = body.max_completion_tokens, body.max_tokens
    max_tokens = older if newer is None else newer
    options = build_options(body, model.generation_config.defaults, max_tokens)
    if forced := forced_tools(body):
        # The model must call a tool. As in vLLM, the grammar of the call replaces
        # `response_format`, which describes an answer in text.
        options = options._replace(grammar=call_grammar(forced))
    elif tools and options.grammar is not None and options.grammar.kind == "json_schema":
        answer = orjson.loads(options.grammar.value)
        grammar = call_or_answer_grammar(offered_tools(body), answer)
        options = options._replace(grammar=grammar)
    return GenerationRequest(
        prompt=Chat(messages, tuple(tools), parse_template_variables(body)),
        options=options._replace(
            max_new_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        model=model,
        choices=body.n or 1,
        request_options=request_options,
    )


def _reject_message_fields(body: ChatBody) -> None:
    """Raise InvalidField for unsupported fields of a message."""
    for i, message in enumerate(body.messages):
        for name, instead in _UNSUPPORTED_MESSAGE_FIELDS.items():
            if getattr(message, name) not in (None, False):
                path = f"messages[{i}].{name}"
                raise InvalidField(f"`{path}` is not supported; {instead}", field=path)


def parse_template_variables(body: ChatBody) -> tuple[tuple[str, Any], ...]:
    """Return the variables that the request adds to the chat template.

    Raises InvalidField for a variable that the server sets.
    """
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    variables = {**_find_thinking(body), **effort, **(body.chat_template_kwargs or {})}
    if owned := TEMPLATE_ARGUMENTS.intersection(variables):
        name = min(owned)
        raise InvalidField(
            f"`chat_template_kwargs` cannot set `{name}`, which the server sets",
            field=f"chat_template_kwargs.{name}",
        )
    return tuple(variables.items())


def _find_thinking(body: ChatBody) -> dict[str, bool]:
    """Return the template variable of `enable_thinking`, or of `thinking` as GLM's API has it."""
    if body.enable_thinking is not None:
        return {"enable_thinking": body.enable_thinking}
    return {} if body.thinking is None else {"enable_thinking": body.thinking.type == "enabled"}


def build_options(
    body: ChoicesBody, defaults: GenerationDefaults, max_tokens: int | None
) -> GenerationOptions:
    """Build the options. `defaults` are those of the checkpoint.

    With `ignore_eos` the end token is never selected. Raises InvalidField or EmptyInput.
    """
    if body.ignore_eos and max_tokens is None:
        raise InvalidField("`ignore_eos` needs `max_tokens`", field="ignore_eos")
    reject_unsupported_fields(body, UNSUPPORTED_FIELDS)
    return GenerationOptions(
        sampling=build_sampling(body, defaults),
        min_new_tokens=(max_tokens if body.ignore_eos else body.min_tokens) or 0,
        stop=parse_stops(body.stop),
        grammar=parse_grammar(body),
    )


def build_sampling(body: GenerationBody, defaults: GenerationDefaults) -> SamplingParams:
    """Build the sampling parameters. Raises InvalidField for an invalid `logit_bias`."""
    top_k = defaults.top_k if body.top_k is None else body.top_k
    top_p = defaults.top_p if body.top_p is None else max(body.top_p, MIN_TOP_P)
    penalty = body.repetition_penalty
    return SamplingParams(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        typical_p=defaults.typical_p if body.typical_p is None else body.typical_p,
        repetition_penalty=defaults.repetition_penalty if penalty is None else penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=parse_logit_bias(body.logit_bias),
        seed=None if body.seed in (None, RANDOM_SEED) else body.seed % 2**64,
    )


def parse_stops(value: Any) -> tuple[str, ...]:
    """Return the stop strings. Raises InvalidField or EmptyInput."""
    if value is None or value == []:
        return ()
    parsed = STOPS.read(value, "stop")
    stops = (parsed,) if isinstance(parsed, str) else tuple(parsed)
    if len(stops) > MAX_STOPS or max(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidField(
            f"`stop` may have up to {MAX_STOPS} strings of up to {MAX_STOP_CHARS} characters",
            field="stop",
        )
    return stops


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Parse an object that maps token ids to additions to their logits. Raises InvalidField."""
    if value is None or value == []:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise InvalidField(
            f"`logit_bias` must be an object of up to {MAX_LOGIT_BIASES} token ids",
            field="logit_bias",
        )
    return tuple(_parse_bias(key, bias) for key, bias in value.items())


def _parse_bias(key: str, bias: Any) -> tuple[int, float]:
    # Limit the digits first: int() raises for thousands of digits.
    is_id = key.isascii() and key.isdecimal() and len(key) < 10
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_id or not is_number or not math.fabs(bias) <= MAX_LOGIT_BIAS:
        raise InvalidField(
            f"`logit_bias` must map token ids to numbers of up to {MAX_LOGIT_BIAS:g}",
            field=f"logit_bias.{key}",
        )
    return int(key), float(bias)


def parse_prompts(value: Any) -> list[str | tuple[int, ...]]:
    """Parse one or several texts or lists of token ids. Raises InvalidField or EmptyInput."""
    if value is None:
        raise InvalidField("Error in `prompt`: field required", field="prompt")
    parsed = TEXTS_OR_IDS.read(value, "prompt")
    is_single = isinstance(parsed, str) or isinstance(parsed[0], int)
    prompts: Sequence[Any] = [parsed] if is_single else parsed
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def parse_message(message: ChatRequestMessage, index: int) -> dict[str, Any]:
    """Build the message for the chat template, with text content.

    Parts are joined by line breaks, as in vLLM. Raises InvalidField for missing content and
    EmptyInput for an empty list. Only the content of an assistant may be null. With a refusal (then
    the content), tool calls or reasoning it may also be missing or an empty list. The result of a
    tool may be an empty list.
    """
    parsed: dict[str, Any] = {
        "role": TEMPLATE_ROLES.get(message.role, message.role),
        "content": _parse_content(message, index),
    }
    if message.name is not None:
        parsed["name"] = message.name
    if message.tool_call_id is not None:
        parsed["tool_call_id"] = message.tool_call_id
    if reasoning := _find_reasoning(message):
        parsed["reasoning_content"] = reasoning
    if message.tool_calls:
        parsed["tool_calls"] = [_parse_tool_call(call) for call in message.tool_calls]
    return parsed


def _parse_content(message: ChatRequestMessage, index: int) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content:
        return "\n".join(part.text for part in content)
    # An answer that ended within a tool call has null as content, and clients send it back.
    has_more = message.refusal is not None or message.tool_calls or _find_reasoning(message)
    is_null = content is None and "content" in message.model_fields_set
    if message.role == "assistant" and (is_null or has_more):
        return message.refusal or ""
    path = f"messages[{index}].content"
    if content is None:
        raise InvalidField(f"Error in `{path}`: field required", field=path)
    if message.role not in ("tool", "function"):
        raise EmptyInput(f"`{path}` is an empty list", field=path)
    return ""


def _find_reasoning(message: ChatRequestMessage) -> str | None:
    """Return the reasoning of a message of the assistant, which templates may repeat."""
    return message.reasoning_content or message.reasoning


def _parse_tool_call(call: ToolCall) -> dict[str, Any]:
    """Convert a tool call for the chat template."""
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    parsed = {"type": call.type, "function": function}
    return parsed if call.id is None else {"id": call.id, **parsed}


def _parse_arguments(text: str) -> dict[str, Any] | str:
    """Parse a JSON object, which chat templates expect. Return other text unchanged.

    A blank text becomes {}: clients may send it for a call without arguments.
    """
    if not text.strip():
        return {}
    with suppress(MalformedBody):
        value = parse_json(text.encode("utf-8", "replace"))
        if isinstance(value, dict):
            # parse_json checks the text, but converts integers beyond 64 bits to floats. json.loads
            # keeps them.
            return dict(json.loads(text))
    return text


def field_names(body: ChoicesBody) -> dict[str, str]:
    """Map the fields of a GenerationRequest to their names in the body, for errors."""
    names = {
        "choices": "n",
        "grammar": find_grammar_field(body),
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
    }
    if isinstance(body, CompletionBody):
        return names | {"inputs": "prompt", "prompt_logprobs": "echo"}
    assert isinstance(body, ChatBody)
    if body.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    if body.tool_choice not in (None, "none", "auto"):
        names["grammar"] = "tools"
    return names | {"inputs": "messages", "prompt": "messages"}
