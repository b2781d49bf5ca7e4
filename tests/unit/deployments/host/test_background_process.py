"""Limits that a background process sets for itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from pathlib import Path
from deployments.host.background_process import limit_memory, lower_process_priority
lower_process_priority()
print(os.getpriority(os.PRIO_PROCESS, 0), Path("/proc/self/oom_score_adj").read_text().strip())
limit_memory(256 << 20)
try:
    bytearray(512 << 20)
except MemoryError:
    print("no memory")
"""

# As for a user whose own limit is lower: only root may raise it.
LOWER_LIMIT = """
import os, resource
from deployments.host.background_process import limit_memory
resource.setrlimit(resource.RLIMIT_DATA, (200 << 20, 200 << 20))
if os.geteuid() == 0:
    os.seteuid(65_534)
limit_memory(256 << 20)
print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""


def test_background_process_has_the_lowest_priority_and_a_memory_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["19 1000", "no memory"]


def test_memory_limit_keeps_a_lower_limit_of_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOWER_LIMIT], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == 200 << 20
