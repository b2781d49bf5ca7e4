"""Skipped tests under REQUIRE_ALL_TESTS fail, except for the permitted reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skips import VARIABLE

REPOSITORY = Path(__file__).parents[2]
SKIPPING = """\
import pytest

@pytest.mark.skipif(True, reason="`torch` is not installed")
def test_marked(): ...

def test_skips():
    pytest.skip("no Chromium here")

@pytest.fixture
def browser():
    pytest.skip("no Chromium here")

def test_needs_a_browser(browser): ...

@pytest.mark.skipif(True, reason="this host has no IPv6")
def test_permitted(): ...

@pytest.mark.xfail
def test_expected_failure():
    raise ValueError

def test_passes(): ...
"""
WHOLE_FILE = 'import pytest\npytest.importorskip("no_such_package")\n'


@pytest.mark.parametrize(
    ("required", "outcomes"),
    [
        ("1", "1 failed, 1 passed, 1 skipped, 1 xfailed, 3 errors"),
        ("", "1 passed, 5 skipped, 1 xfailed"),
    ],
)
def test_skips_of_other_reasons_fail_where_all_tests_are_required(
    required: str, outcomes: str, tmp_path: Path
) -> None:
    (tmp_path / "test_some.py").write_text(SKIPPING)
    (tmp_path / "test_file.py").write_text(WHOLE_FILE)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), "-c", os.devnull]
    options = ["-p", "tests.conftest", "--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(
        [*command, *options],
        cwd=REPOSITORY,
        env={**os.environ, VARIABLE: required},
        capture_output=True,
        text=True,
    )
    assert outcomes in done.stdout.splitlines()[-1], done.stdout
    assert ("skipped, which REQUIRE_ALL_TESTS forbids" in done.stdout) == bool(required)
