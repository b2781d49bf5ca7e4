"""Tool calls: parsing of calls in generated text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

from deployments.ingress.apis.openai.python_calls import may_start_python_calls, scan_python_calls
from deployments.ingress.apis.openai.tagged_calls import (
    FUNCTION,
    ArgumentSchema,
    ParsedCall,
    may_start_tagged_call,
    parse_tagged_calls,
    read_begun_json,
    read_begun_name,
)
from deployments.messages import CALL_CLOSE, CALL_OPEN

MAX_PREFIX_CHARS = 1_000  # the first characters of a text decide whether it may be a call

# A mark before a call. Qwen3-Coder omits the first one at times.
_MARK = re.compile(rf"{CALL_OPEN}(?:\s*{FUNCTION})?|{FUNCTION}")
_MAX_QUOTED_MARKS = 8  # marks in the arguments of a call, which bound the work on a text
# The start of a call as JSON without white space, up to its first deciding member. The first member
# with the key `name`, `arguments` or `parameters` decides whether the text may be a call. Values of
# the members before it are strings, numbers or literals.
_STRING = r'"(?:[^"\\]|\\.)*"'
_KEY = rf'(?!"(?:name|arguments|parameters)":){_STRING}:'
_WORD = r"[-+.\w]"
_OPENING = re.compile(rf"(?:{CALL_OPEN})?\[?{{(?:{_KEY}(?:{_STRING}|{_WORD}+),)*")
# The start of a further member, which has another key and may be incomplete.
_STRING_START = r'"(?:[^"\\]|\\.)*(?:\\|")?'
_MEMBER_START = re.compile(rf"{_STRING_START}|{_KEY}(?:{_STRING_START}|{_WORD}*)")
_CLOSED_CALLS = re.compile(rf"\s*{CALL_OPEN}\s*[\[{{]")
# The start of a list of calls in Python, with or without a mark, and what may follow it.
_PYTHON_START = re.compile(rf"\s*({CALL_OPEN})?\s*(?=\[\s*[^\s\[{{\"\]])")
_CLOSE = re.compile(rf"\s*(?:{CALL_CLOSE}\s*)?")
# The start of a call whose first member is a complete name, as `call_grammar` demands it.
_CUT_CALL = re.compile(
    r'\s*{\s*"name"\s*:\s*"([^"]*)"(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*))?', re.S
)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call by the model. `arguments` is a JSON object in the model's formatting."""

    name: str
    arguments: str
    is_complete: bool = True  # False: the text ended early; `arguments` may be cut, or empty


class ParsedText(NamedTuple):
    """The content of a text, which is its characters `start` to `end` - 1, and its calls."""

    start: int
    end: int
    calls: tuple[FunctionCall, ...]


class WrittenCall(msgspec.Struct):
    """A JSON object that may be a call. Other keys are ignored."""

    name: str = ""
    tool_name: str = ""  # in place of `name`, of Command
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw(b"{}")


# Message of msgspec's error for JSON that lacks its end. The error has no class of its own.
TRUNCATED = "Input data was truncated"
WRITTEN_CALL = msgspec.json.Decoder(WrittenCall)
WRITTEN_CALLS = msgspec.json.Decoder(WrittenCall | list[WrittenCall])
_JSON = json.JSONDecoder()
_SEPARATOR = re.compile(r"\s*;?\s*")


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """Parser of calls of the functions `names`: a whole text, or the start or the end of a text.

    A call is a JSON object with `name` and `arguments` (or `parameters`), a list of such objects,
    or a list of calls in Python (python_calls.py). The marks CALL_OPEN and CALL_CLOSE may enclose
    it. Between them, one or more may also be written with tags (tagged_calls.py). Beside other
    text, only calls between marks count, and those amid other text are content. A stream holds text
    back while the text may be a call. The first MAX_PREFIX_CHARS characters of the text decide this
    (`may_start_tool_call`). A forced call has the form of `call_grammar`, and is never content.
    """

    names: frozenset[str]
    is_parallel: bool = True  # False: only the first of several calls counts
    is_forced: bool = False  # True: the text is one call, or its start if it ended early
    # Schemas of the arguments by name, for calls with tags.
    schemas: Mapping[str, ArgumentSchema] = field(default_factory=dict, compare=False)
    # A JSON object may be a call if its first deciding member starts with one of these texts.
    _members: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_members", tuple(list_deciding_members(self.names)))

    def may_start_tool_call(self, text: str) -> bool:
        """Return whether `text` begins as a call, or may still do so with more characters.

        Other members, such as `id`, may precede the first deciding member if their values are
        neither objects nor lists. A text that is undecided after MAX_PREFIX_CHARS is not a call.
        """
        start = "".join(text[:MAX_PREFIX_CHARS].split())
        tagged = start.removeprefix(CALL_OPEN)
        if tagged and (len(tagged) < len(start) or start.startswith(FUNCTION[: len(start)])):
            is_tagged = may_start_tagged_call(tagged, self.names, CALL_CLOSE)
            if is_tagged or (is_tagged is None and len(text) < MAX_PREFIX_CHARS):
                return True
        if is_python := may_start_python_calls(tagged, self.names):
            return True
        opening = _OPENING.match(start)
        if opening is None:
            is_json_undecided = f"{CALL_OPEN}[{{".startswith(start) or "[{".startswith(start)
            is_undecided = is_json_undecided or is_python is None
        else:
            member = start[opening.end() :]
            if member.startswith(self._members):
                return True
            is_undecided = any(each.startswith(member) for each in self._members) or bool(
                _MEMBER_START.fullmatch(member)
            )
        return is_undecided and len(text) < MAX_PREFIX_CHARS

    def count_content(self, text: str) -> int:
        """Return how many first characters cannot belong to a call, whatever follows `text`."""
        return 0 if self.may_start_tool_call(text) else self.find_marked_call(text)

    def find_marked_call(self, text: str) -> int:
        """Return the start of a marked call, or of an incomplete mark at the end of `text`.

        If `text` has neither, return its length.
        """
        if (found := self._find_mark(text, 0)) < len(text):
            return found
        return min(len(remove_begun(text, mark)) for mark in (CALL_OPEN, FUNCTION))

    def parse_tool_calls(
        self, text: str, *, is_cut: bool = False, follows_content: bool = False
    ) -> ParsedText:
        """Return the content of a text, and the calls before and after it.

        The text is whole, or follows content that a stream has sent: then no call precedes content.
        The last call may be incomplete if `is_cut`: a limit or a stop string ended the text. The
        text is split only at marks that may start a call.
        """
        if self.is_forced:
            whole = self._parse_block(text)
            return ParsedText(0, 0, parse_cut_call(text) if whole is None else tuple(whole))
        content_start = content_end = start = 0
        first_calls: list[FunctionCall] = []  # before the content
        calls: list[FunctionCall] = []
        while start < len(text):
            is_first = content_end == 0 and not follows_content
            end, parsed = self._parse_from(text, start, is_cut=is_cut, is_first=is_first)
            if parsed is not None:
                calls += parsed
            elif is_cut and calls and end == len(text) and self._is_mark(text[start:end]):
                pass  # the start of a further call, which has no name yet
            elif content_end == 0 and not follows_content:
                content_start, content_end = start, end
                first_calls, calls = calls, []
            else:
                content_end, calls = end, []
            start = end
        calls = [*first_calls, *calls]
        if not calls:
            return ParsedText(0, len(text), ())
        return ParsedText(
            content_start, content_end, tuple(calls if self.is_parallel else calls[:1])
        )

    def _find_mark(self, text: str, start: int) -> int:
        """Return the first position from `start` where a marked call may begin.

        If there is none, return the length of `text`.
        """
        while found := _MARK.search(text, start):
            if self.may_start_tool_call(text[found.start() : found.start() + MAX_PREFIX_CHARS]):
                return found.start()
            start = found.end()
        return len(text)

    def _find_next_mark(self, text: str, mark: int) -> int:
        """Return the position of the next mark after the one at `mark`, if there is one there."""
        found = _MARK.match(text, mark)
        return self._find_mark(text, mark + 1 if found is None else found.end())

    def _parse_from(
        self, text: str, start: int, *, is_cut: bool, is_first: bool
    ) -> tuple[int, list[FunctionCall] | None]:
        """Parse the text from `start` to the next mark. Return its end and calls, None for content.

        If nothing but calls comes before (`is_first`), other text may follow. A mark may be part of
        an argument. After the start of a call, the text to the mark after next is therefore tried,
        and so on.
        """
        following = first = self._find_next_mark(text, start)
        if python := _PYTHON_START.match(text, start):
            return self._scan_python(text, python, first, is_cut=is_cut, is_first=is_first)
        for _ in range(_MAX_QUOTED_MARKS):
            block = text[start:following]
            parsed = self._parse_block(block, is_cut=is_cut and following == len(text))
            if parsed is not None:
                return following, parsed
            if is_first and following == first and (closed := self._parse_closed(block)):
                return start + closed[0], closed[1]
            if not self._is_begun(block):
                break
            if following == len(text):
                return following, self._parse_cut_block(block) if is_cut else None
            following = self._find_next_mark(text, following)
        return first, None

    def _scan_python(
        self, text: str, begun: re.Match[str], next_mark: int, *, is_cut: bool, is_first: bool
    ) -> tuple[int, list[FunctionCall] | None]:
        """Parse what may be a list of calls in Python as `_parse_from` does.

        The list has an end of its own, so a string in it may quote marks.
        """
        scanned = scan_python_calls(text, begun.end())
        if scanned is None or not self.names.issuperset(scanned.names):
            return next_mark, None
        calls = [FunctionCall(call.name, call.arguments) for call in scanned.calls]
        if scanned.end is None:
            if scanned.begun is not None:
                calls.append(FunctionCall(scanned.begun, "", is_complete=False))
            return len(text), calls if is_cut else None
        closed = _CLOSE.match(text, scanned.end)
        assert closed is not None, "bug: the pattern matches any text"
        end, following = closed.end(), self._find_mark(text, closed.end())
        rest, is_closed = text[end:following].strip(), CALL_CLOSE in closed[0]
        if not is_closed and not remove_begun(rest, CALL_CLOSE):
            rest = ""
        if not rest:
            return following, calls
        if is_closed and is_first and begun[1] is not None:
            return end, calls
        return following, None

    def _parse_closed(self, block: str) -> tuple[int, list[FunctionCall]] | None:
        """Parse the calls up to a CALL_CLOSE of a marked block that ends with other text.

        A call with tags may quote CALL_CLOSE in a value, so it must end the block.
        """
        if _CLOSED_CALLS.match(block) is None:
            return None
        closes = islice(re.finditer(CALL_CLOSE, block), _MAX_QUOTED_MARKS)
        for end in (close.end() for close in closes):
            if parsed := self._parse_block(block[:end]):
                return end, parsed
        return None

    def _is_mark(self, block: str) -> bool:
        """Return whether a block is a mark, or the start of one, before an undecided call."""
        text = block.strip()
        return CALL_OPEN.startswith(text) or (
            text.startswith(CALL_OPEN) and self.may_start_tool_call(text)
        )

    def _is_begun(self, block: str) -> bool:
        """Return whether `block` is the start of a call with a name."""
        written = block.lstrip().removeprefix(CALL_OPEN)
        if not self.may_start_tool_call(block):
            return False
        json_call = read_begun_json(written)
        name = read_begun_name(written) if json_call is None else json_call[0]
        return name in self.names or is_cut_json(written)

    def _parse_block(self, text: str, *, is_cut: bool = False) -> list[FunctionCall] | None:
        """Return the calls of a text that may start with CALL_OPEN; an empty list for a blank text.

        Return None if the text is not a call, or calls a function outside of `names`.
        """
        block = text.strip()
        if not block:
            return []
        if not self.may_start_tool_call(text):
            return None
        body = remove_begun(block.removeprefix(CALL_OPEN), CALL_CLOSE)
        if _PYTHON_START.match(body):
            scanned = scan_python_calls(body.strip())
            is_whole = scanned is not None and scanned.end == len(body.strip())
            return self._select(scanned.calls) if scanned is not None and is_whole else None
        if body.lstrip()[:1] not in ("{", "["):
            is_closed = block.endswith(CALL_CLOSE)
            return self._select(
                parse_tagged_calls(body, self.schemas, is_closed=is_closed, is_cut=is_cut)
            )
        try:
            calls = [
                FunctionCall(
                    item.name or item.tool_name,
                    read_arguments(bytes(item.arguments or item.parameters)),
                )
                for item in read_written_calls(body)
            ]
        except (ValueError, RecursionError):
            return None
        are_calls = [call.name in self.names and call.arguments[0] == "{" for call in calls]
        return calls if calls and all(are_calls) else None

    def _select(self, written: Sequence[ParsedCall] | None) -> list[FunctionCall] | None:
        """Return calls if all of them are calls of offered functions."""
        if not written or any(call.name not in self.names for call in written):
            return None
        return [FunctionCall(call.name, call.arguments) for call in written]

    def _parse_cut_block(self, text: str) -> list[FunctionCall] | None:
        """Return the incomplete call of which `text` is the start.

        Return None for other texts, such as invalid JSON, and for a start without a whole name.
        """
        block = text.lstrip().removeprefix(CALL_OPEN)
        if json_call := read_begun_json(block):
            name, arguments = json_call
            is_cut = name in self.names and (not arguments or is_cut_json(arguments))
            return [FunctionCall(name, arguments, is_complete=False)] if is_cut else None
        begun = read_begun_name(block)
        if begun is not None and begun in self.names:
            return [FunctionCall(begun, "", is_complete=False)]
        if not (self.may_start_tool_call(text) and is_cut_json(block)):
            return None
        calls = list(parse_cut_call(block))
        are_calls = [call.name in self.names and call.arguments[:1] in ("", "{") for call in calls]
        return calls if calls and all(are_calls) else None


def remove_begun(text: str, mark: str) -> str:
    """Remove `mark`, or its first characters, from the end of `text`."""
    begun = next((n for n in range(len(mark), 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - begun]


def is_cut_json(text: str) -> bool:
    """Return whether `text` is JSON that lacks its end."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (ValueError, RecursionError) as error:
        return str(error) == TRUNCATED
    return False


def parse_cut_call(text: str) -> tuple[FunctionCall, ...]:
    """Return the incomplete call in `text`. Return nothing if its name is incomplete too."""
    found = _CUT_CALL.match(text)
    return () if found is None else (FunctionCall(found[1], found[2] or "", is_complete=False),)


def read_written_calls(text: str) -> list[WrittenCall]:
    """Parse an object, a list of objects, or objects one after the other, as Llama 3 writes them.

    Semicolons may separate the objects. Raises ValueError or RecursionError.
    """
    try:
        written = WRITTEN_CALLS.decode(text)
    except ValueError:
        written, end = [], len(text) - len(text.lstrip())
        while end < len(text):
            _, following = _JSON.raw_decode(text, end)
            written.append(WRITTEN_CALL.decode(text[end:following]))
            end = _SEPARATOR.match(text, following).end()  # type: ignore[union-attr]
    return written if isinstance(written, list) else [written]


def read_arguments(written: bytes) -> str:
    """Return the JSON text of the arguments of a call; `{}` without arguments.

    Some models write the object as a JSON string, and missing arguments as null. Raises ValueError
    for a string whose content is not JSON.
    """
    value = written
    if value.startswith(b'"'):
        value = msgspec.json.decode(value, type=str).strip().encode()
        msgspec.json.decode(value or b"{}")
    return "{}" if value in (b"", b"null") else value.decode()


def list_deciding_members(names: Iterable[str]) -> list[str]:
    """Return the starts of the members of a call, without white space."""
    return ['"arguments":', '"parameters":', *(f'"name":"{name}"' for name in names)]
