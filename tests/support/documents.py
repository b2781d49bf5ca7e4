"""Code blocks and links of README.md, CONTRIBUTING.md and docs/.

A block that cannot run in the tests follows a line `<!-- not run: REASON -->`. A block that follows
a line `<!-- output -->` shows the output of the previous block and is not run either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables.command import list_documents

ROOT = Path(__file__).parents[2]
SHELL, PYTHON = "sh", "python"
_BLOCK = re.compile(
    r"(?:^<!-- (?:not run: (?P<reason>[^\n]+)|(?P<output>output)) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)  # `\` at the end continues a line
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]+))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One fenced block. A diagram has no `language`."""

    document: Path
    line: int  # first line of the code
    language: str
    code: str
    reason: str  # why no test runs it; "" if a test does

    @property
    def name(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def commands(self) -> str:
        """The commands: all lines of a script, or the lines after the `$` prompts of a session."""
        typed = [match[1] for match in _TYPED.finditer(self.code)]
        return "\n".join(typed) if typed else self.code

    @property
    def answers(self) -> list[str]:
        """The output lines of a shell session; empty for a script."""
        is_session = _TYPED.search(self.code) is not None
        return _TYPED.sub("", self.code).splitlines() if is_session else []


def find_blocks() -> Iterator[CodeBlock]:
    """Yield the code blocks of every document, except output blocks."""
    for document in list_documents():
        text = document.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            if not match["output"]:
                line = text.count("\n", 0, match.start("code")) + 1
                yield CodeBlock(
                    document, line, match["language"], match["code"], match["reason"] or ""
                )


def find_links(document: Path) -> Iterator[tuple[Path, str]]:
    """Yield target file and anchor (or "") of each link to a file of the project."""
    for target, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
        yield (document.parent / target).resolve(), anchor


def find_anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings."""
    headings = _HEADING.findall(document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
