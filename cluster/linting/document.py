"""A YAML document with the line number of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.config_entries import KeyPath

MAX_LEVELS = 100  # maximum nesting; thousands of levels would exceed Python's recursion limit


@dataclass(frozen=True, slots=True)
class LintProblem:
    """One problem. `path` has the form `applications[0].args.models`. Lines count from 1."""

    path: str
    line: int
    message: str


class UnreadableConfig(Exception):
    """The text is not one YAML document."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.problem = LintProblem(path="", line=line, message=message)


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """Values of a YAML file, the line of each key and list item, and duplicate keys."""

    value: Any
    lines: Mapping[KeyPath, int]
    duplicates: tuple[KeyPath, ...] = ()

    def problem(self, path: KeyPath, message: str) -> LintProblem:
        """Create a problem at `path`. A missing key gets the line of its nearest ancestor."""
        ancestor = path
        while ancestor not in self.lines:
            ancestor = ancestor[:-1]
        return LintProblem(path=format_path(path), line=self.lines[ancestor], message=message)


def format_path(path: KeyPath) -> str:
    """Format `("a", 0, "b")` as `a[0].b`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(text: str) -> YamlDocument:
    """Parse one YAML document. Raises UnreadableConfig with the line."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        raise UnreadableConfig(line, f"{chr(exc.character)!r} is not allowed in YAML") from exc
    try:
        root = loader.get_single_node()
        if root is None:
            return YamlDocument(value=None, lines={(): 1})
        keys = list(_walk(root, (), frozenset()))
        lines: dict[KeyPath, int] = {(): 1}
        duplicates = []
        for path, line in keys:
            if path in lines:
                duplicates.append(path)
            lines[path] = line
        return YamlDocument(loader.construct_document(root), lines, tuple(duplicates))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        message = ": ".join(filter(None, (exc.context, exc.problem)))
        raise UnreadableConfig(1 if mark is None else mark.line + 1, message) from exc
    except yaml.YAMLError as exc:
        raise UnreadableConfig(1, str(exc)) from exc
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Loader that reports the line of invalid scalars and of deep nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if parent is not None and self._levels > MAX_LEVELS:
            message = f"nested more than {MAX_LEVELS} levels deep"
            raise yaml.composer.ComposerError(None, None, message, parent.start_mark)
        self._levels += 1
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # PyYAML does not check scalars. `!!bool x`, `!!timestamp x`, an empty `!!int` and the date
        # 2024-13-45 raise KeyError, AttributeError, IndexError and ValueError.
        except (AttributeError, LookupError, ValueError) as exc:
            message = f"invalid value: {exc}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from exc


def _walk(
    node: yaml.Node, path: KeyPath, ancestors: frozenset[int]
) -> Iterator[tuple[KeyPath, int]]:
    if id(node) in ancestors:  # an anchor that contains its own alias
        return
    ancestors |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            child = (*path, str(key.value))
            yield child, key.start_mark.line + 1
            yield from _walk(value, child, ancestors)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            child = (*path, index)
            yield child, item.start_mark.line + 1
            yield from _walk(item, child, ancestors)
