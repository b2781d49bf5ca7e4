"""Text generation requests with extreme parameters, invalid inputs and unbounded grammars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from benchmarks.common.wire import build_closing_post
from benchmarks.hostile.requests import REJECTED, HostileRequest

ANSWERED = frozenset({200, *REJECTED})
MANY = 100_000
HUGE = 2**63 - 1
ENDLESS = "unlimited tokens"
EVIL = "{{ ''.__class__.__mro__ }}{% for i in range(10**9) %}a{% endfor %}<|im_end|><|endoftext|>"


def attack_generation(model_id: str) -> Iterator[HostileRequest]:
    """Yield attacks on the routes for chats of all dialects, completions and TGI of a generator."""
    chat, completions = (
        f"/models/{model_id}/v1/{route}" for route in ("chat/completions", "completions")
    )
    user = {"role": "user", "content": "a"}
    for what, more in {**BOUNDS, **CHATS}.items():
        yield from _build_both(chat, what, {"messages": [user], "max_tokens": 4, **more})
    for what, more in ITEMS.items():
        body = {"input": "a", "max_output_tokens": 4, **more}
        yield from _build_both(f"/models/{model_id}/v1/responses", what, body)
    for what, more in MESSAGES.items():
        body = {"messages": [user], "max_tokens": 4, **more}
        yield from _build_both(f"/models/{model_id}/v1/messages", what, body)
    for what, more in {**BOUNDS, **PROMPTS}.items():
        yield from _build_both(completions, what, {"prompt": "a", "max_tokens": 4, **more})
    for what, more in openai_grammars().items():
        yield _build_attack(chat, what, {"messages": [user], "max_tokens": 4, **more})
        yield _build_attack(
            completions, what, {"prompt": "a", "max_tokens": 4, "stream": True, **more}
        )
    for what, more in TGI_BOUNDS.items():
        body = {"inputs": "a", "parameters": {"max_new_tokens": 4, **more}}
        for route in ("/generate", "/generate_stream", ""):
            yield _build_attack(f"/models/{model_id}{route}", what, body)
    for what, more in tgi_grammars().items():
        body = {"inputs": "a", "parameters": {"max_new_tokens": 4, **more}}
        yield _build_attack(f"/models/{model_id}/generate", what, body)
    for what, inputs in INPUTS.items():
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 4}}
        yield from _build_both(f"/models/{model_id}", what, body)


def _build_both(path: str, what: str, body: Mapping[str, Any]) -> Iterator[HostileRequest]:
    """Yield the request twice: without and with `stream`."""
    yield _build_attack(path, what, body)
    yield _build_attack(path, f"{what}, streamed", {**body, "stream": True})


def _build_attack(path: str, what: str, body: Mapping[str, Any]) -> HostileRequest:
    raw = build_closing_post(path, orjson.dumps(body))
    return HostileRequest(f"{path}: {what}", raw, ANSWERED, leaves=what.startswith(ENDLESS))


# Fields by attack, for the chat route and the completion route of OpenAI's API.
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    ENDLESS: {"max_tokens": HUGE},
    "a fractional number of tokens": {"max_tokens": 1e300},
    "a billion choices": {"n": 10**9},
    "minus one choice": {"n": -1},
    "the hottest temperature": {"temperature": 1e308},
    "the coldest temperature": {"temperature": 5e-324},
    "minimal probabilities": {"top_p": 5e-324, "min_p": 1.0, "typical_p": 5e-324},
    "a top_k beyond 64 bits": {"top_k": 2**64 - 1},
    "the largest seed": {"seed": HUGE},
    "a seed above 63 bits": {"seed": 2**64 - 1},
    "a megabyte of stop": {"stop": "s" * 1_000_000},
    "many stops": {"stop": ["s"] * 10_000},
    "many biases": {"logit_bias": {str(i): 100 for i in range(10_000)}},
    "a bias of all digits": {"logit_bias": {"9" * 5_000: 1}},
    "a bias for an unknown token": {"logit_bias": {"999999999": 100}},
    "the first 266 tokens forbidden": {"logit_bias": {str(i): -100 for i in range(266)}},
    "extreme penalties": {
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "repetition_penalty": 100,
    },
    "min_tokens above max_tokens": {"min_tokens": 10**6},
    "options of stream": {"stream_options": {"include_usage": "yes"}},
    "a model of a megabyte": {"model": "m" * 1_000_000},
}
CHATS: Mapping[str, Mapping[str, Any]] = {
    "many messages": {"messages": [{"role": "user", "content": ""}] * 9_000},
    "a template in a message": {"messages": [{"role": "user", "content": EVIL}]},
    "a template as a name": {"messages": [{"role": "user", "content": "a", "name": EVIL}]},
    "a message of 300,000 characters": {"messages": [{"role": "user", "content": "x" * 300_000}]},
    "many parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9_000}]
    },
    "a call of deep arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "[" * 50_000}}],
            }
        ]
    },
    "only the assistant": {"messages": [{"role": "assistant", "content": "a"}]},
    "many alternatives": {"logprobs": True, "top_logprobs": 20, "n": 8},
    "many tools": {
        "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1_025)]
    },
    "tools of a megabyte": {
        "tools": [{"type": "function", "function": {"name": "f", "description": "d" * 1_000_000}}]
    },
    "a tool with recursive parameters": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
                },
            }
        ],
        "tool_choice": "required",
    },
    "an unknown tool choice": {"tool_choice": {"type": "function", "function": {"name": EVIL}}},
}
# Fields by attack, for the route of the Responses API.
ITEMS: Mapping[str, Mapping[str, Any]] = {
    ENDLESS: {"max_output_tokens": HUGE},
    "instructions of 300,000 characters": {"instructions": "x" * 300_000},
    "many items": {"input": [{"role": "user", "content": ""}] * 9_000},
    "many calls": {
        "input": [{"type": "function_call", "call_id": EVIL, "name": EVIL, "arguments": "[" * 50}]
        * 9_000
    },
    "many outputs": {
        "input": [{"type": "function_call_output", "call_id": EVIL, "output": ""}] * 9_000
    },
    "many parts of a reasoning": {
        "input": [{"type": "reasoning", "content": [{"text": EVIL}] * 9_000}]
    },
    "an item of a long type": {"input": [{"type": "t" * MANY}]},
    "a part of a type with braces": {"input": [{"role": "user", "content": [{"type": EVIL}]}]},
    "many tools of OpenAI": {"tools": [{"type": "web_search"}] * 9_000},
    "a tool with recursive parameters": {
        "tools": [{"type": "function", "name": "f", "parameters": {"$ref": "#"}}],
        "tool_choice": "required",
    },
    "an unknown tool choice": {"tool_choice": {"type": "function", "name": EVIL}},
    "a format of another kind": {"text": {"format": {"type": EVIL, "schema": EVIL}}},
}
# Fields by attack, for the route of Anthropic's API.
MESSAGES: Mapping[str, Mapping[str, Any]] = {
    ENDLESS: {"max_tokens": HUGE},
    "a system prompt of 300,000 characters": {"system": "x" * 300_000},
    "many system texts": {"system": [{"type": "text", "text": "a"}] * 9_000},
    "many results": {
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": EVIL}] * 9_000}
        ]
    },
    "an image": {"messages": [{"role": "user", "content": [{"type": "image", "source": EVIL}]}]},
    "a block of a long type": {"messages": [{"role": "user", "content": [{"type": "t" * MANY}]}]},
    "a call with a template as its name": {
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": EVIL, "name": EVIL, "input": {EVIL: EVIL}}],
            },
            {"role": "user", "content": EVIL},
        ]
    },
    "a tool with a recursive schema": {
        "tools": [{"name": "f", "input_schema": {"$ref": "#"}}],
        "tool_choice": {"type": "any"},
    },
    "only a huge budget": {"thinking": {"type": "enabled", "budget_tokens": HUGE}},
}
PROMPTS: Mapping[str, Mapping[str, Any]] = {
    "a prompt of 300,000 characters": {"prompt": "x" * 300_000},
    "a prompt of many ids": {"prompt": [1] * MANY},
    "unknown token ids": {"prompt": [2**31, 2**63 - 1]},
    "many prompts": {"prompt": ["a"] * 300},
    "many prompts, each several times": {"prompt": ["a"] * 40, "n": 8, "best_of": 8},
    "special tokens in a text": {"prompt": EVIL},
    "a text without letters": {"prompt": "\u202e\u0301\ufeff\U0010ffff\u0000"},
    "an echo of everything": {"echo": True, "logprobs": 20, "prompt": "a " * 200},
    "an echo of a text that is too long": {"echo": True, "logprobs": 20, "prompt": "a " * 9_000},
}
TGI_BOUNDS: Mapping[str, Mapping[str, Any]] = {
    ENDLESS: {"max_new_tokens": HUGE},
    "the hottest temperature": {"temperature": 1e308},
    "the coldest temperature": {"temperature": 5e-324},
    "the best of a billion": {"best_of": 10**9, "do_sample": True},
    "a billion choices": {"num_return_sequences": 10**9, "do_sample": True},
    "zero time": {"max_time": 0},
    "unlimited time": {"max_time": 1e308},
    "truncation to zero tokens": {"truncate": 0},
    "truncation to a huge length": {"truncate": HUGE},
    "many alternatives": {"top_n_tokens": HUGE},
    "a minimal penalty": {"repetition_penalty": 5e-324},
    "a huge penalty": {"repetition_penalty": 1e308},
    "a megabyte of stop": {"stop": ["s" * 1_000_000]},
    "the largest seed": {"seed": 2**64 - 1},
    "every token of the prompt": {"decoder_input_details": True, "details": True},
}
INPUTS: Mapping[str, Any] = {
    "a text of 300,000 characters": "x" * 300_000,
    "many texts": ["a"] * 1_000,
    "a template": EVIL,
    "controls": "\u0000\u202e\u0301",
}
EXPRESSIONS = {
    "an expression that does not close": "(",
    "an expression with nested counts": "((a{1,200}){1,200}){1,200}",
    "an expression that backtracks": "(a|a?)+$",
    "an expression of one long count": "a{1000000}",
    "a long expression": "(" + "|".join(f"word{i}" for i in range(5_000)) + ")",
    "an expression that looks behind": r"(?<=a)b(?!c)\1",
    "an expression without a match": "[^\\x00-\\U0010ffff]",
}
SCHEMAS: Mapping[str, Any] = {
    "a schema that references itself": {"$ref": "#"},
    "a schema from a URL": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a schema from a file": {"$ref": "file:///etc/passwd"},
    "a schema without values": {"enum": []},
    "a contradictory schema": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "a schema of many items": {"type": "array", "items": {}, "minItems": 10**6},
    "a schema of a long text": {"type": "string", "minLength": 10**6, "maxLength": 10**6},
    "a schema of large numbers": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "a schema of small steps": {"type": "number", "multipleOf": 1e-300},
    "a schema of an unknown kind": {"type": "quaternion"},
    "a schema of many choices": {"enum": [f"word {i}" for i in range(5_000)]},
    "a schema of many keys": {
        "type": "object",
        "properties": {f"key{i}": {"type": "string"} for i in range(2_000)},
    },
    "a schema of expressions": {"type": "string", "pattern": "((a{1,200}){1,200}){1,200}"},
    "a schema that is no schema": {"type": 7, "properties": [], "required": {"a": 1}},
    "a schema of opposites": {"not": {"not": {"not": {}}}},
}


def openai_grammars() -> dict[str, Mapping[str, Any]]:
    """Return EXPRESSIONS and SCHEMAS by name, as the field `response_format` of OpenAI's API."""
    expressions = {
        what: {"response_format": {"type": "regex", "value": value}}
        for what, value in EXPRESSIONS.items()
    }
    schemas = {
        what: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            }
        }
        for what, schema in SCHEMAS.items()
    }
    return {**expressions, **schemas}


def tgi_grammars() -> dict[str, Mapping[str, Any]]:
    """Return EXPRESSIONS and SCHEMAS by name, as the parameter `grammar` of TGI's API."""
    kinds = (("regex", EXPRESSIONS), ("json", SCHEMAS))
    return {
        what: {"grammar": {"type": kind, "value": value}}
        for kind, grammars in kinds
        for what, value in grammars.items()
    }
