"""From OpenAI's bodies to questions: prompts, conversations and how to sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from deployments.artifacts.generation_config import GenerationDefaults
from deployments.errors import InvalidField, MalformedBody
from deployments.generation.messages import Chat, GenerationOptions, Grammar, SamplingParams
from deployments.ingress.apis.openai.schemas import (
    ChatBody,
    ChatRequestMessage,
    CompletionBody,
    GenerationBody,
    ToolCall,
)
from deployments.ingress.apis.openai.tools import call_grammar, forced_tools, offered_tools
from deployments.ingress.generation import GenerationRequest
from deployments.ingress.http.bodies import parse_json
from deployments.ingress.http.request_options import RequestOptions
from deployments.ingress.limits import MAX_STOPS, STOP_CHARS
from deployments.ingress.tokenization import TEXTS_OR_IDS
from deployments.registry import RegisteredModel
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many

FORMAT_FIELD = "response_format"
FORMAT_TYPES = ("text", "json_object", "json_schema", "json", "regex")


def parse_grammar(form: Any) -> Grammar | None:
    """What the text must follow; None where it is free. Raises InvalidField.

    `{"type": "text"}`, `{"type": "json_object"}`, the latter also with a schema as `value`,
    `{"type": "json_schema", "json_schema": {"schema": ...}}`, `{"type": "json", "value": ...}` and
    `{"type": "regex", "value": ...}`.
    """
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidField(f"`{FORMAT_FIELD}` must be an object", field=FORMAT_FIELD)
    kind = form.get("type")
    if kind not in FORMAT_TYPES:
        known = ", ".join(f"`{one}`" for one in FORMAT_TYPES)
        raise InvalidField(
            f"`{FORMAT_FIELD}.type` must be one of {known}", field=f"{FORMAT_FIELD}.type"
        )
    if kind == "text":
        return None
    if kind == "regex":
        return Grammar("regex", _parse_expression(form))
    if kind == "json_schema":
        return build_schema_grammar(*_find_schema(form))
    value = form.get("value")
    if value is None and kind == "json_object":
        return Grammar("json_object")
    return build_schema_grammar(value, f"{FORMAT_FIELD}.value")


def build_schema_grammar(schema: Any, path: str) -> Grammar:
    """The grammar of a JSON schema. Raises InvalidField naming `path`."""
    if not isinstance(schema, dict):
        raise InvalidField(f"`{path}` must be a JSON schema, which is an object", field=path)
    return Grammar("json_schema", orjson.dumps(schema).decode())


def _parse_expression(form: dict[str, Any]) -> str:
    value = form.get("value")
    if not isinstance(value, str) or not value:
        path = f"{FORMAT_FIELD}.value"
        raise InvalidField(f"`{path}` must be a regular expression", field=path)
    return value


def _find_schema(form: dict[str, Any]) -> tuple[Any, str]:
    """The schema and its path; TGI puts what OpenAI calls `json_schema` in `value`."""
    key = "json_schema" if form.get("json_schema") is not None else "value"
    named = form.get(key)
    if not isinstance(named, dict) or (key == "value" and "schema" not in named):
        return named, f"{FORMAT_FIELD}.{key}"
    return named.get("schema"), f"{FORMAT_FIELD}.{key}.schema"


MAX_LOGIT_BIASES = 1_024
MAX_LOGIT_BIAS = 100.0
# As OpenAI has it; conversations may go on until the context is full.
DEFAULT_COMPLETION_TOKENS = 16
# The smallest share that still is one: only the likeliest token.
MIN_TOP_P = 1e-9
STOPS: Inputs[str | list[str]] = Inputs(
    one_or_many(NonEmptyText), "a string or a list of strings, none of them empty"
)
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


def parse_completion_request(
    body: CompletionBody, model: RegisteredModel, request: RequestOptions
) -> GenerationRequest:
    """What `/v1/completions` asks. Raises what `parse_prompts` and `parse_options` raise."""
    prompts = parse_prompts(body.prompt)
    told = body.logprobs is not None
    most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and (not body.echo or body.stream):
        raise InvalidField(
            "`max_tokens` must be at least 1, unless `echo` is true and nothing is streamed",
            field="max_tokens",
        )
    # What token ids mean is known to who computes them.
    spelled = any(isinstance(prompt, tuple) for prompt in prompts)
    return GenerationRequest(
        prompt=prompts[0],
        further_prompts=tuple(prompts[1:]),
        options=parse_options(body, model.generation_config.defaults)._replace(
            max_new_tokens=max(1, most),
            logprobs=body.logprobs,
            prompt_logprobs=bool(body.echo) and (told or spelled),
        ),
        model_id=model.ref.id,
        choices=body.n or 1,
        best_of=body.best_of,
        request_options=request,
    )


def parse_chat_request(
    body: ChatBody, model: RegisteredModel, request: RequestOptions
) -> GenerationRequest:
    """What `/v1/chat/completions` asks. Raises InvalidField or EmptyInput."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("`top_logprobs` needs `logprobs` to be true", field="top_logprobs")
    messages = tuple(parse_message(message, i) for i, message in enumerate(body.messages))
    tools = [tool.model_dump(exclude_unset=True) for tool in offered_tools(body)]
    options = parse_options(body, model.generation_config.defaults)
    if forced := forced_tools(body):
        options = options._replace(grammar=call_grammar(forced))
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return GenerationRequest(
        prompt=Chat(messages, tuple(tools)),
        options=options._replace(
            max_new_tokens=most, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        ),
        model_id=model.ref.id,
        choices=body.n or 1,
        request_options=request,
    )


def parse_options(body: GenerationBody, own: GenerationDefaults) -> GenerationOptions:
    """What both bodies say of how to sample and where to stop. Raises InvalidField.

    What a body leaves out is the model's `own`.
    """
    return GenerationOptions(
        sampling=parse_sampling(body, own),
        min_new_tokens=body.min_tokens or 0,
        stop=parse_stops(body.stop),
        grammar=parse_grammar(body.response_format),
    )


def parse_sampling(body: GenerationBody, own: GenerationDefaults) -> SamplingParams:
    """How to sample. Raises InvalidField for a bias that is none."""
    top_k = own.top_k if body.top_k is None else body.top_k
    top_p = own.top_p if body.top_p is None else max(body.top_p, MIN_TOP_P)
    penalty = body.repetition_penalty
    return SamplingParams(
        temperature=own.temperature if body.temperature is None else body.temperature,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=top_p,
        min_p=own.min_p if body.min_p is None else body.min_p,
        typical_p=own.typical_p if body.typical_p is None else body.typical_p,
        repetition_penalty=own.repetition_penalty if penalty is None else penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=parse_logit_bias(body.logit_bias),
        seed=None if body.seed is None else body.seed % 2**64,
    )


def parse_stops(value: Any) -> tuple[str, ...]:
    """`stop`. Raises InvalidField or EmptyInput."""
    if value is None or value == []:
        return ()
    read = STOPS.read(value, "stop")
    stops = (read,) if isinstance(read, str) else tuple(read)
    if len(stops) > MAX_STOPS or max(map(len, stops)) > STOP_CHARS:
        raise InvalidField(
            f"`stop` may have up to {MAX_STOPS} strings of up to {STOP_CHARS} characters",
            field="stop",
        )
    return stops


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """`logit_bias`: an object from token ids to what is added. Raises InvalidField."""
    if value is None or value == []:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise InvalidField(
            f"`logit_bias` must be an object of up to {MAX_LOGIT_BIASES} token ids",
            field="logit_bias",
        )
    return tuple(_parse_bias(key, bias) for key, bias in value.items())


def _parse_bias(key: str, bias: Any) -> tuple[int, float]:
    # Digits are counted first: Python refuses to read a number of thousands of them.
    is_id = key.isascii() and key.isdecimal() and len(key) < 10
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_id or not is_number or not math.fabs(bias) <= MAX_LOGIT_BIAS:
        raise InvalidField(
            f"`logit_bias` must name token ids, with a number of up to {MAX_LOGIT_BIAS:g} for each",
            field=f"logit_bias.{key}",
        )
    return int(key), float(bias)


def parse_prompts(value: Any) -> list[str | tuple[int, ...]]:
    """`prompt`: one, or several. Raises InvalidField or EmptyInput."""
    if value is None:
        raise InvalidField("Error in `prompt`: field required", field="prompt")
    read = TEXTS_OR_IDS.read(value, "prompt")
    single = isinstance(read, str) or isinstance(read[0], int)
    given: Sequence[Any] = [read] if single else read
    return [one if isinstance(one, str) else tuple(one) for one in given]


def parse_message(message: ChatRequestMessage, place: int) -> dict[str, Any]:
    """A message as chat templates read it, its content one string. Raises InvalidField."""
    told: dict[str, Any] = {
        "role": TEMPLATE_ROLES.get(message.role, message.role),
        "content": _content(message, place),
    }
    if message.name is not None:
        told["name"] = message.name
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        told["tool_calls"] = [_call(call) for call in message.tool_calls]
    return told


def _content(message: ChatRequestMessage, place: int) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        path = f"messages[{place}].content"
        raise InvalidField(f"Error in `{path}`: field required", field=path)
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _call(call: ToolCall) -> dict[str, Any]:
    """A call, its arguments the object that templates write down, where they are one."""
    given = call.function.arguments
    function = {"name": call.function.name, "arguments": given}
    if isinstance(given, str):
        with suppress(MalformedBody):
            parsed = parse_json(given.encode("utf-8", "replace"))
            function["arguments"] = parsed if isinstance(parsed, dict) else given
    told = {"type": call.type, "function": function}
    return told if call.id is None else {"id": call.id, **told}


def field_names(body: GenerationBody) -> dict[str, str]:
    """What the question's fields are called in the body."""
    names = {"choices": "n", "grammar": "response_format", "max_new_tokens": "max_tokens"}
    if isinstance(body, CompletionBody):
        return names | {"inputs": "prompt", "prompt_logprobs": "echo"}
    assert isinstance(body, ChatBody)
    if body.max_tokens is None and body.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    if body.tool_choice not in (None, "none", "auto"):
        names["grammar"] = "tools"
    return names | {"inputs": "messages", "prompt": "messages"}
