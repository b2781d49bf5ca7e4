"""Arguments in the notation of Gemma 4: `{KEY:<|"|>TEXT<|"|>,KEY:1,KEY:{KEY:true},KEY:[1,2]}`.

Strings are between two equal marks and have no escapes. Keys have no quotation marks. The reader
reads each character once, because a text of the model may be long and hostile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from deployments.ingress.apis.openai.literals import JSON_NUMBER, JSON_WORDS, MAX_DEPTH
from deployments.messages import CALL_STRING

_BLANK = re.compile(r"\s*")
_KEY = re.compile(r"[^:{}\[\],]+")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
_BARE = re.compile(r"[^,{}\[\]]+")


def read_gemma_arguments(text: str) -> str | None:
    """Return the JSON object that `text` writes, or None if it is no such object."""
    reader = _Reader(text)
    try:
        arguments = reader.read_object(MAX_DEPTH)
    except ValueError:
        return None
    return arguments if reader.is_at_end else None


class _Reader:
    """Reader of one object. Raises ValueError where the text is none."""

    def __init__(self, text: str) -> None:
        self._text, self._position = text, 0

    @property
    def is_at_end(self) -> bool:
        return not self._text[self._position :].strip()

    def read_object(self, depth: int) -> str:
        return f"{{{', '.join(self._read_items('{', '}', self._read_member, depth))}}}"

    def _read_member(self, depth: int) -> str:
        key = self._read_string()
        if key is None:
            key = json.dumps(self._match(_KEY).strip(), ensure_ascii=False)
        self._expect(":")
        return f"{key}: {self._read_value(depth)}"

    def _read_value(self, depth: int) -> str:
        self._skip_blank()
        if (string := self._read_string()) is not None:
            return string
        if self._text.startswith("{", self._position):
            return self.read_object(depth)
        if self._text.startswith("[", self._position):
            return f"[{', '.join(self._read_items('[', ']', self._read_value, depth))}]"
        written = self._match(_BARE).strip()
        if written in JSON_WORDS:
            return JSON_WORDS[written]
        is_number = JSON_NUMBER.fullmatch(written) is not None
        return written if is_number else json.dumps(written, ensure_ascii=False)

    def _read_items(
        self, start: str, end: str, read: Callable[[int], str], depth: int
    ) -> list[str]:
        if depth == 0:
            raise ValueError("too deep")
        self._expect(start)
        items: list[str] = []
        while not self._has(end):
            if items:
                self._expect(",")
            self._skip_blank()
            items.append(read(depth - 1))
        return items

    def _read_string(self) -> str | None:
        """Read a string. Return it as JSON, or None if the text has none here."""
        if self._text.startswith(CALL_STRING, self._position):
            start = self._position + len(CALL_STRING)
            end = self._text.index(CALL_STRING, start)
            self._position = end + len(CALL_STRING)
            return json.dumps(self._text[start:end], ensure_ascii=False)
        found = _JSON_STRING.match(self._text, self._position)
        if found is None:
            return None
        self._position = found.end()
        json.loads(found[0])
        return found[0]

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._position)
        if found is None:
            raise ValueError("no value")
        self._position = found.end()
        return found[0]

    def _skip_blank(self) -> None:
        self._match(_BLANK)

    def _has(self, character: str) -> bool:
        """Read `character` after white space, if it follows."""
        self._skip_blank()
        if not self._text.startswith(character, self._position):
            return False
        self._position += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._has(character):
            raise ValueError(f"no {character}")
