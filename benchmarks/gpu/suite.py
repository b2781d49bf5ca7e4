"""The GPU tests of the test suite. pytest runs all of them as one case."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.report import REPOSITORY
from benchmarks.gpu.cases import Bench, Case, MissingRequirement, Target

_TESTS = "tests/integration/engines/test_gpu.py"
_TIMEOUT_S = 420
# This file replaces the pytest settings of pyproject.toml, which need plugins. A machine with only
# torch and transformers may lack these plugins.
_CONFIG = """\
[pytest]
markers =
    gpu: needs a real GPU
    slow: takes more than ten seconds
    ray: starts a Ray cluster of its own
"""


def _run_tests(bench: Bench) -> Mapping[str, Any]:
    import pytest  # noqa: F401  raises ModuleNotFoundError, which blocks the case

    if not (REPOSITORY / _TESTS).is_file():
        raise MissingRequirement(f"`{_TESTS}` is not here: run in a checkout")
    config, report = bench.scratch / "pytest.ini", bench.scratch / "report.xml"
    config.write_text(_CONFIG, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(config)),
        *(f"--rootdir={REPOSITORY}", f"--junitxml={report}", _TESTS),
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if not report.is_file():
        lines = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise RuntimeError(f"pytest ended with {done.returncode}: {' '.join(lines)}")
    return summarize_report(report)


def summarize_report(report: Path) -> Mapping[str, Any]:
    """Collect the tests of a JUnit report by outcome. Failures become `reasons`.

    Raise MissingRequirement if all tests were skipped, because this proves nothing.
    """
    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    reasons: list[str] = []
    missing: dict[str, None] = {}  # distinct messages of skipped tests
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        problem = next(
            (case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None), None
        )
        if problem is not None:
            outcomes["failed"].append(name)
            reasons.append(f"{name}: {problem.get('message', '')[:200]}")
        elif (skipped := case.find("skipped")) is not None:
            outcomes["skipped"].append(name)
            missing[skipped.get("message", "")] = None
        else:
            outcomes["passed"].append(name)
    if not outcomes["passed"] and not outcomes["failed"]:
        raise MissingRequirement(f"no test ran: {'; '.join(missing)}")
    return {**outcomes, "reasons": reasons}


def suite_cases(_target: Target) -> list[Case]:
    return [Case("test_gpu", _run_tests)]
