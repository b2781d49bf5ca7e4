"""Documents: valid links, a short README, small images, and code blocks that tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.tables.command import list_documents
from benchmarks.tables.reference import REFERENCES
from tests.support.documents import PYTHON, ROOT, SHELL, find_anchors, find_blocks, find_links

README = ROOT / "README.md"
MAX_README_LINES = 80
MAX_IMAGE_BYTES = 150_000


@pytest.mark.parametrize("document", list_documents(), ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target, anchor in find_links(document):
        assert target.exists(), target
        assert not anchor or anchor in find_anchors(target), f"{target.name}#{anchor}"


def test_first_page_is_short_and_names_every_other() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_README_LINES
    assert {target for target, _ in find_links(README)} >= set((ROOT / "docs").glob("*.md"))


def test_pictures_are_small_and_shown() -> None:
    pictures = list((ROOT / "docs/images").iterdir())
    assert pictures
    shown = {target for document in list_documents() for target, _ in find_links(document)}
    for picture in pictures:
        assert picture in shown
        assert picture.stat().st_size <= MAX_IMAGE_BYTES


def test_metrics_in_documents_exist() -> None:
    metrics = {row[0].strip("`") for row in REFERENCES["metrics"]().rows}
    assert "hundredfold_requests_total" in metrics
    for document in list_documents():
        named = set(re.findall(r"\bhundredfold_\w+", document.read_text(encoding="utf-8")))
        assert named <= metrics, document.name


def test_every_block_is_run_or_says_why_not() -> None:
    """tests/end_to_end/test_documents.py runs all blocks that state no reason to skip them."""
    blocks = [block for block in find_blocks() if block.document.name != "architecture.md"]
    for block in blocks:
        print(f"{block.name}: {block.reason or 'run'}")
    assert {block.language for block in blocks} == {SHELL, PYTHON}
    assert {block.language for block in blocks if not block.reason} == {SHELL, PYTHON}
