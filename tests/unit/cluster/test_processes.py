"""Children of a launcher, each launcher in a session of its own."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import processes
from cluster.process_session import ProcessSession
from cluster.processes import kill_previous_run, private_directory, start_session
from cluster.start_errors import StartError
from tests.support.old_setpriv import install_old_setpriv
from tests.support.ray_cluster import list_session
from tests.support.waiting import TIMEOUT_S, wait_for

# A launcher that starts two children and `edge`. Like HAProxy, `edge` is in the process group of
# the launcher. The launcher prints the three process ids. Then it reads one command per line and
# prints each result.
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from cluster.processes import ChildProcesses

children = ChildProcesses(Path(sys.argv[1]))
children.start("ray", ["sh", "-c", "sleep 60 & exec sleep 60"], dict(os.environ))
children.start("serve", ["sleep", "60"], dict(os.environ))
edge = subprocess.Popen(["sleep", "60"])
print(*(p.pid for p in children._processes.values()), edge.pid, flush=True)
for line in sys.stdin:
    if line == "stopped\\n":
        print(*(p.pid for p in children.find_stopped()), flush=True)
    elif line == "ended\\n":
        print(*children.find_ended(), flush=True)
    elif line == "failure\\n":
        print(children.failure().splitlines()[0], flush=True)
    elif line == "again\\n":
        children.start("serve", ["echo", "again"], dict(os.environ))
        children._processes["serve"].wait()
        print(flush=True)
    else:
        print(*children.stop(), flush=True)
"""

# A launcher with a fake `serve run`, which runs on after its controller has ended. `serve run` has
# ten minutes to end, so a launcher that waits for this end exceeds the time limit of the test.
STOP_WITH_CONTROLLER = """
import os, sys, time
from pathlib import Path
from cluster import processes
serve = '''
import signal, subprocess, sys, time
rename = "open('/proc/self/comm', 'w').write('ray::ServeContr'); print(flush=True); input()"
command = [sys.executable, "-c", rename]
pipe = subprocess.PIPE
controller = subprocess.Popen(command, stdin=pipe, stdout=pipe)
controller.stdout.readline()
def stop(*_):
    time.sleep(0.3)  # for the last requests
    print("finished", flush=True)
    controller.communicate(b"end")
signal.signal(signal.SIGINT, stop)
print("started", flush=True)
while True:
    time.sleep(0.1)  # a signal just before a sleep has an effect only after it
'''
children = processes.ChildProcesses(Path(sys.argv[1]))
children.start("serve", [sys.executable, "-c", serve], dict(os.environ))
while not (children.run_dir / "serve.log").read_text():
    time.sleep(0.01)
print(children.stop(600, *(lambda: True for _ in sys.argv[2:])))
"""


class Launcher:
    """A launcher as a child process, with its run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.ray, self.serve, self.edge = map(psutil.Process, map(int, self._read()))

    def ask(self, command: str) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def members(self) -> list[psutil.Process]:
        return list_session(self.process.pid)

    def close(self) -> None:
        self.process.kill()
        for each in self.members():
            each.kill()
        self.process.communicate()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    started = Launcher(tmp_path)
    wait_for(lambda: len(started.members()) == 4)
    yield started
    started.close()


def test_stop_kills_descendants_of_children_and_spares_the_edge(
    launcher: Launcher, tmp_path: Path
) -> None:
    assert launcher.ask("stop") == []
    assert launcher.members() == [launcher.edge]
    assert not (tmp_path / "session.json").exists()


@pytest.mark.timeout(60)
def test_stop_waits_for_the_controller_and_not_for_serve(tmp_path: Path) -> None:
    stopped = subprocess.run(
        [sys.executable, "-c", STOP_WITH_CONTROLLER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        check=True,
    )
    assert stopped.stdout == "[]\n"
    assert (tmp_path / "serve.log").read_text() == "started\nfinished\n"


@pytest.mark.timeout(60)
def test_urgent_stop_waits_for_no_request(tmp_path: Path) -> None:
    stopped = subprocess.run(
        [sys.executable, "-c", STOP_WITH_CONTROLLER, str(tmp_path), "urgent"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        check=True,
    )
    assert stopped.stdout == "[]\n"
    assert "finished" not in (tmp_path / "serve.log").read_text(), "that takes 0.3 s"


def test_only_serve_has_the_time_for_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_s: dict[str, float] = {}

    def end(self: object, name: str, _number: int, timeout_s: float, *_: object) -> None:
        limits_s[name] = timeout_s

    monkeypatch.setattr(processes.ChildProcesses, "_end", end)
    monkeypatch.setattr(processes.ChildProcesses, "names", lambda _: {"serve"})
    monkeypatch.setattr(processes, "kill_remaining", lambda _: 0)
    children = processes.ChildProcesses.__new__(processes.ChildProcesses)
    children._session = ProcessSession.of(os.getpid())
    assert children.stop(130) == ["serve"]
    assert limits_s == {"serve": 130, "ray": processes.RAY_STOP_S}


def test_stopped_child_is_found(launcher: Launcher) -> None:
    for process in (launcher.ray, launcher.edge):
        process.suspend()
    wait_for(lambda: launcher.ray.status() == psutil.STATUS_STOPPED)
    assert launcher.ask("stopped") == [str(launcher.ray.pid)]


def test_ended_child_is_found(launcher: Launcher) -> None:
    launcher.serve.kill()
    wait_for(lambda: launcher.ask("ended") == ["serve"])


def test_child_that_a_signal_ended_is_described(launcher: Launcher) -> None:
    launcher.serve.kill()
    wait_for(lambda: launcher.ask("ended") == ["serve"])
    failure = " ".join(launcher.ask("failure"))
    assert failure.startswith("`serve` was ended by signal 9 (Killed)")


def test_restart_keeps_the_former_log(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "serve.log").write_text("why it ended\n")
    launcher.ask("again")
    assert (tmp_path / "serve.log.1").read_text() == "why it ended\n"
    assert (tmp_path / "serve.log").read_text() == "again\n"


def test_removed_run_directory_is_created_again(launcher: Launcher, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    launcher.serve.kill()
    wait_for(lambda: launcher.ask("ended") == ["serve"])
    assert "cannot be read: No such file" in " ".join(launcher.ask("failure"))
    launcher.ask("again")
    assert (tmp_path / "serve.log").read_text() == "again\n"
    assert (tmp_path / "session.json").exists()


def test_run_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid())
    run_dir = tmp_path / "missing"
    with pytest.raises(StartError, match=f"cannot use `{run_dir}`") as raised:
        processes.ChildProcesses(run_dir)
    assert "free space" in raised.value.hint


def test_next_start_kills_the_rest_of_a_killed_launcher(launcher: Launcher, tmp_path: Path) -> None:
    launcher.process.send_signal(signal.SIGKILL)
    launcher.process.wait()
    # The kernel ends Ray and Serve with the launcher.
    wait_for(lambda: not (launcher.ray.is_running() or launcher.serve.is_running()))
    rest = launcher.members()
    assert rest
    assert kill_previous_run(tmp_path) == len(rest)
    assert launcher.members() == []


@pytest.mark.parametrize("change", [{"started_ticks": 1}, {"boot_id": "of an earlier boot"}])
def test_session_of_a_later_process_is_spared(
    launcher: Launcher, tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "session.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert kill_previous_run(tmp_path) == 0
    assert len(launcher.members()) == 4


def test_copied_run_directory_spares_the_server_that_runs(
    launcher: Launcher, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(tmp_path, copy, dirs_exist_ok=True)
    assert (copy / "session.json").exists()
    assert kill_previous_run(copy) == 0
    assert len(launcher.members()) == 4


def test_session_file_of_an_earlier_version_belongs_to_its_run_directory(
    launcher: Launcher, tmp_path: Path
) -> None:
    launcher.process.kill()
    launcher.process.wait()
    file = tmp_path / "session.json"
    content = json.loads(file.read_text())
    del content["directory"]
    file.write_text(json.dumps(content))
    assert kill_previous_run(tmp_path) > 0
    assert launcher.members() == []


def test_damaged_session_file_is_ignored(tmp_path: Path) -> None:
    for content in ("", "[]", "null", "{}"):
        (tmp_path / "session.json").write_text(content)
        assert kill_previous_run(tmp_path) == 0


def test_session_keeps_its_members_when_the_clock_is_set(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ProcessSession.of(launcher.process.pid)
    # `create_time` is the time of the boot plus the clock ticks since the boot. If the clock of the
    # host is set, the kernel moves the time of the boot.
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: before(process) + 5)
    assert {process.pid for process in session.members()} == {
        launcher.process.pid,
        *(process.pid for process in launcher.members()),
    }


def test_child_starts_on_a_host_with_an_old_setpriv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_old_setpriv(tmp_path, monkeypatch)
    log = tmp_path / "log"
    assert start_session(["echo", "started"], dict(os.environ), log).wait(TIMEOUT_S) == 0
    assert log.read_text() == "started\n"


def read_ticks() -> int:
    """Return the clock ticks since the boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def test_start_is_found_behind_a_name_with_parentheses() -> None:
    program = "open('/proc/self/comm', 'w').write('a) R 1 (b'); input()"
    before_ticks = read_ticks()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as started:
        wait_for(lambda: psutil.Process(started.pid).name() == "a) R 1 (b")
        found = ProcessSession.of(started.pid).started_ticks
        assert before_ticks <= found <= read_ticks()


@pytest.mark.parametrize("unusable", ["/tmp/" + "x" * 40, "/tmp/a b", "/tmp/a#b"])
def test_private_directory_has_a_path_for_sockets_and_haproxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unusable: str
) -> None:
    """The path of Ray Serve's admin socket below the directory has at most 107 bytes."""
    monkeypatch.setattr(tempfile, "tempdir", unusable)
    with private_directory(tmp_path) as directory:
        assert directory.parent == Path("/tmp")
        with socket.socket(socket.AF_UNIX) as admin:
            (directory / ("a" * 56)).mkdir()
            admin.bind(f"{directory}/{'a' * 56}/admin.sock")


def test_private_directory_is_locked_against_cleaners_and_removed(tmp_path: Path) -> None:
    with private_directory(tmp_path) as directory:
        descriptor = os.open(directory, os.O_DIRECTORY)
        try:
            with pytest.raises(BlockingIOError):  # systemd-tmpfiles requests this lock
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        (directory / "file").touch()
    assert not directory.exists()


def test_private_directory_of_another_container_is_spared(tmp_path: Path) -> None:
    """Containers that share /tmp may have equal run directories and user ids."""
    with private_directory(tmp_path) as first:
        (first / "socket").touch()
        with private_directory(tmp_path) as second:
            assert second == first.with_name(f"{first.name}-1")
        assert (first / "socket").exists()


def test_too_many_private_directories_in_use_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_PRIVATE_NAMES", 1)
    with (
        private_directory(tmp_path),
        pytest.raises(StartError, match="other processes use"),
        private_directory(tmp_path),
    ):
        pass


def test_session_of_a_process_that_has_ended_is_an_error() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(OSError, match=str(ended.pid)):
        ProcessSession.of(ended.pid)
