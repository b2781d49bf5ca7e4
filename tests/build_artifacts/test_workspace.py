from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from build_artifacts.errors import BuildError
from build_artifacts.workspace import BUILDING_NAME, workspace

HOLD = """
import sys, time
from pathlib import Path
from build_artifacts.workspace import workspace
with workspace(Path(sys.argv[1])) as place:
    (place.directory("export") / "half.onnx").write_bytes(b"half a graph")
    print("ready", flush=True)
    time.sleep(60)
"""


def holder(store: Path) -> subprocess.Popen[str]:
    """A process that is in the middle of a build."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_killed_build_is_swept_up_by_the_next_and_a_living_one_is_not(tmp_path: Path) -> None:
    living, killed = holder(tmp_path), holder(tmp_path)
    try:
        assert len(list((tmp_path / BUILDING_NAME).iterdir())) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with workspace(tmp_path) as place:
            left = {path for path in (tmp_path / BUILDING_NAME).iterdir() if path != place.root}
            assert len(left) == 1
            assert [p.name for p in left.pop().rglob("*.onnx")] == ["half.onnx"]
    finally:
        living.kill()
        living.wait()
    assert [path.name for path in tmp_path.iterdir()] == [BUILDING_NAME]


NOISE = """
import os, sys
from pathlib import Path
from build_artifacts.workspace import workspace
print("before")
with workspace(Path(sys.argv[1])) as place:
    with place.quiet():
        print("from python")
        os.write(2, b"from a library\\n")
    print("between")
    with place.quiet():
        sys.stderr.write("last words")
        raise ZeroDivisionError
"""


def test_noise_goes_to_the_log_and_stays_there_after_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOISE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "before\nbetween\n"
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError"
    assert "last words" not in done.stderr
    (log,) = (tmp_path / BUILDING_NAME).iterdir()
    heard = log.read_text(encoding="utf-8")
    for text in ("from python\nfrom a library\n", "last words", "ZeroDivisionError"):
        assert text in heard


def test_nothing_is_left_of_a_build_that_ended_well(tmp_path: Path) -> None:
    with workspace(tmp_path) as place, place.quiet():
        os.write(1, b"noise\n")
        place.directory("merged")
    assert list((tmp_path / BUILDING_NAME).iterdir()) == []


def test_a_store_that_cannot_be_written_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(BuildError, match="cannot write to the store"), workspace(tmp_path / "file"):
        pass
