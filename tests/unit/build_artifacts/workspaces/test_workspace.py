from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import pytest

from build_artifacts.errors import BuildError, GateFailed
from build_artifacts.progress import BuildProgress
from build_artifacts.workspaces.opening import open_build_workspace
from build_artifacts.workspaces.workspace import repeat_when_resumed
from deployments.artifacts.store import BUILDING_NAME, build_path, log_path
from tests.support.waiting import wait_for

MODEL, VERSION = "org/model.v1", "0123456789ab"

# Each program opens the workspace of MODEL in the store given as its first argument.
ENTER = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
from pathlib import Path
from build_artifacts.progress import BuildProgress
from build_artifacts.workspaces.opening import open_build_workspace
STORE = Path(sys.argv[1])
def enter():
    return open_build_workspace(STORE, "{MODEL}", "{VERSION}", BuildProgress(sys.stderr))
"""
HALF_WAY = (
    ENTER
    + """
def half(into):
    (into / "half.onnx").write_bytes(b"half a gra")
    print("ready", flush=True)
    time.sleep(60)
with enter() as place:
    place.run_cached("export", lambda into: (into / "graph.onnx").write_bytes(b"a graph"))
    place.run_cached("quantize", half)
"""
)
PUBLISH = (
    ENTER
    + """
def slow(into):
    time.sleep(0.05)
    (into / "graph").write_bytes(b"whole")
with enter() as place:
    published = STORE / "published"
    if published.exists():
        print("found", (published / "graph").read_text())
    else:
        place.run_cached("seal", slow).rename(published)
        print("built")
"""
)


def start(program: str, store: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def leftovers(store: Path) -> list[str]:
    return sorted(path.name for path in (store / BUILDING_NAME).iterdir())


def build(store: Path, work: Callable[[Path], None], build_inputs: str = "") -> None:
    """Build in two steps; `work` is the second step."""
    quiet = BuildProgress(io.StringIO())
    with open_build_workspace(store, MODEL, VERSION, quiet, build_inputs=build_inputs) as place:
        place.run_cached("export", write)
        place.run_cached("quantize", work)


def has_resumable_export(store: Path, build_inputs: str = "") -> bool:
    """Return whether the next build can resume after the export."""
    done = []

    def stop(into: Path) -> None:
        raise KeyboardInterrupt

    quiet = BuildProgress(io.StringIO())
    with (
        suppress(KeyboardInterrupt),
        open_build_workspace(store, MODEL, VERSION, quiet, build_inputs=build_inputs) as place,
    ):
        done.append(place.is_done("export"))
        place.run_cached("look", stop)
    return done == [True]


def write(into: Path) -> None:
    assert list(into.iterdir()) == []
    (into / "graph.onnx").write_bytes(b"a graph")


def fail_if_run(into: Path) -> None:
    raise AssertionError("a finished step ran again")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_build_resumes_after_last_finished_step(tmp_path: Path, how: signal.Signals) -> None:
    process = start(HALF_WAY, tmp_path)
    assert line_of(process.stdout) == "ready"
    process.send_signal(how)
    process.communicate()
    assert process.returncode == -how

    with open_build_workspace(tmp_path, MODEL, VERSION, BuildProgress(io.StringIO())) as place:
        assert place.is_done("export")
        assert not place.is_done("quantize")
        assert (place.run_cached("export", fail_if_run) / "graph.onnx").read_bytes() == b"a graph"
        assert [p.name for p in place.run_cached("quantize", write).iterdir()] == ["graph.onnx"]
    assert leftovers(tmp_path) == []


def test_failed_step_leaves_no_files(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        write(into)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build(tmp_path, fail)
    steps = build_path(tmp_path, MODEL, VERSION) / "steps"
    assert [path.name for path in steps.iterdir()] == ["export"]
    assert has_resumable_export(tmp_path)


def fill_the_disk(into: Path) -> None:
    Path("/dev/full").write_bytes(b"one byte too many")


def refuse(into: Path) -> None:
    raise GateFailed("no graph is right", hint="try another model")


@pytest.mark.parametrize(
    ("work", "error", "stays"),
    [
        (fill_the_disk, OSError, True),
        (fail_if_run, AssertionError, True),
        (refuse, GateFailed, False),
    ],
)
def test_steps_are_kept_except_after_gate_failure(
    tmp_path: Path, work: Callable[[Path], None], error: type[Exception], stays: bool
) -> None:
    with pytest.raises(error):
        build(tmp_path, work)
    expected = [f"org--model.v1--{VERSION}", f"org--model.v1--{VERSION}.log"]
    assert leftovers(tmp_path) == expected[not stays :]
    log = log_path(build_path(tmp_path, MODEL, VERSION))
    assert error.__name__ in log.read_text(encoding="utf-8")
    assert has_resumable_export(tmp_path) is stays


HIDDEN_FULL = (
    ENTER
    + """
def fill(into):
    try:
        (into / "graph").write_bytes(bytes(9 << 20))
    except OSError as exc:
        raise RuntimeError("the library gave up") from exc
try:
    with enter() as place:
        place.run_cached("export", lambda into: (into / "small").write_bytes(b"fits"))
        place.run_cached("quantize", fill)
except OSError as exc:
    print(exc.errno, type(exc.__cause__).__name__, place.is_done("export"))
"""
)


def test_full_disk_error_differs_from_library_error(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=8m none "{tmp_path}" && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    done = subprocess.run(
        [*command, sys.executable, "-c", HIDDEN_FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(errno.ENOSPC), "RuntimeError", "True"]


def test_steps_of_other_tool_versions_are_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        build(tmp_path, fill_the_disk, build_inputs="torch 1")
    assert has_resumable_export(tmp_path, build_inputs="torch 1")
    assert not has_resumable_export(tmp_path, build_inputs="torch 2")


def test_marked_step_is_repeated_only_by_a_resumed_build(tmp_path: Path) -> None:
    runs = []

    def judge(into: Path) -> None:
        runs.append("judge")
        repeat_when_resumed(into)

    def judge_twice_and_stop(into: Path) -> None:
        place.run_cached("judge", judge)
        place.run_cached("judge", judge)
        raise KeyboardInterrupt

    for number in (1, 2):
        with (
            suppress(KeyboardInterrupt),
            open_build_workspace(tmp_path, MODEL, VERSION, BuildProgress(io.StringIO())) as place,
        ):
            assert place.is_done("export") is (number == 2)
            place.run_cached("export", write)
            place.run_cached("stop", judge_twice_and_stop)
        assert runs == ["judge"] * number
    with open_build_workspace(tmp_path, MODEL, VERSION, BuildProgress(io.StringIO())):
        pass
    assert leftovers(tmp_path) == []


def test_second_build_waits_and_finds_version(tmp_path: Path) -> None:
    with open_build_workspace(tmp_path, MODEL, VERSION, BuildProgress(io.StringIO())) as place:
        waiting = start(PUBLISH, tmp_path)
        waiting_line = line_of(waiting.stderr)
        assert waiting_line.startswith(f"waiting for another build of {MODEL} version {VERSION}")
        assert f"(process {os.getpid()} on " in waiting_line
        sealed = place.run_cached("seal", write)
        (sealed / "graph.onnx").rename(sealed / "graph")
        sealed.rename(tmp_path / "published")
    assert waiting.communicate(timeout=30)[0] == "found a graph\n"
    assert leftovers(tmp_path) == []


def test_concurrent_builds_build_once(tmp_path: Path) -> None:
    processes = [start(PUBLISH, tmp_path) for _ in range(6)]
    ended = [process.communicate(timeout=60) for process in processes]
    assert sorted(out.strip() for out, _ in ended) == ["built"] + ["found whole"] * 5, ended
    assert leftovers(tmp_path) == []


def test_interrupted_waiter_does_not_affect_the_build(tmp_path: Path) -> None:
    with open_build_workspace(tmp_path, MODEL, VERSION, BuildProgress(io.StringIO())) as place:
        waiting = start(PUBLISH, tmp_path)
        assert line_of(waiting.stderr).startswith("waiting")
        # A signal between Python's last check for signals and flock() interrupts neither.
        wait_for(lambda: psutil.Process(waiting.pid).status() == psutil.STATUS_SLEEPING)
        waiting.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in waiting.communicate(timeout=30)[1]
        third = start(PUBLISH, tmp_path)
        assert line_of(third.stderr).startswith("waiting")
        place.run_cached("export", write)
    assert third.communicate(timeout=30)[0] == "built\n"


def test_killed_build_releases_lock(tmp_path: Path) -> None:
    process = start(HALF_WAY, tmp_path)
    assert line_of(process.stdout) == "ready"
    waiting = start(PUBLISH, tmp_path)
    assert f"(process {process.pid} on " in line_of(waiting.stderr)
    process.kill()
    process.communicate()
    assert waiting.communicate(timeout=30)[0] == "built\n"


def test_models_with_names_differing_after_a_dot_are_separate(tmp_path: Path) -> None:
    quiet = BuildProgress(io.StringIO())
    with (
        open_build_workspace(tmp_path, "org/model.v1", VERSION, quiet) as one,
        open_build_workspace(tmp_path, "org/model.v2", VERSION, quiet) as two,
    ):
        assert len({one.root, two.root, one.log, two.log}) == 4


NOISE = (
    ENTER
    + """
print("before")
with enter() as place:
    with place.quiet():
        print("from python")
        os.write(2, b"from a library\\n")
    print("between")
    with place.quiet():
        sys.stderr.write("last words")
        raise ZeroDivisionError
"""
)


def test_library_output_is_logged_and_kept_after_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOISE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "before\nbetween\n"
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError"
    assert "last words" not in done.stderr
    (log,) = (tmp_path / BUILDING_NAME).glob("*.log")
    log_text = log.read_text(encoding="utf-8")
    for text in ("from python\nfrom a library\n", "last words", "ZeroDivisionError"):
        assert text in log_text


def test_new_build_starts_new_log(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(GateFailed):
            build(tmp_path, refuse)
    log = log_path(build_path(tmp_path, MODEL, VERSION))
    assert log.read_text(encoding="utf-8").count("GateFailed: ") == 1


def test_unwritable_store_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with (
        pytest.raises(BuildError, match="cannot write to the store"),
        open_build_workspace(tmp_path / "file", MODEL, VERSION, BuildProgress(io.StringIO())),
    ):
        pass
