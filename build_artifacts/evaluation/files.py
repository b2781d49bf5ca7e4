"""Files of examples to records; whatever is wrong is named by file, line and field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from build_artifacts.errors import BuildError


class BadEvaluationData(BuildError):
    """A file of labelled examples that cannot be used; the message names file, line and field."""

    code = "bad_evaluation_data"


JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# Larger labels are slips of the pen, and their squares would overflow in a correlation.
MAX_SCORE = 1e9


@dataclass(frozen=True, slots=True)
class FileLocation:
    """Where in a file something stands, and what was expected there."""

    path: Path
    expected: str  # the format in a few words, for the hint
    location: str = ""  # such as "line 3"

    def at(self, location: str) -> FileLocation:
        """A place inside this file."""
        return replace(self, location=location)

    def data_error(self, what: str, field: str = "") -> BadEvaluationData:
        """The error to raise for what stands here."""
        parts = [f"`{self.path}`", self.location, f"`{field}`" if field else ""]
        where = ", ".join(part for part in parts if part)
        return BadEvaluationData(f"{where}: {what}", hint=f"the file must hold {self.expected}")


@dataclass(frozen=True, slots=True)
class Record:
    """One example's fields as the file has them: strings from columns, anything from JSON."""

    place: FileLocation
    values: Mapping[str, object]
    called: Mapping[str, str] = field(default_factory=dict)  # the file's name of a field, if other

    def data_error(self, what: str, field: str) -> BadEvaluationData:
        """The error to raise for a field of this record."""
        return self.place.data_error(what, self.called.get(field, field))

    def text(self, field: str) -> str:
        """A text with something in it. Raises BadEvaluationData."""
        value = self.require(field)
        if not isinstance(value, str):
            raise self.data_error("not a string", field)
        if not value.strip():
            raise self.data_error("empty", field)
        return value

    def number(self, field: str) -> float:
        """A number, also one written as text. Raises BadEvaluationData."""
        value = self.require(field)
        number = as_number(value)
        if number is None:
            raise self.data_error(f"`{shorten(value)}` is not a number", field)
        if abs(number) > MAX_SCORE:
            raise self.data_error(f"`{shorten(value)}` is larger than {MAX_SCORE:g}", field)
        return number

    def require_list(self, field: str) -> list[object]:
        """A list with something in it. Raises BadEvaluationData."""
        value = self.require(field)
        if not isinstance(value, list):
            raise self.data_error("not a list", field)
        if not value:
            raise self.data_error("an empty list", field)
        return value

    def texts(self, field: str) -> list[str]:
        """A list of texts, none of them empty. Raises BadEvaluationData."""
        values = self.require_list(field)
        return [
            Record(self.place, {f"{field}[{i}]": value}).text(f"{field}[{i}]")
            for i, value in enumerate(values)
        ]

    def require(self, field: str) -> object:
        """The field, whatever it is. Raises BadEvaluationData when there is none."""
        if self.values.get(field) is None:
            raise self.data_error("missing", field)
        return self.values[field]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The fields of a format, by what they are called in files.

    `orders` are the columns of files that do not name them; of those with as many columns as the
    first line has, the first one counts whose `key` field `fits` there.
    """

    names: Mapping[str, tuple[str, ...]]  # our name -> every name it has in files, lower case
    required: frozenset[str]
    orders: tuple[tuple[str, ...], ...]
    key: str
    fits: Callable[[str], bool]

    def named(self, cells: Sequence[str]) -> dict[str, int]:
        """The column of each field by the names in `cells`; empty when they are no header."""
        ours = {theirs: name for name, known in self.names.items() for theirs in known}
        places = {cell.strip().lower(): i for i, cell in enumerate(cells)}
        found = {ours[theirs]: i for theirs, i in places.items() if theirs in ours}
        return found if self.required <= found.keys() else {}

    def ordered(self, cells: Sequence[str]) -> dict[str, int]:
        """The column of each field where `cells` are an example; empty in no known order."""
        for order in self.orders:
            columns = {name: i for i, name in enumerate(order)}
            if len(order) == len(cells) and self.fits(cells[columns[self.key]].strip()):
                return columns
        return {}


def read_records(place: FileLocation, layout: FileLayout) -> list[Record]:
    """The records of a file of columns or of JSON lines. Raises BadEvaluationData."""
    if is_json(place.path):
        return [_renamed(record, layout) for record in read_objects(place)]
    rows = [(place.at(f"line {n}"), line.split("\t")) for n, line in read_lines(place)]
    where, first = rows[0]
    header = layout.named(first)
    columns = header or layout.ordered(first)
    if not columns:
        what = "columns" if len(first) > 1 else "column"
        raise where.data_error(f"{len(first)} {what}, neither their names nor an example")
    if header:
        rows = rows[1:]
    if not rows:
        raise place.data_error("no examples")
    called = {name: first[i].strip() for name, i in header.items()}
    return [_record(at, cells, len(first), columns, called) for at, cells in rows]


def _record(
    place: FileLocation,
    cells: Sequence[str],
    width: int,
    columns: Mapping[str, int],
    called: Mapping[str, str],
) -> Record:
    if len(cells) != width:
        raise place.data_error(f"{len(cells)} columns, not {width}")
    return Record(place, {name: cells[i] for name, i in columns.items()}, called)


def _renamed(record: Record, layout: FileLayout) -> Record:
    called = {
        name: theirs
        for name, known in layout.names.items()
        for theirs in known
        if theirs in record.values
    }
    values = {name: record.values[theirs] for name, theirs in called.items()}
    return Record(record.place, values, called)


def read_objects(place: FileLocation) -> list[Record]:
    """One JSON object a line. Raises BadEvaluationData."""
    return [_object(place.at(f"line {number}"), line) for number, line in read_lines(place)]


def _object(place: FileLocation, line: str) -> Record:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise place.data_error(f"not JSON: {exc.msg}") from exc
    if not isinstance(value, dict):
        raise place.data_error("not a JSON object")
    return Record(place, value)


def read_lines(place: FileLocation) -> list[tuple[int, str]]:
    """Every line with something in it, and its number from 1. Raises BadEvaluationData."""
    raw = read_bytes(place)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise place.at(f"line {line}").data_error("not UTF-8") from exc
    # Not splitlines: a sentence may hold other characters that count as line ends there.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise place.data_error("no examples")
    return numbered


def read_bytes(place: FileLocation) -> bytes:
    """The whole file. Raises BadEvaluationData."""
    try:
        return place.path.read_bytes()
    except OSError as exc:
        raise place.data_error(f"cannot be read: {exc.strerror}") from exc


def is_json(path: Path) -> bool:
    """Whether the file's name says that it holds JSON."""
    return path.suffix.lower() in JSON_SUFFIXES


def as_number(value: object) -> float | None:
    """A finite number, also one written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_index(value: object, count: int) -> int | None:
    """`value` if it is an index into `count` things; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < count else None


def shorten(value: object) -> str:
    """`value` short enough for an error message."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
