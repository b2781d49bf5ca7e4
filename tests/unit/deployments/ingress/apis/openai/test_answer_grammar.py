"""Tests of the fields that constrain the text of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from deployments.ingress.apis.openai.answer_grammar import find_grammar_field
from deployments.ingress.apis.openai.schemas import CompletionBody
from tests.support.chat_harness import CHAT, CHAT_BODY, COMPLETIONS, ChatHarness

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "n", "schema": SCHEMA}


def read_grammar(harness: ChatHarness) -> tuple[str | None, Any]:
    """Return the kind and the value of the grammar that the generator received."""
    grammar = harness.call.options.grammar
    if grammar is None:
        return None, None
    value = orjson.loads(grammar.value) if grammar.kind == "json_schema" else grammar.value
    return grammar.kind, value or None


@pytest.mark.parametrize(
    ("form", "kind", "value"),
    [
        ({"type": "json_object"}, "json_object", None),
        ({"type": "json_object", "value": SCHEMA}, "json_schema", SCHEMA),
        ({"type": "json_object", "schema": SCHEMA}, "json_schema", SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, "json_schema", SCHEMA),
        ({"type": "json_schema", "json_schema": NAMED}, "json_schema", SCHEMA),
        ({"type": "json_schema", "value": NAMED}, "json_schema", SCHEMA),
        ({"type": "json_schema", "value": SCHEMA}, "json_schema", SCHEMA),
        ({"type": "json_schema", "value": orjson.dumps(NAMED).decode()}, "json_schema", SCHEMA),
        ({"type": "json", "value": SCHEMA}, "json_schema", SCHEMA),
        ({"type": "regex", "value": "[ab]+"}, "regex", "[ab]+"),
        ({"type": "text"}, None, None),
    ],
)
async def test_response_format_accepts_all_forms(
    form: dict[str, Any], kind: str | None, value: Any, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    response = await harness.post(CHAT, {**CHAT_BODY, "response_format": form})
    assert response.status_code == 200, response.text
    assert read_grammar(harness) == (kind, value)


@pytest.mark.parametrize(
    ("sent", "kind", "value"),
    [
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": orjson.dumps(SCHEMA).decode()}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_regex": "[ab]+", "response_format": {"type": "text"}}, "regex", "[ab]+"),
        ({"guided_choice": ["yes", "n/a (no)"]}, "regex", r"yes|n/a\ \(no\)"),
        ({"structured_outputs": {"choice": ["a.b"]}}, "regex", r"a\.b"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": False}},
            *("regex", "a"),
        ),
        ({"structured_outputs": {"json_object": True}}, "json_object", None),
        ({"structured_outputs": {}}, None, None),
        ({"grammar": "", "regex": None, "best_of": 1, "echo": False}, None, None),
        ({"ebnf": False, "chat_template": None, "prompt_logprobs": None}, None, None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_forms_of_other_servers_are_accepted(
    sent: dict[str, Any], kind: str | None, value: Any, path: str, writing_store: Path
) -> None:
    harness = ChatHarness(writing_store)
    response = await harness.post(path, {**CHAT_BODY, "prompt": "Once", **sent})
    assert response.status_code == 200, response.text
    assert read_grammar(harness) == (kind, value)


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"regex": "a"}, "regex"),
        ({"structured_outputs": {}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, "guided_regex"),
        ({}, "response_format"),
    ],
)
def test_errors_name_the_field_that_has_the_grammar(sent: dict[str, Any], field: str) -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "Once", **sent})
    assert find_grammar_field(body) == field
