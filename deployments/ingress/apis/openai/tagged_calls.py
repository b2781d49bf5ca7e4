"""Calls whose arguments are text between tags, in the two forms that models write.

    <function=NAME><parameter=KEY>VALUE</parameter></function>      Qwen3-Coder
    NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>          GLM-4.5

White space may surround the tags. The schema of a function decides which values are strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(?:(.*)</function>)?\s*", re.S)
_NAME = re.compile(r"\s*([^<\s]+)\s*((?:<arg_key>.*)?)", re.S)
# Models omit </parameter> at times. A line end after the first tag and before the last one is not
# part of the value.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)\s*", re.S
)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S)

ArgumentSchema = Mapping[str, Any]  # JSON Schema of the arguments of a function


class TaggedCall(NamedTuple):
    name: str
    arguments: str  # JSON object


def list_tagged_openings(names: Iterable[str], end: str) -> list[str]:
    """Return how calls of `names` may begin, without white space; `end` follows a call."""
    return [
        opening
        for name in names
        for opening in (f"<function={name}>", f"{name}<arg_key>", f"{name}{end}")
    ]


def read_name(text: str) -> str | None:
    """Return the name of the function of a call, which may lack its end."""
    found = _FUNCTION.match(text) or _NAME.match(text)
    return found and found[1]


def parse_tagged_call(text: str, schemas: Mapping[str, ArgumentSchema]) -> TaggedCall | None:
    """Parse a whole call without the marks around it. Return None for other texts."""
    for form, argument in ((_FUNCTION, _PARAMETER), (_NAME, _PAIR)):
        found = form.fullmatch(text)
        if found is None or found[2] is None:
            continue
        if (written := _split(found[2], argument)) is not None:
            schema = schemas.get(found[1], {})
            arguments = {key: _read_value(value, schema, key) for key, value in written}
            return TaggedCall(found[1], orjson.dumps(arguments).decode())
    return None


def _split(text: str, argument: re.Pattern[str]) -> list[tuple[str, str]] | None:
    """Return keys and values of a text that consists of arguments, else None."""
    written: list[tuple[str, str]] = []
    start = 0
    while start < len(text.rstrip()):
        found = argument.match(text, start)
        if found is None:
            return None
        written.append((found[1].strip(), found[2]))
        start = found.end()
    return written


def _read_value(text: str, schema: ArgumentSchema, key: str) -> Any:
    """Return the value of an argument: JSON, unless its type is a string or the text is no JSON."""
    properties = schema.get("properties")
    described = properties.get(key) if isinstance(properties, Mapping) else None
    kind = described.get("type") if isinstance(described, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    written = text.strip()
    if "string" in kinds and not (written == "null" and "null" in kinds):
        return text
    if "boolean" in kinds:  # some models write Python's literals
        written = written.lower()
    try:
        return msgspec.json.decode(written)
    except (ValueError, RecursionError):
        return text
