"""A YAML file as values that remember their lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `path` reads `applications[0].args.models`; lines count from 1."""

    path: str
    line: int
    message: str


class UnreadableConfig(Exception):
    """The text is not one YAML document."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(path="", line=line, message=message)


@dataclass(frozen=True, slots=True)
class Document:
    """The values of a file, the line of each key and list item, and keys given more than once."""

    value: Any
    lines: Mapping[KeyPath, int]
    repeated: tuple[KeyPath, ...] = ()

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A problem at `path`, on the line of its nearest ancestor if the key is not there."""
        known = path
        while known not in self.lines:
            known = known[:-1]
        return Problem(path=format_path(path), line=self.lines[known], message=message)


def format_path(path: KeyPath) -> str:
    """`("a", 0, "b")` as `a[0].b`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(text: str) -> Document:
    """Parse one YAML document. Raises Unreadable with the line."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(value=None, lines={(): 1})
        found = list(_walk(root, (), frozenset()))
        lines: dict[KeyPath, int] = {(): 1}
        repeated = []
        for path, line in found:
            if path in lines:
                repeated.append(path)
            lines[path] = line
        return Document(loader.construct_document(root), lines, tuple(repeated))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        message = ": ".join(filter(None, (exc.context, exc.problem)))
        raise UnreadableConfig(1 if mark is None else mark.line + 1, message) from exc
    except yaml.YAMLError as exc:
        raise UnreadableConfig(1, str(exc)) from exc
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: KeyPath, above: frozenset[int]) -> Iterator[tuple[KeyPath, int]]:
    if id(node) in above:  # an anchor that contains its own alias
        return
    above |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _walk(value, here, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            here = (*path, index)
            yield here, item.start_mark.line + 1
            yield from _walk(item, here, above)
