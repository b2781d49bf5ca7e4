"""Calls whose arguments are text between tags, or JSON after one, in the forms that models write.

    <function=NAME><parameter=KEY>VALUE</parameter></function>      Qwen3-Coder
    NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>          GLM-4.5
    NAME[CALL_ID]ID[ARGS]{"KEY": VALUE}                             Mistral, also without the id
    call:NAME{KEY:VALUE}                                            Gemma 4 (gemma_calls.py)

White space may surround the tags. The schema of a function decides which values are strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import msgspec

from deployments.ingress.apis.openai.gemma_calls import read_gemma_arguments
from deployments.ingress.apis.openai.literals import JSON_WORDS
from deployments.messages import CALL_ARGUMENTS, CALL_ID

FUNCTION = "<function="
_GEMMA = "call:"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_MAX_NAME_CHARS = 128

_FUNCTION = re.compile(rf"\s*{FUNCTION}([^>\s]+)>\s*")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
# A line end after the first tag and before the last one is not part of the value. The text of a
# value may contain tags: only one that another tag follows ends it.
_PARAMETER = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>|$)", re.S
)
# The same, also without </parameter>, which some models omit.
_LOOSE_PARAMETER = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?"
    r"(?:</parameter>\s*(?=<parameter=|</function>|$)|(?=<parameter=|</function>\s*$)|$)",
    re.S,
)
_NAME = re.compile(r"\s*([^<\[\s]+)\s*")
_NAME_BEFORE_JSON = re.compile(
    rf"\s*([^<\[\s]+)\s*(?:{re.escape(CALL_ID)}[^\[]*)?{re.escape(CALL_ARGUMENTS)}"
)
_GEMMA_NAME = re.compile(rf"\s*{_GEMMA}\s*([^{{\s]+)\s*(?={{)")
_PAIR = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S)
# A name at the start of a call without white space, and what follows it.
_BEGUN_FUNCTION = re.compile(rf"{FUNCTION}([^>]*)(>?)")
_BEGUN_NAME = re.compile(r"([^<\[]*)(.*)", re.S)

ArgumentSchema = Mapping[str, Any]  # JSON Schema of the arguments of a function


class ParsedCall(NamedTuple):
    name: str
    arguments: str  # JSON object


def may_start_tagged_call(text: str, names: Set[str], end: str) -> bool | None:
    """Return whether `text`, without white space, begins as a call; None if it is too short.

    `end` is the mark that follows a call.
    """
    if FUNCTION.startswith(text):
        return None
    if function := _BEGUN_FUNCTION.match(text):
        return function[1] in names if function[2] else may_become_name(function[1], names)
    if _GEMMA.startswith(text):
        return None
    if text.startswith(_GEMMA):
        name, brace, _ = text.removeprefix(_GEMMA).partition("{")
        return name in names if brace else may_become_name(name, names)
    found = _BEGUN_NAME.match(text)
    assert found is not None, "bug: the pattern matches any text"
    name, following = found.groups()
    if not following:
        return may_become_name(name, names)
    if name not in names:
        return False
    marks = (_KEY, end, CALL_ID, CALL_ARGUMENTS)
    if following.startswith(marks):
        return True
    return None if any(mark.startswith(following) for mark in marks) else False


def may_become_name(text: str, names: Set[str]) -> bool | None:
    """Return None if `text` is the start of a name, else False."""
    is_possible = len(text) <= _MAX_NAME_CHARS and any(name.startswith(text) for name in names)
    return None if is_possible else False


def read_begun_name(text: str) -> str | None:
    """Return the name of the function of a call that may lack its end, if the name is complete."""
    if found := _FUNCTION.match(text):
        return found[1]
    if found := _GEMMA_NAME.match(text):
        return found[1]
    found = _NAME.match(text)
    return found[1] if found and text.startswith(_KEY, found.end()) else None


def parse_tagged_calls(
    text: str, schemas: Mapping[str, ArgumentSchema], *, is_closed: bool, is_cut: bool
) -> list[ParsedCall] | None:
    """Parse a text that consists of complete calls. Return None for other texts.

    `is_closed` is whether the mark that ends a call follows. If so, tags that end a parameter or a
    function may be missing, unless a limit has cut the text.
    """
    if text.lstrip().startswith(FUNCTION):
        return _parse_functions(text, schemas, is_loose=is_closed and not is_cut)
    if found := _NAME_BEFORE_JSON.match(text):
        return _parse_json_arguments(found[1], text[found.end() :].strip())
    if found := _GEMMA_NAME.match(text):
        arguments = read_gemma_arguments(text[found.end() :])
        return None if arguments is None else [ParsedCall(found[1], arguments)]
    found = _NAME.match(text)
    if found is None or not is_closed:
        return None
    name, start, end = found[1], found.end(), len(text.rstrip())
    written = {}
    while start < end:
        pair = _PAIR.match(text, start)
        if pair is None:
            return None
        written[pair[1].strip()] = pair[2]
        start = pair.end()
    return [_build_call(name, written, schemas)]


def read_begun_json(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call of Mistral whose JSON lacks its end."""
    found = _NAME_BEFORE_JSON.match(text)
    return None if found is None else (found[1], text[found.end() :].strip())


def _parse_json_arguments(name: str, text: str) -> list[ParsedCall] | None:
    try:
        msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return [ParsedCall(name, text)] if text.startswith("{") else None


def _parse_functions(
    text: str, schemas: Mapping[str, ArgumentSchema], *, is_loose: bool
) -> list[ParsedCall] | None:
    argument = _LOOSE_PARAMETER if is_loose else _PARAMETER
    calls: list[ParsedCall] = []
    start, end = 0, len(text.rstrip())
    while start < end:
        function = _FUNCTION.match(text, start)
        if function is None:
            return None
        start, written = function.end(), {}
        while parameter := argument.match(text, start):
            written[parameter[1].strip()] = parameter[2]
            start = parameter.end()
        if last := _FUNCTION_END.match(text, start):
            start = last.end()
        elif start < end or not is_loose:
            return None
        calls.append(_build_call(function[1], written, schemas))
    return calls


def _build_call(
    name: str, written: Mapping[str, str], schemas: Mapping[str, ArgumentSchema]
) -> ParsedCall:
    root = schemas.get(name, {})
    properties = root.get("properties")
    described = properties if isinstance(properties, Mapping) else {}
    # JSON stays as written: numbers may have more digits than any type of Python keeps.
    members = (
        f"{json.dumps(key)}: {_read_value(value, set(_list_types(described.get(key), root)))}"
        for key, value in written.items()
    )
    return ParsedCall(name, f"{{{', '.join(members)}}}")


def _read_value(text: str, types: Set[str]) -> str:
    """Return a value as JSON: the text itself if it is JSON and no string is due, else a string."""
    written = text.strip()
    written = JSON_WORDS.get(written, written)
    is_null = written == "null" and "null" in types
    if "string" in types and not is_null:
        return json.dumps(text, ensure_ascii=False)
    try:
        msgspec.json.decode(written)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return written


def _list_types(schema: object, root: ArgumentSchema) -> Iterator[str]:
    """Yield the names of the types that a schema of a value states, also in its alternatives.

    `root` is the schema to which references are relative.
    """
    waiting, seen = [schema], set[str]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Mapping):
            continue
        stated = node.get("type")
        kinds = stated if isinstance(stated, list) else [stated]
        yield from (kind for kind in kinds if isinstance(kind, str))
        values = node.get("enum")
        constants = [*(values if isinstance(values, list) else []), node.get("const")]
        yield from ("string" for constant in constants if isinstance(constant, str))
        for keyword in ("anyOf", "oneOf", "allOf"):
            alternatives = node.get(keyword)
            waiting += alternatives if isinstance(alternatives, list) else []
        if isinstance(reference := node.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            waiting.append(_resolve(reference, root))


def _resolve(reference: str, root: ArgumentSchema) -> object:
    """Return the part of `root` that a reference such as `#/$defs/Unit` names, None without one."""
    start, *names = reference.split("/")
    node: object = root if start == "#" else None
    for name in names:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
