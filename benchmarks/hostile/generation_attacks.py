"""Requests for text that ask for too much, for nonsense, or for a grammar that never ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from benchmarks.hostile.wire import REFUSED, HostileRequest, post

ANSWERED = frozenset({200, *REFUSED})
MANY = 100_000
HUGE = 2**63 - 1
EVIL = "{{ ''.__class__.__mro__ }}{% for i in range(10**9) %}a{% endfor %}<|im_end|><|endoftext|>"


def on_generation(model_id: str) -> Iterator[HostileRequest]:
    """Attacks on every route of a model that generates text."""
    chat, completions = (
        f"/models/{model_id}/v1/{one}" for one in ("chat/completions", "completions")
    )
    user = {"role": "user", "content": "a"}
    for what, more in {**BOUNDS, **CHATS}.items():
        yield from _asked(chat, what, {"messages": [user], "max_tokens": 4, **more})
    for what, more in {**BOUNDS, **PROMPTS}.items():
        yield from _asked(completions, what, {"prompt": "a", "max_tokens": 4, **more})
    for what, more in openai_grammars().items():
        yield _attack(chat, what, {"messages": [user], "max_tokens": 4, **more})
        yield _attack(completions, what, {"prompt": "a", "max_tokens": 4, "stream": True, **more})
    for what, more in TGI_BOUNDS.items():
        body = {"inputs": "a", "parameters": {"max_new_tokens": 4, **more}}
        for route in ("/generate", "/generate_stream", ""):
            yield _attack(f"/models/{model_id}{route}", what, body)
    for what, more in tgi_grammars().items():
        body = {"inputs": "a", "parameters": {"max_new_tokens": 4, **more}}
        yield _attack(f"/models/{model_id}/generate", what, body)
    for what, inputs in INPUTS.items():
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 4}}
        yield from _asked(f"/models/{model_id}", what, body)


def _asked(path: str, what: str, body: Mapping[str, Any]) -> Iterator[HostileRequest]:
    """Whole and as a stream."""
    yield _attack(path, what, body)
    yield _attack(path, f"{what}, streamed", {**body, "stream": True})


def _attack(path: str, what: str, body: Mapping[str, Any]) -> HostileRequest:
    return HostileRequest(f"{path}: {what}", post(path, orjson.dumps(body)), ANSWERED)


# Of both of OpenAI's routes.
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "no end": {"max_tokens": HUGE},
    "a number of tokens that is none": {"max_tokens": 1e300},
    "a billion answers": {"n": 10**9},
    "minus one answer": {"n": -1},
    "the hottest temperature": {"temperature": 1e308},
    "the coldest temperature": {"temperature": 5e-324},
    "a share of next to nothing": {"top_p": 5e-324, "min_p": 1.0, "typical_p": 5e-324},
    "a top_k beyond 64 bits": {"top_k": 2**64 - 1},
    "the last seed": {"seed": HUGE},
    "a seed too far": {"seed": 2**64 - 1},
    "a megabyte of stop": {"stop": "s" * 1_000_000},
    "many stops": {"stop": ["s"] * 10_000},
    "many biases": {"logit_bias": {str(i): 100 for i in range(10_000)}},
    "a bias of all digits": {"logit_bias": {"9" * 5_000: 1}},
    "a bias for no token": {"logit_bias": {"999999999": 100}},
    "every token forbidden": {"logit_bias": {str(i): -100 for i in range(266)}},
    "penalties at their ends": {
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "repetition_penalty": 100,
    },
    "more tokens at least than at most": {"min_tokens": 10**6},
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
        "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
    },
    "tools of a megabyte": {
        "tools": [{"type": "function", "function": {"name": "f", "description": "d" * 1_000_000}}]
    },
    "a tool that never ends": {
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
    "a choice of no tool": {"tool_choice": {"type": "function", "function": {"name": EVIL}}},
}
PROMPTS: Mapping[str, Mapping[str, Any]] = {
    "a prompt of 300,000 characters": {"prompt": "x" * 300_000},
    "a prompt of many ids": {"prompt": [1] * MANY},
    "ids that are no tokens": {"prompt": [2**31, 2**63 - 1]},
    "many prompts": {"prompt": ["a"] * 300},
    "many prompts, each several times": {"prompt": ["a"] * 40, "n": 8, "best_of": 8},
    "special tokens in a text": {"prompt": EVIL},
    "a text of no letters": {"prompt": "\u202e\u0301\ufeff\U0010ffff\u0000"},
    "an echo of everything": {"echo": True, "logprobs": 20, "prompt": "a " * 200},
    "an echo of a text that is too long": {"echo": True, "logprobs": 20, "prompt": "a " * 9_000},
}
TGI_BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "no end": {"max_new_tokens": HUGE},
    "the hottest temperature": {"temperature": 1e308},
    "the coldest temperature": {"temperature": 5e-324},
    "the best of a billion": {"best_of": 10**9, "do_sample": True},
    "a billion answers": {"num_return_sequences": 10**9, "do_sample": True},
    "no time": {"max_time": 0},
    "all of time": {"max_time": 1e308},
    "a prompt cut to nothing": {"truncate": 0},
    "a prompt cut to everything": {"truncate": HUGE},
    "many alternatives": {"top_n_tokens": HUGE},
    "a penalty of next to nothing": {"repetition_penalty": 5e-324},
    "a penalty beyond all": {"repetition_penalty": 1e308},
    "a megabyte of stop": {"stop": ["s" * 1_000_000]},
    "the last seed": {"seed": 2**64 - 1},
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
    "an expression of nothing": "[^\\x00-\\U0010ffff]",
}
SCHEMAS: Mapping[str, Any] = {
    "a schema that means itself": {"$ref": "#"},
    "a schema from elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a schema from a file": {"$ref": "file:///etc/passwd"},
    "a schema of nothing": {"enum": []},
    "a schema that is false": {"allOf": [{"type": "string"}, {"type": "integer"}]},
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
    """Every expression and schema as a `response_format`."""
    expressions = {
        what: {"response_format": {"type": "regex", "value": value}}
        for what, value in EXPRESSIONS.items()
    }
    schemas = {
        what: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": one}}
        }
        for what, one in SCHEMAS.items()
    }
    return {**expressions, **schemas}


def tgi_grammars() -> dict[str, Mapping[str, Any]]:
    """Every expression and schema as a `grammar`."""
    kinds = (("regex", EXPRESSIONS), ("json", SCHEMAS))
    return {
        what: {"grammar": {"type": kind, "value": value}}
        for kind, named in kinds
        for what, value in named.items()
    }
