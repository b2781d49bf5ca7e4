"""Parsing of example files into records. Errors name file, line and field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from build_artifacts.errors import BuildError


class BadEvaluationData(BuildError):
    """Error for an unusable file of labeled examples. The message names file, line and field."""

    code = "bad_evaluation_data"


JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# Larger absolute values are data errors. Squares of huge scores would overflow in the correlation.
MAX_SCORE = 1e9


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A position in a file and the format expected there."""

    path: Path
    expected: str  # the format in a few words, for the hint
    position: str = ""  # position in the file, such as "line 3"

    def at(self, position: str) -> FileLocation:
        return replace(self, position=position)

    def data_error(self, problem: str, field: str = "") -> BadEvaluationData:
        """Create the error for a problem at this position."""
        parts = [f"`{self.path}`", self.position, f"`{field}`" if field else ""]
        prefix = ", ".join(part for part in parts if part)
        return BadEvaluationData(f"{prefix}: {problem}", hint=f"the file must hold {self.expected}")


@dataclass(frozen=True, slots=True)
class Record:
    """Fields of one example: strings from columns, any JSON value from JSON."""

    location: FileLocation
    values: Mapping[str, object]
    file_names: Mapping[str, str] = field(default_factory=dict)  # field -> its name in the file

    def data_error(self, problem: str, field: str) -> BadEvaluationData:
        """Create the error for a problem of one field."""
        return self.location.data_error(problem, self.file_names.get(field, field))

    def text(self, field: str) -> str:
        """Return a string. Raises BadEvaluationData if it is missing, blank or not a string."""
        value = self.require(field)
        if not isinstance(value, str):
            raise self.data_error("not a string", field)
        if not value.strip():
            raise self.data_error("empty", field)
        return value

    def number(self, field: str) -> float:
        """Return a number; numeric strings are parsed.

        Raises BadEvaluationData if it is missing, not a finite number, or beyond +-MAX_SCORE.
        """
        value = self.require(field)
        number = as_number(value)
        if number is None:
            raise self.data_error(f"`{shorten(value)}` is not a number", field)
        if abs(number) > MAX_SCORE:
            raise self.data_error(
                f"`{shorten(value)}` is not between -{MAX_SCORE:g} and {MAX_SCORE:g}", field
            )
        return number

    def require_list(self, field: str) -> list[object]:
        """Return a list. Raises BadEvaluationData if it is missing, empty or no list."""
        value = self.require(field)
        if not isinstance(value, list):
            raise self.data_error("not a list", field)
        if not value:
            raise self.data_error("an empty list", field)
        return value

    def texts(self, field: str) -> list[str]:
        """Return a list of strings.

        Raises the errors of `require_list`, and of `text` for each entry.
        """
        values = self.require_list(field)
        return [
            Record(self.location, {f"{field}[{i}]": value}).text(f"{field}[{i}]")
            for i, value in enumerate(values)
        ]

    def require(self, field: str) -> object:
        """Return the value of a field. Raises BadEvaluationData if it is missing or null."""
        if self.values.get(field) is None:
            raise self.data_error("missing", field)
        return self.values[field]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The fields of a format and their names in files.

    `orders` lists the column orders of files without a header. An order matches if it has as many
    columns as the first line, and if its `key` column satisfies `fits`. The first match counts.
    """

    names: Mapping[str, tuple[str, ...]]  # field -> its possible names in files, lower case
    required: frozenset[str]
    orders: tuple[tuple[str, ...], ...]
    key: str
    fits: Callable[[str], bool]

    def match_header(self, cells: Sequence[str]) -> dict[str, int]:
        """Map each field to its column by the names in `cells`.

        Return an empty mapping if `cells` is no header, that is, if it lacks a required field.
        """
        fields = {alias: name for name, aliases in self.names.items() for alias in aliases}
        positions = {cell.strip().lower(): i for i, cell in enumerate(cells)}
        columns = {fields[alias]: i for alias, i in positions.items() if alias in fields}
        return columns if self.required <= columns.keys() else {}

    def match_order(self, cells: Sequence[str]) -> dict[str, int]:
        """Map each field to its column if `cells` is an example; empty if no order matches."""
        for order in self.orders:
            columns = {name: i for i, name in enumerate(order)}
            if len(order) == len(cells) and self.fits(cells[columns[self.key]].strip()):
                return columns
        return {}


def read_records(location: FileLocation, layout: FileLayout) -> list[Record]:
    """Read a file of columns or of JSON lines. Raises BadEvaluationData for an unusable file."""
    if is_json(location.path):
        return [_rename_fields(record, layout) for record in read_objects(location)]
    rows = [(location.at(f"line {n}"), line.split("\t")) for n, line in read_lines(location)]
    first_location, first = rows[0]
    header = layout.match_header(first)
    columns = header or layout.match_order(first)
    if not columns:
        noun = "columns" if len(first) > 1 else "column"
        raise first_location.data_error(f"{len(first)} {noun}, neither a header nor an example")
    if header:
        rows = rows[1:]
    if not rows:
        raise location.data_error("no examples")
    file_names = {name: first[i].strip() for name, i in header.items()}
    return [_build_record(at, cells, len(first), columns, file_names) for at, cells in rows]


def _build_record(
    location: FileLocation,
    cells: Sequence[str],
    width: int,
    columns: Mapping[str, int],
    file_names: Mapping[str, str],
) -> Record:
    if len(cells) != width:
        raise location.data_error(f"{len(cells)} columns, not {width}")
    return Record(location, {name: cells[i] for name, i in columns.items()}, file_names)


def _rename_fields(record: Record, layout: FileLayout) -> Record:
    file_names = {
        name: alias
        for name, aliases in layout.names.items()
        for alias in aliases
        if alias in record.values
    }
    values = {name: record.values[alias] for name, alias in file_names.items()}
    return Record(record.location, values, file_names)


def read_objects(location: FileLocation) -> list[Record]:
    """Read one JSON object per line. Raises BadEvaluationData for an unusable file."""
    return [
        _parse_object(location.at(f"line {number}"), line) for number, line in read_lines(location)
    ]


def _parse_object(location: FileLocation, line: str) -> Record:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise location.data_error(f"not JSON: {exc.msg}") from exc
    if not isinstance(value, dict):
        raise location.data_error("not a JSON object")
    return Record(location, value)


def read_lines(location: FileLocation) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers from 1.

    Raises BadEvaluationData if the file is unreadable, not UTF-8 or blank.
    """
    raw = read_bytes(location)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise location.at(f"line {line}").data_error("not UTF-8") from exc
    # splitlines would also split at characters that may occur in a sentence, such as U+2028.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise location.data_error("no examples")
    return numbered


def read_bytes(location: FileLocation) -> bytes:
    """Read the whole file. Raises BadEvaluationData if that fails."""
    try:
        return location.path.read_bytes()
    except OSError as exc:
        raise location.data_error(f"cannot be read: {exc.strerror}") from exc


def is_json(path: Path) -> bool:
    """Return whether the file name ends in one of JSON_SUFFIXES."""
    return path.suffix.lower() in JSON_SUFFIXES


def as_number(value: object) -> float | None:
    """Return a finite number, parsed from a string if necessary; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_index(value: object, count: int) -> int | None:
    """Return `value` if it is an integer from 0 to `count` - 1, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < count else None


def shorten(value: object) -> str:
    """Format `value` for an error message, truncated to 40 characters."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
