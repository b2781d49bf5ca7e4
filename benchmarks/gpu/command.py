"""`hundredfold bench gpu`: measurements and parity checks on a GPU, or a dry run on the CPU.

The command runs offline. It needs the project's environment, or an environment that has at least
transformers and a torch for CUDA. It skips the cases that the output file lists as passed, rejected
or unsupported, so that a repeated command continues where the previous one ended.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer
from typing import Any, NamedTuple, TextIO

import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.options import add_run_options
from benchmarks.common.report import REPOSITORY, log_progress, start_run
from benchmarks.gpu.cases import Case, CaseResult, Target, index_by_name
from benchmarks.gpu.parts import MAX_PART_SECONDS, PARTS
from benchmarks.gpu.results import GpuResults, build_tables
from benchmarks.servers.processes import stop, stop_signals_interrupt
from cluster.process_session import ProcessSession, kill_remaining
from cluster.processes import end_with_parent
from deployments.host.gpus import read_gpus
from deployments.host.machine import usable_cores
from deployments.terminal.command_line import FAILED, OK, positive_count, positive_seconds
from deployments.terminal.console import print_json

_FILE_NAMES = {True: "gpu.json", False: "gpu-dry.json"}  # key: whether the run uses a GPU
_WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")
_MIN_PART_SECONDS = 20.0  # a part starts only if at least this many s are left


_HELP = f"""\
In a checkout on a machine with an NVIDIA GPU:
  hundredfold doctor                     finds driver, GPU and packages; says what to fix
  make gpu-check                         installs what fits the GPU, then runs this command
  hundredfold bench gpu --parts device encoder-parity decoder-parity   a first look
  hundredfold bench gpu --seconds 560    where commands are ended after ten minutes
Without the project's environment, with torch for CUDA and transformers: python3 -m benchmarks gpu

Each part runs in a process of its own, at most {MAX_PART_SECONDS:.0f} s. Results are written after
every case, and the same command continues until nothing is left. A case is `passed`, `rejected` by
the accuracy gate, `unsupported` by the compiler, `blocked` by a missing package, or `failed`; the
last two run again. Tracebacks are in a .log beside the results.
docs/gpu-check.md: what to take to a machine without network, and how the results get into
docs/performance.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _HELP
    add_run_options(parser)
    parser.add_argument(
        "--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), metavar="PART",
        help=f"default: all; {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN",
        help="such as '*/gpu-fp16*'; cases run in the order of the patterns",
    )  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="tiny models on this CPU")
    parser.add_argument("--list", action="store_true", help="list parts and cases, run nothing")
    parser.add_argument(
        "--part-seconds", type=positive_seconds, default=MAX_PART_SECONDS, metavar="S",
        help="per part (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=positive_seconds, metavar="S",
        help="for the whole command; what is left needs another run (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=positive_count, default=usable_cores(), help="default: %(default)s"
    )
    parser.add_argument(
        "--smollm", type=Path, metavar="DIR", help="checkpoint of SmolLM2-135M-Instruct"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the cases that have no result yet, or were blocked or failed before.

    With `--list`, only list the cases. Return FAILED if the result file holds a failed case. Raises
    BenchmarkError if there is no GPU (except in a dry run), or if the result file is invalid or
    cannot be written.
    """
    target = Target(
        is_cuda=not arguments.dry,
        seed=arguments.seed,
        threads=arguments.threads,
        smollm=arguments.smollm and arguments.smollm.absolute(),
    )
    if arguments.list:
        return _list_cases(target, as_json=arguments.json)
    if target.is_cuda:
        _require_gpu()
    out: Path = arguments.out
    path = out if out.suffix == ".json" else out / _FILE_NAMES[target.is_cuda]
    metadata = start_run("gpu", arguments.command_line, arguments.seed)
    results = GpuResults.read_or_start(path, metadata)
    log = path.with_suffix(".log")
    plan = _CasePlan(target, arguments.cases, log)
    end_s = time.monotonic() + (arguments.seconds or float("inf"))
    with stop_signals_interrupt():
        for part in arguments.parts:
            left_s = end_s - time.monotonic()
            if left_s < _MIN_PART_SECONDS:
                log_progress(f"{part}: no time left, run the command again")
                continue
            for result in plan.run(part, results, min(left_s, arguments.part_seconds)):
                results.add(result)
                results.write(path)
    results.write(path)
    if arguments.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        _print_results(results, path)
    open_cases = plan.count_open(arguments.parts, results)
    log_progress(f"{open_cases} cases are left: run it again" if open_cases else "nothing is left")
    if any(result.state == "failed" for result in results.cases.values()):
        log_progress(f"tracebacks of failed cases: {log}")
        return FAILED
    return OK


class _CasePlan(NamedTuple):
    target: Target
    patterns: Sequence[str]
    log: Path  # file for the output of the workers

    def cases(self, part: str) -> list[Case]:
        """Return the selected cases of a part, in the order of the patterns."""
        cases = PARTS[part].cases(self.target)
        selected = (c for p in self.patterns for c in cases if fnmatchcase(c.name, p))
        return list(index_by_name(selected).values())

    def count_open(self, parts: Iterable[str], results: GpuResults) -> int:
        """Count the selected cases without a result for the device of `target`."""
        return sum(
            results.find(part, case.name, self.target.device) is None
            for part in parts
            for case in self.cases(part)
        )

    def run(self, part: str, results: GpuResults, seconds: float) -> Iterator[CaseResult]:
        """Run the remaining cases of a part in worker processes. Log and yield the results."""
        cases = self.cases(part)
        names = results.remaining(part, cases, self.target.device)
        if not names:
            log_progress(f"{part}: {len(cases)} cases have results")
            return
        log_progress(f"{part}: {len(names)} of {len(cases)} cases, at most {seconds:.0f} s")
        end_s = time.monotonic() + seconds
        # On a GPU, a failed case ends the worker process. The remaining cases run in a new worker.
        while names and (left_s := end_s - time.monotonic()) > 0:
            tried = False
            for result in run_worker(part, names, self.target, left_s, self.log):
                reason = f": {result.reason}" if result.reason else ""
                log_progress(f"  {result.seconds:6.1f} s  {result.case} {result.state}{reason}")
                names, tried = [name for name in names if name != result.case], True
                yield result
            if not tried:
                return


def run_worker(
    part: str, names: list[str], target: Target, seconds: float, log: Path
) -> Iterator[CaseResult]:
    """Run the cases `names` of `part` in a worker process, and yield their results.

    Append what the process prints to the file `log`: tracebacks, and warnings of libraries.
    After `seconds`, end the process with all processes that it started. If its first case was still
    running, this case had all the time and counts as failed. A later case gets no result, so that
    it can run again. A case that was running when the process ended by itself counts as failed.
    Cases that did not start get no result. Raises BenchmarkError if the process fails while no case
    runs.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        # This process removes the files of the worker, because the worker may be killed.
        TemporaryDirectory(prefix="hundredfold-gpu-", ignore_cleanup_errors=True) as scratch,
        log.open("a+", encoding="utf-8", errors="replace") as errors,
        _start_worker(part, names, target, scratch, errors) as process,
    ):
        start = errors.tell()
        assert process.stdout is not None
        running: str | None = None
        started_s = time.monotonic()
        results = 0
        with _limit_time(process, seconds) as is_late:
            for line in process.stdout:
                message: dict[str, Any] = orjson.loads(line)
                running = message.get("started")
                started_s = time.monotonic() if running else started_s
                if "result" in message:
                    results += 1
                    yield CaseResult(**message["result"])
            process.wait()
        errors.seek(start)
        last_line = (errors.read().strip().splitlines() or [""])[-1]
    if running is not None and (not is_late.is_set() or not results):
        elapsed_s = time.monotonic() - started_s
        yield CaseResult(
            part=part,
            case=running,
            state="failed",
            device=target.device,
            seconds=round(elapsed_s, 2),
            reason=f"its process ended with {process.returncode}: {last_line}"[:300],
        )
    elif running is None and process.returncode > 0:
        raise BenchmarkError(
            f"`{part}` cannot run: {last_line}", hint="`hundredfold doctor` lists what is installed"
        )


def _start_worker(
    part: str, names: list[str], target: Target, scratch: str, errors: TextIO
) -> subprocess.Popen[bytes]:
    """Start a worker in a process session of its own, which ends when this process ends."""
    content = {"cases": names, "target": asdict(target), "scratch": scratch}
    request = orjson.dumps(content, default=str).decode()
    return subprocess.Popen(
        [*end_with_parent(signal.SIGTERM), *_WORKER, part, request],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


@contextmanager
def _limit_time(process: subprocess.Popen[bytes], seconds: float) -> Iterator[Event]:
    """End a process after `seconds`. Yield the event that is set then.

    After the block, no process of its session is left in any case.
    """
    session = ProcessSession.of(process.pid)
    is_late = Event()

    def end() -> None:
        is_late.set()
        stop(process, session)

    timer = Timer(seconds, end)
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()
        timer.join()  # `end` may still end processes
        if process.poll() is None:
            stop(process, session)
        kill_remaining(session)


def _require_gpu() -> None:
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise BenchmarkError(
            "the package `torch` is not installed", hint="install `.[gpu-dev]`"
        ) from exc
    if not torch.cuda.is_available():
        problem = next((f": {gpu.name}, {gpu.problem}" for gpu in read_gpus() if gpu.problem), "")
        raise BenchmarkError(
            f"torch sees no CUDA device{problem}",
            hint="`hundredfold doctor` says more; `--dry` runs tiny models on the CPU",
        )


def _list_cases(target: Target, *, as_json: bool) -> int:
    cases = {name: [case.name for case in part.cases(target)] for name, part in PARTS.items()}
    if as_json:
        return print_json(
            [
                {"part": name, "title": part.title, "cases": cases[name]}
                for name, part in PARTS.items()
            ]
        )
    for name, part in PARTS.items():
        print("\n  ".join((f"{name}: {part.title}", *cases[name])))
    return OK


def _print_results(results: GpuResults, path: Path) -> None:
    for table in build_tables(list(results.cases.values())):
        if table.rows:
            print(f"\n{table.name}\n{table.text}")
    states = Counter(result.state for result in results.cases.values())
    shown = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"\n{shown}: {path}")
