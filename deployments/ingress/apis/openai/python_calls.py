"""Calls written as a list in Python: `[NAME(KEY=VALUE, ...), ...]`, as by LFM2 and Llama 4.

Values are literals. The names of JSON's literals are read too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Set

from deployments.ingress.apis.openai.tagged_calls import TaggedCall, may_become_name

_BEGUN = re.compile(r"\s*\[\s*([^\s(\[{\"']+)\s*\(")
_LITERALS = {"true": True, "false": False, "null": None}  # JSON's


def may_start_python_calls(text: str, names: Set[str]) -> bool | None:
    """Return whether `text`, without white space, begins as a list of calls; None if too short."""
    if not text.startswith("["):
        return None if not text else False
    name, bracket, _ = text[1:].partition("(")
    return name in names if bracket else may_become_name(name, names)


def read_first_name(text: str) -> str | None:
    """Return the name of the first function of a list that may lack its end."""
    found = _BEGUN.match(text)
    return None if found is None else found[1]


def parse_python_calls(text: str) -> list[TaggedCall] | None:
    """Parse a text that is a list of calls. Return None for other texts."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        return [_read_call(call) for call in parsed.elts] if isinstance(parsed, ast.List) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read_call(node: ast.expr) -> TaggedCall:
    """Read a call of a named function. Raises ValueError for other expressions and values."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    # A keyword without a name is `**`, which is no literal.
    arguments = {str(each.arg): _read_value(each.value) for each in node.keywords if each.arg}
    if len(arguments) < len(node.keywords):
        raise ValueError("an argument is repeated or has no name")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return TaggedCall(ast.unparse(node.func), written)


def _read_value(node: ast.expr) -> object:
    match node:
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            texts = [ast.literal_eval(key) for key in keys if key is not None]
            if len(texts) < len(keys) or not all(isinstance(text, str) for text in texts):
                raise ValueError("a key is no text")
            return dict(zip(texts, map(_read_value, values), strict=True))
    value: object = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("the value has no form in JSON")
    return value
