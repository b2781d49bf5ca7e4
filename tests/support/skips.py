"""Skipped tests, which fail where REQUIRE_ALL_TESTS is set, except for reasons of the host."""

from __future__ import annotations

import os
import re
from typing import TypeVar

import pytest

VARIABLE = "REQUIRE_ALL_TESTS"  # `.ci/run` sets it, because a test that never runs proves nothing
# The only reasons that remain there. Of missing packages and programs, only TensorRT and
# systemd-analyze are among them.
PERMITTED = re.compile(
    "|".join(
        (
            # Tests on a GPU, on one with certain features, and of hosts without a GPU.
            r"onnxruntime has no `(?:CUDA|Tensorrt)ExecutionProvider` here",
            r"torch sees no CUDA device",
            r"there is a (?:GPU|CUDA device)(?: here)?",
            r"this GPU has no .*",
            r"the model needs \d+ GPUs .*",
            r"torch\.compile needs .* on a GPU: .*",
            r"TensorRT 10 is not installed: .*",
            # The rest of the host: its CPU, its system, its rights.
            r"this CPU has no bf16 instructions",
            r"reads the flags of an x86 CPU",
            r"only glibc keeps freed memory",
            r"a nice value belongs to the process there",
            r"this host has no IPv6",
            r"no IPv6 here: .*",
            r"no small disk can be mounted here",
            r"needs systemd-analyze",
            # Cases that an engine does not have.
            r"\w+ does not support unpooled batches",
            r"\w+ computes unknown token ids",
            # What is left out on purpose, and data sets whose licenses permit no copy here.
            r"HUNDREDFOLD_CLIENTS_PYTHON=skip",
            r"\S+ is not at hand",
        )
    )
)
AnyReport = TypeVar("AnyReport", pytest.TestReport, pytest.CollectReport)


def fail_unpermitted_skip(report: AnyReport) -> AnyReport:
    """Change the report of a skipped test or file into that of a failure, if this run needs it."""
    reason = find_skip_reason(report)
    if os.environ.get(VARIABLE) and reason is not None and not PERMITTED.fullmatch(reason):
        report.outcome = "failed"
        report.longrepr = f"skipped, which {VARIABLE} forbids: {reason}"
    return report


def find_skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Return why the test or file was skipped; None for other outcomes, also expected failures."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
