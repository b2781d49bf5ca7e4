from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from build_artifacts.errors import BuildError
from build_artifacts.workspaces.opening import open_scratch
from deployments.artifacts.store import BUILDING_NAME

HOLD = """
import sys, time
from pathlib import Path
from build_artifacts.workspaces.opening import open_scratch
with open_scratch(Path(sys.argv[1])) as root:
    (root / "half.whl").write_bytes(b"half a wheel")
    print("ready", flush=True)
    time.sleep(60)
"""
COME_AND_GO = """
import sys
from pathlib import Path
from build_artifacts.workspaces.opening import open_scratch
for number in range(150):
    with open_scratch(Path(sys.argv[1])) as root:
        (root / "mine").write_text(str(number))
        assert (root / "mine").read_text() == str(number)
"""


def start_holder(store: Path) -> subprocess.Popen[str]:
    """Start a process that holds a scratch directory in `store`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def list_scratch(store: Path) -> list[Path]:
    return sorted((store / BUILDING_NAME).iterdir())


def test_scratch_of_killed_processes_is_removed(tmp_path: Path) -> None:
    living, killed = start_holder(tmp_path), start_holder(tmp_path)
    try:
        assert len(list_scratch(tmp_path)) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with open_scratch(tmp_path) as root:
            others = [path for path in list_scratch(tmp_path) if path != root]
            assert [[p.name for p in path.iterdir()] for path in others] == [["half.whl"]]
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate()


def test_concurrent_scratch_directories_are_independent(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COME_AND_GO, str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert list_scratch(tmp_path) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_scratch_is_removed_after_any_error(tmp_path: Path, error: type[BaseException]) -> None:
    def unpack() -> None:
        with open_scratch(tmp_path) as root:
            (root / "unpacked").mkdir()
            raise error

    with pytest.raises(error):
        unpack()
    assert list_scratch(tmp_path) == []


def test_next_scratch_finishes_a_killed_removal(tmp_path: Path) -> None:
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "graph").write_bytes(b"")
    with open_scratch(tmp_path):
        pass
    program = (
        "import os, shutil, sys; from pathlib import Path; "
        "from deployments.artifacts import store; "
        "shutil.rmtree = lambda *a, **k: os.kill(os.getpid(), 9); "
        "root = Path(sys.argv[1]); store.remove_atomically(root / 'version', root / '.building')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "version").exists()
    assert len(list_scratch(tmp_path)) == 1
    with open_scratch(tmp_path) as root:
        assert list_scratch(tmp_path) == [root]


def test_unwritable_store_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with (
        pytest.raises(BuildError, match="cannot write to the store"),
        open_scratch(tmp_path / "file"),
    ):
        pass
