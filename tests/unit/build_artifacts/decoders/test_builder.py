"""The subprocess of the model builder, with another program in its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import TIMEOUT_S, wait_for

_PARENT = """
import sys
from pathlib import Path
from build_artifacts.decoders.builder import run_builder
from deployments.artifacts.types import Device
sys.executable = sys.argv[1]
run_builder(Path("in"), Path("out"), precision="int4", device=Device.CPU)
"""


def test_builder_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program, started = tmp_path / "program", tmp_path / "started"
    program.write_text(f"#!/bin/sh\nmkfifo {started}; echo $$ > {started}; exec cat\n")
    program.chmod(0o755)
    command = [sys.executable, "-c", _PARENT, str(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as parent:
        try:
            wait_for(lambda: started.exists() or parent.poll() is not None)
            assert parent.poll() is None
            builder = psutil.Process(int(started.read_text()))
        finally:
            parent.kill()
        gone, _ = psutil.wait_procs([builder], timeout=TIMEOUT_S)
    assert gone == [builder]
