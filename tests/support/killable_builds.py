"""Fork server of builds that kill themselves at a given point, and the client of this server.

The server reads one request per line from stdin and writes one response per line. It has imported
torch, so that a fork saves the seconds of this import. It computes nothing, because forks lack the
threads that a computation starts.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

# Modules that a build imports. They are imported once, before all forks.
_NEEDED = (
    "build_artifacts.__main__",
    "build_artifacts.commands.build",
    "build_artifacts.pipeline",
    "onnx_ir.passes.common",
    "onnxruntime.quantization.matmul_nbits_quantizer",
    "torch.onnx",
    "transformers.exporters",
    "transformers.models.bert.modeling_bert",
)
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class BuildExit:
    """Exit status and output of a build."""

    status: int  # exit status; negative: killed by this signal
    output: str

    @property
    def steps(self) -> list[str]:
        """Names of the logged steps, in order."""
        return [line.split()[0] for line in self.output.splitlines() if line.startswith("  ")]

    @property
    def resumed(self) -> list[str]:
        """Names of the steps that an earlier, interrupted build had finished."""
        lines = self.output.splitlines()
        return [line.split()[0] for line in lines if line.endswith("done by an interrupted build")]


class BuildForkServer:
    """Client of the process that forks builds."""

    def __init__(self, root: Path, exports: Path, *prefix: str) -> None:
        """Let builds share exported graphs in `exports`. `prefix` precedes the server command."""
        self._root = root
        self._exports = exports
        self._count = 0
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.killable_builds"],
            cwd=ROOT,
            # One thread, because waiting torch threads spin and take seconds on busy cores.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self, *arguments: str, die_after: int | None = None, die_in: str | None = None
    ) -> Build:
        """Start a build that ends itself after `die_after` log lines, or at the point `die_in`."""
        self._count += 1
        output = self._root / f"output-{self._count}"
        request = {
            "arguments": arguments,
            "output": str(output),
            "exports": str(self._exports),
            "die_after": die_after,
            "die_in": die_in,
        }
        return Build(self, int(self._ask("start", request)), output)

    def run(self, *command: str) -> None:
        """Run another command, such as `mount`, in the namespace of the fork server."""
        assert self._ask("run", command) == 0

    def status(self, pid: int) -> int:
        return int(self._ask("wait", pid))

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_S)

    def _ask(self, verb: str, what: object) -> int:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([verb, what]) + "\n")
        process.stdin.flush()
        return int(json.loads(process.stdout.readline()))


@dataclass(frozen=True)
class Build:
    fork_server: BuildForkServer
    pid: int
    output: Path

    def wait_for(self, text: str) -> None:
        """Wait until the output of the build contains `text`."""
        end_s = time.monotonic() + TIMEOUT_S
        while text not in self.written():
            ended = "Traceback" in self.written() or time.monotonic() > end_s
            assert not ended, f"no `{text}` in {self.written()!r}"
            time.sleep(0.02)

    def written(self) -> str:
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def ended(self) -> BuildExit:
        return BuildExit(self.fork_server.status(self.pid), self.written())


class _KillingStream:
    """A stream that kills its own process after `lines` written lines."""

    def __init__(self, stream: TextIO, lines: int) -> None:
        self._stream = stream
        self._left = lines

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._left -= text.count("\n")
        if self._left <= 0:
            self._stream.flush()
            kill_self()
        return written

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False


def kill_self(*_arguments: object, **_options: object) -> None:
    """Kill this process without cleanup, as the OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _then_die(function: Callable[..., object]) -> Callable[..., object]:
    def run_and_die(*arguments: object, **options: object) -> None:
        function(*arguments, **options)
        kill_self()

    return run_and_die


def _interrupt_self(*_arguments: object, **_options: object) -> None:
    signal.raise_signal(signal.SIGINT)


def _half_dispose(directory: Path, building: Path) -> None:
    directory.rename(building / ".scratch-half")
    kill_self()


def _run_build(request: dict[str, object]) -> int:
    """Run one build in the forked process. Return its exit status."""
    from build_artifacts import __main__, pipeline, presets
    from build_artifacts.encoders import candidates
    from build_artifacts.progress import BuildProgress
    from build_artifacts.workspaces import opening
    from deployments.artifacts import store
    from tests.support.prepared_build import SMALL
    from tests.support.shared_exports import SharedExports

    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    lines = cast("int | None", request["die_after"])
    stream: TextIO = os.fdopen(output, "w", encoding="utf-8")
    if lines is not None:
        stream = cast("TextIO", _KillingStream(stream, lines))
    setattr(BuildProgress, "on_stderr", lambda: nullcontext(BuildProgress(stream)))  # noqa: B010
    presets.SEARCH_PRESETS["quick"] = SMALL  # type: ignore[index]
    setattr(candidates, "export", SharedExports(Path(str(request["exports"]))))  # noqa: B010
    deaths: dict[object, Callable[[], None]] = {
        None: lambda: None,
        "the export": lambda: setattr(candidates, "export", _interrupt_self),
        "before publishing": lambda: setattr(pipeline, "publish", kill_self),
        "before the rename": lambda: setattr(store, "_rename_away", _then_die(store._rename_away)),
        "after the rename": lambda: setattr(store, "set_latest", kill_self),
        "before cleaning": lambda: setattr(opening, "_clean_up", kill_self),
        "while cleaning": lambda: setattr(opening, "remove_atomically", _half_dispose),
    }
    deaths[request["die_in"]]()
    return __main__.main(cast("list[str]", request["arguments"]))


def _start(request: dict[str, object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = _run_build(request)
    finally:
        if sys.exc_info()[1] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    for module in _NEEDED:
        importlib.import_module(module)
    for line in sys.stdin:
        verb, what = json.loads(line)
        if verb == "start":
            answer = _start(what)
        elif verb == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(what, 0)[1])
        else:
            answer = subprocess.run(what, check=False).returncode
        print(answer, flush=True)


if __name__ == "__main__":
    main()
