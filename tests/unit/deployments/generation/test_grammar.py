from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any, NoReturn

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from deployments.errors import EngineFailed, InvalidField
from deployments.generation.grammar import (
    MAX_CHARACTERS,
    MAX_REASON_CHARACTERS,
    RETRY_COSTLY_S,
    Constraint,
    GrammarCompiler,
    GrammarTooCostly,
)
from deployments.generation.grammar_trials import GrammarTrials, Trial
from deployments.messages import Grammar
from tests.support.small_tokenizers import END, START, byte_level

TOKENIZER = byte_level()
KNOWN = TOKENIZER.get_vocab_size()
VOCABULARY = KNOWN + 21  # models often pad the vocabulary to a round number
ENDS = (TOKENIZER.token_to_id(END), TOKENIZER.token_to_id(START))

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"enum": ["river", "city", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
EITHER = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]}
LINKED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(TOKENIZER.to_str(), VOCABULARY, ENDS)) as opened:
        yield opened


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))


def regex(pattern: str) -> Grammar:
    return Grammar("regex", pattern)


def written(constraint: Constraint, seed: int, most: int = 400) -> str:
    """Generate text from random allowed tokens. End at random where the grammar allows an end."""
    draw = random.Random(seed)
    closing = [i for i in range(KNOWN) if set(TOKENIZER.decode([i])) & set('"}]')]
    ids: list[int] = []
    while not constraint.is_complete:
        allowed = np.flatnonzero(constraint.compute_allowed()).tolist()
        if set(ENDS) & set(allowed) and (draw.random() < 0.5 or len(ids) > most):
            break
        tokens = [i for i in allowed if i not in ENDS]
        closers = [
            i for i in tokens if i in closing
        ]  # prefer closing tokens to keep strings and lists short
        token = draw.choice(closers if closers and draw.random() < 0.4 else tokens)
        constraint.accept(token)
        ids.append(token)
        assert len(ids) < 2 * most
    text: str = TOKENIZER.decode(ids)
    return text


@pytest.mark.parametrize("wanted", [PERSON, EITHER, LINKED, {}], ids=lambda value: str(value)[:40])
def test_random_allowed_tokens_match_the_json_schema(
    wanted: Any, compiler: GrammarCompiler
) -> None:
    texts = {written(compiler.compile(schema(wanted)), seed) for seed in range(25)}
    assert len(texts) > 5
    for text in texts:
        # Random tokens produce escaped control characters, which valid JSON may contain.
        jsonschema.validate(json.loads(text), wanted)


def test_schema_with_properties_yields_an_object(compiler: GrammarCompiler) -> None:
    """As in the examples of huggingface_hub and text-generation-inference, which omit the type."""
    inner = {"properties": {"properties": {"type": "integer"}}, "required": ["properties"]}
    wanted = {"properties": {"where": inner}, "required": ["where"], "additionalProperties": False}
    for seed in range(10):
        found = json.loads(written(compiler.compile(schema(wanted)), seed))
        assert isinstance(found["where"]["properties"], int)


def test_keywords_without_an_effect_are_ignored(compiler: GrammarCompiler) -> None:
    """Generators of schemas write them, such as zod, and the types of Anthropic's SDK."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "required": None}
    items = {"type": "array", "uniqueItems": False, "items": {"type": "integer"}}
    wanted = {
        "properties": {"record": record | {"properties": None}, "items": items},
        "required": ["record", "items"],
        "additionalProperties": False,
    }
    found = json.loads(written(compiler.compile(schema(wanted)), 0))
    assert isinstance(found["record"], dict)
    assert all(isinstance(item, int) for item in found["items"])
    for effective in ({"uniqueItems": True}, {"propertyNames": {"maxLength": 3}}):
        with pytest.raises(InvalidField, match="Unimplemented"):
            compiler.compile(schema({"type": "object"} | effective))


def test_json_object_grammar_yields_an_object(compiler: GrammarCompiler) -> None:
    values = [
        json.loads(written(compiler.compile(Grammar("json_object")), seed)) for seed in range(25)
    ]
    assert all(isinstance(value, dict) for value in values)
    assert any(values)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{4}-\d{2}-\d{2}",
        "(the|a) (river|city)+",
        "^anchored$",
        "[^a-z]{1,5}",
        "(?i)river",
        "é日{2}🙂?",
        "a*",
        'slash / and "quotes"\n',
        r"back\\/slash\s[/\d]",
        "|".join(map(re.escape, ("a b", "n/a (no)", "tab\tline\n", "é#&~-^$.|?", "<|end|>"))),
    ],
)
def test_random_allowed_tokens_match_the_regex(pattern: str, compiler: GrammarCompiler) -> None:
    for seed in range(15):
        text = written(compiler.compile(regex(pattern)), seed, most=20)
        assert re.fullmatch(pattern, text), text


def either_of_four(name: str) -> dict[str, Any]:
    return {"anyOf": [{"properties": {name: {"const": value}}} for value in range(4)]}


def follow(constraint: Constraint, text: str) -> None:
    for token in TOKENIZER.encode(text).ids:
        assert constraint.compute_allowed()[token], f"not {TOKENIZER.decode([token])!r} in {text!r}"
        constraint.accept(token)


def test_all_end_tokens_are_allowed_at_the_end(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(regex("12{2,3}"))
    assert not constraint.compute_allowed()[[*ENDS]].any()
    follow(constraint, "122")
    allowed = constraint.compute_allowed()
    assert allowed[[*ENDS]].all()
    assert allowed[TOKENIZER.token_to_id("2")]
    assert not constraint.is_complete
    follow(constraint, "2")
    assert constraint.is_complete
    assert set(np.flatnonzero(constraint.compute_allowed())) == set(ENDS)


def test_tokens_unknown_to_the_tokenizer_are_never_allowed(compiler: GrammarCompiler) -> None:
    allowed = compiler.compile(regex("(.|\n)*")).compute_allowed()
    assert allowed.shape == (VOCABULARY,)
    assert allowed.dtype == np.bool_
    assert allowed[:KNOWN].sum() > 200
    assert not allowed[KNOWN:].any()


def test_mask_is_cut_to_the_model_vocabulary() -> None:
    with closing(GrammarCompiler(TOKENIZER.to_str(), KNOWN - 10, ENDS)) as compiler:
        assert compiler.compile(regex(".*")).compute_allowed().shape == (KNOWN - 10,)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":[1,2]}', True),
        ('{"a": [1, 2]}', True),
        ('{ "a" : [ 1 ] }', True),
        ('{  "a": 1}', False),
        ('{\n"a": 1}', False),
        (' {"a": 1}', False),
    ],
)
def test_json_whitespace_is_limited_to_one_space(
    text: str, is_allowed: bool, compiler: GrammarCompiler
) -> None:
    constraint = compiler.compile(Grammar("json_object"))
    if is_allowed:
        follow(constraint, text)
        assert constraint.is_complete
    else:
        with pytest.raises(AssertionError, match="not '"):
            follow(constraint, text)


def test_constraints_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    first, second = (compiler.compile(regex("12")) for _ in range(2))
    follow(first, "12")
    assert first.is_complete
    assert not second.is_complete
    follow(second, "12")


def test_accept_of_forbidden_token_is_a_bug(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar("json_object"))
    with pytest.raises((EngineFailed, InvalidField)):
        constraint.accept(TOKENIZER.token_to_id("a"))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema("not json"), "not a JSON schema"),
        (schema("[1]"), "object"),
        (schema({"type": "nonsense"}), "nonsense"),
        (schema({"$ref": "#/nowhere"}), "nowhere"),
        (schema({"$ref": "https://example.com/schema.json"}), "example.com"),
        (schema({"type": "string", "pattern": "("}), "unclosed group"),
        (schema({"type": "integer", "minimum": 5, "maximum": 1}), "minimum"),
        (schema({"not": {}}), "not"),
        (schema(False), "object schema"),
        (schema({"$ref": "#"}), "no text"),
        (schema('{"items":' * 5000 + "{}" + "}" * 5000), "not a JSON schema"),
        (regex(""), "empty"),
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("(" * 5000 + "a" + ")" * 5000), ""),
        (regex("a" * (MAX_CHARACTERS + 1)), f"{MAX_CHARACTERS + 1} characters"),
        (schema(f'{{"title": "{"a" * MAX_CHARACTERS}"}}'), f"the maximum is {MAX_CHARACTERS}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_grammar_is_rejected_with_the_reason(
    grammar: Grammar, reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidField, match=f"cannot be used: .*{re.escape(reason)}") as raised:
        compiler.compile(grammar)
    assert raised.value.field == "grammar"
    assert len(raised.value.message) < MAX_REASON_CHARACTERS + 100
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "grammar",
    [
        regex("((a{1000}){1000}){1000}"),
        regex("(.*a.{300}b){50}"),
        schema({"type": "string", "pattern": "(.*a.{50}){30}"}),
        schema({"type": "integer", "multipleOf": 982451653}),
        schema({"type": "integer", "multipleOf": 9999991}),
        schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (1009, 1013, 1019)]}),
        schema(
            {"properties": {f"p{i}": {"type": "string"} for i in range(1500)}, "type": "object"}
        ),
        schema({"allOf": [either_of_four(f"a{i}") for i in range(10)]}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_growing_grammar_is_rejected(grammar: Grammar, compiler: GrammarCompiler) -> None:
    def read() -> None:
        constraint = compiler.compile(grammar)
        draw = random.Random(1)
        for _ in range(3000):
            allowed = np.flatnonzero(constraint.compute_allowed()).tolist()
            constraint.accept(draw.choice([i for i in allowed if i not in ENDS]))

    with pytest.raises(InvalidField) as raised:
        read()
    assert raised.value.field == "grammar"


@pytest.mark.parametrize(("age_s", "runs"), [(RETRY_COSTLY_S - 1, 1), (RETRY_COSTLY_S + 1, 2)])
def test_grammar_whose_trial_was_killed_is_tried_again_after_a_while(
    age_s: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have killed the trial because the host lacked memory, not for its cost."""
    trials: list[Trial | None] = [None, Trial(None, 1)]
    monkeypatch.setattr(GrammarTrials, "run", lambda *_: trials.pop(0))
    compiler = GrammarCompiler(TOKENIZER.to_str(), VOCABULARY, ENDS)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with pytest.raises(GrammarTooCostly):
        compiler.compile(regex("abc"))
    monkeypatch.setattr(time, "monotonic", lambda: now_s + age_s)
    with pytest.raises(GrammarTooCostly) if runs == 1 else nullcontext():
        compiler.compile(regex("abc"))
    assert len(trials) == 2 - runs


def test_tokenizer_without_bytes_is_rejected() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    compiler = GrammarCompiler(words.to_str(), 2, (1,))
    with pytest.raises(InvalidField, match="tokenizer") as raised:
        compiler.compile(Grammar("json_object"))
    assert raised.value.field == "grammar"


def test_unsupported_tokenizer_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def refuse(tokenizer: str, **_: object) -> NoReturn:
        parsed.append(tokenizer)
        raise ValueError("no bytes")

    monkeypatch.setattr("deployments.generation.grammar.LLTokenizer", refuse)
    compiler = GrammarCompiler(TOKENIZER.to_str(), VOCABULARY, ENDS)
    for call in (compiler.open, *[lambda: compiler.compile(Grammar("json_object"))] * 2):
        with pytest.raises(InvalidField, match="does not support grammars: no bytes"):
            call()
    assert len(parsed) == 1


def test_compile_is_thread_safe() -> None:
    with (
        closing(GrammarCompiler(TOKENIZER.to_str(), VOCABULARY, ENDS)) as compiler,
        ThreadPoolExecutor(4) as threads,
    ):
        constraints = list(threads.map(lambda n: compiler.compile(regex(f"1{{{n}}}")), range(1, 9)))
    for n, constraint in enumerate(constraints, start=1):
        for _ in range(n):
            follow(constraint, "1")
        assert constraint.is_complete
