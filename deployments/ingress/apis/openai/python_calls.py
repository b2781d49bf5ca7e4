"""Calls written as a list in Python: `[NAME(KEY=VALUE, ...), ...]`, as by LFM2 and Llama 4.

Values are literals of Python or JSON. Names and keys may be any words, also Python's keywords. The
scanner reads each character once, because a text of the model may be long and hostile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from typing import NamedTuple, NoReturn

from deployments.ingress.apis.openai.literals import JSON_NUMBER, JSON_WORDS, MAX_DEPTH
from deployments.ingress.apis.openai.tagged_calls import ParsedCall, may_become_name

_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"[^\s()\[\]{},='\"]+")
_WORD = re.compile(r"[-+.\w]+")
_DIGITS = re.compile(r"-?\d+")
# Text up to the end of a string or the next escape, by quotation mark.
_UNTIL = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_HEXADECIMAL = re.compile("[0-9a-fA-F]+")
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonCalls(NamedTuple):
    """Calls at the start of a text."""

    calls: list[ParsedCall]  # complete ones
    end: int | None  # of the list in the text; None: the text ends before the list
    begun: str | None = None  # name of the call at whose arguments the text ends

    @property
    def names(self) -> set[str]:
        names = {call.name for call in self.calls}
        return names if self.begun is None else {*names, self.begun}


def may_start_python_calls(text: str, names: Set[str]) -> bool | None:
    """Return whether `text`, without white space, begins as a list of calls; None if too short."""
    if not text.startswith("["):
        return None if not text else False
    name, bracket, _ = text[1:].partition("(")
    return name in names if bracket else may_become_name(name, names)


def scan_python_calls(text: str, start: int = 0) -> PythonCalls | None:
    """Scan the list of calls at `start`. Return None if the text there is another one."""
    scanner = _Scanner(text, start)
    try:
        scanner.read_calls()
    except _EndOfTextError:
        return PythonCalls(scanner.calls, None, scanner.begun) if scanner.has_name else None
    except ValueError:
        return None
    return PythonCalls(scanner.calls, scanner.position) if scanner.calls else None


class _EndOfTextError(Exception):
    pass


class _Scanner:
    """Reader of one list of calls. Raises ValueError where the text is no such list."""

    def __init__(self, text: str, position: int) -> None:
        self.position = position
        self.calls: list[ParsedCall] = []
        self.begun: str | None = None
        self.has_name = False  # whether a call has begun
        self._text = text

    def read_calls(self) -> None:
        self._read_items("[", "]", self._read_call)

    def _read_call(self) -> None:
        name = self._match(_NAME)
        arguments: dict[str, str] = {}

        def read_argument() -> None:
            key = self._match(_NAME)
            self._expect("=")
            if key in arguments:
                raise ValueError("an argument is repeated")
            arguments[key] = self._read_value(0)

        if self._peek() != "(":
            raise ValueError("no call")
        self.begun, self.has_name = name, True
        self._read_items("(", ")", read_argument)
        self.begun = None
        members = (f"{_to_json(key)}: {value}" for key, value in arguments.items())
        self.calls.append(ParsedCall(name, f"{{{', '.join(members)}}}"))

    def _read_value(self, depth: int) -> str:
        """Read a literal. Return it as JSON."""
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        items: list[str] = []
        match self._peek():
            case "'" | '"':
                return _to_json(self._read_string())
            case "[" | "(" as bracket:
                closing = "]" if bracket == "[" else ")"
                self._read_items(
                    bracket, closing, lambda: items.append(self._read_value(depth + 1))
                )
                return f"[{', '.join(items)}]"
            case "{":

                def read_member() -> None:
                    key = _to_json(self._read_string())
                    self._expect(":")
                    items.append(f"{key}: {self._read_value(depth + 1)}")

                self._read_items("{", "}", read_member)
                return f"{{{', '.join(items)}}}"
        word = self._match(_WORD)
        if word in JSON_WORDS:
            return JSON_WORDS[word]
        if JSON_NUMBER.fullmatch(word):
            return word  # numbers may have more digits than any type of Python keeps
        if _DIGITS.fullmatch(word):  # leading zeros, as in a postal code
            return _to_json(word)
        raise ValueError("no literal")

    def _read_items(self, opening: str, closing: str, read: Callable[[], None]) -> None:
        """Read items between brackets. A comma may follow the last one."""
        self._expect(opening)
        while self._peek() != closing:
            read()
            if self._peek() == closing:
                break
            self._expect(",")
        self._expect(closing)

    def _read_string(self) -> str:
        quote = self._peek()
        if quote not in _UNTIL:
            raise ValueError("no string")
        self.position += 1
        parts: list[str] = []
        while True:
            parts.append(self._take(_UNTIL[quote]))
            mark = self._next()
            if mark == quote:
                # Escapes of JSON spell characters beyond U+FFFF as pairs.
                text = "".join(parts)
                return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            parts.append(self._read_escape())

    def _read_escape(self) -> str:
        kind = self._next()
        if kind in _CODE_DIGITS:
            code = self._text[self.position : self.position + _CODE_DIGITS[kind]]
            if len(code) == _CODE_DIGITS[kind] and _HEXADECIMAL.fullmatch(code):
                self.position += len(code)
                return chr(int(code, 16))
            if self.position + _CODE_DIGITS[kind] > len(self._text):
                raise _EndOfTextError
        if kind in "\\'\"/":
            return kind
        return _ESCAPES.get(kind, f"\\{kind}")

    def _peek(self) -> str:
        """Return the next character that is not white space."""
        self._take(_BLANK)
        if self.position == len(self._text):
            raise _EndOfTextError
        return self._text[self.position]

    def _next(self) -> str:
        if self.position == len(self._text):
            raise _EndOfTextError
        self.position += 1
        return self._text[self.position - 1]

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise ValueError(f"no {character}")
        self.position += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Read a word, which the end of the text may have cut."""
        self._peek()
        word = self._take(pattern)
        if self.position == len(self._text):
            raise _EndOfTextError
        return word or _refuse()

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self.position)
        if found is None:
            return ""
        self.position = found.end()
        return found[0]


def _refuse() -> NoReturn:
    raise ValueError("no word")


def _to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
