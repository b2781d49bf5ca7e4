from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deployments.config import EncoderSettings
from deployments.tuning import process
from deployments.tuning.costs import TuningTarget, read_costs
from deployments.tuning.process import ExitCode
from tests.support.tuning_artifacts import STALE, hold_tuning_lock, seal_tunable, write_table

TIMEOUT_S = 900.0  # tuning has the lowest priority
HEAVY = {"torch", "transformers", "onnx", "ray", "starlette", "tokenizers", "openvino"}


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


@pytest.fixture
def suspended_process(target: TuningTarget) -> Iterator[subprocess.Popen[bytes]]:
    """A suspended tuning process, started as a replica starts it."""
    with process.start(target) as child:
        psutil.Process(child.pid).suspend()
        yield child
        child.kill()


def run_process(target: TuningTarget) -> tuple[int, str]:
    """Run the tuning process to its end; return its exit code and stderr."""
    with process.start(target) as child:
        assert child.stderr is not None
        stderr = child.stderr.read().decode()
    return child.returncode, stderr


def test_process_writes_the_table(target: TuningTarget) -> None:
    status, stderr = run_process(target)
    table = read_costs(target)
    assert (status, table is not None) == (ExitCode.TUNED, True), stderr
    assert table is not None
    assert {row.variant.candidate for row in table.rows} == {"plain", "twin"}
    assert stderr.splitlines()[-1].startswith("tiny/embedder: ")


def test_process_measures_with_the_encoder_settings(target: TuningTarget) -> None:
    two_threads = replace(
        target,
        settings=EncoderSettings(intra_op_threads=2, concurrent_passes=2, tune_seconds=0.1),
    )
    write_table(target, {"1x16": "plain"})
    assert run_process(two_threads)[0] == ExitCode.TUNED
    assert read_costs(two_threads) is not None


def test_table_of_another_runtime_is_measured_again(target: TuningTarget) -> None:
    write_table(target, {"1x16": "plain"}, **STALE)
    assert run_process(target)[0] == ExitCode.TUNED
    assert read_costs(target) is not None


def test_process_exits_while_the_lock_is_held(target: TuningTarget) -> None:
    with hold_tuning_lock(target):
        status, stderr = run_process(target)
    assert status == ExitCode.BUSY
    assert stderr == "tiny/embedder is being tuned by another process\n"


def test_read_only_store_is_reported_in_one_line(target: TuningTarget) -> None:
    (target.artifact / "hosts").write_text("in the way")
    status, stderr = run_process(target)
    assert status == ExitCode.STORE_NOT_WRITABLE
    assert stderr.startswith(f"error: cannot write to {target.artifact}: ")
    assert stderr.count("\n") == 1


def test_damaged_artifact_is_reported_in_one_line(target: TuningTarget) -> None:
    (target.artifact / "tokenizer.json").write_text("{}")
    status, stderr = run_process(target)
    assert status == ExitCode.FAILED
    assert stderr.startswith("error: ")
    assert "tokenizer.json" in stderr
    assert stderr.count("\n") == 1


def test_process_exits_when_stdin_is_closed(suspended_process: subprocess.Popen[bytes]) -> None:
    assert suspended_process.stdin is not None
    suspended_process.stdin.close()
    psutil.Process(suspended_process.pid).resume()
    assert suspended_process.wait(TIMEOUT_S) == ExitCode.FAILED


def test_manual_process_runs_without_stdin(target: TuningTarget) -> None:
    command = [sys.executable, "-m", "deployments.tuning", str(target.artifact)]
    done = subprocess.run(
        [*command, "--device", "cpu", "--seconds", "0.1"], stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == ExitCode.TUNED


def test_process_stays_in_the_group_of_its_replica(
    suspended_process: subprocess.Popen[bytes],
) -> None:
    own = psutil.Process()
    assert os.getsid(suspended_process.pid) == os.getsid(own.pid)
    assert os.getpgid(suspended_process.pid) == os.getpgid(own.pid)


def test_process_has_low_priority_and_few_modules(target: TuningTarget) -> None:
    code = (
        "import os, sys; from pathlib import Path; from deployments.tuning.process import main;"
        "status = main(sys.argv[1:]);"
        "heavy = {m.partition('.')[0] for m in sys.modules};"
        "print(status, os.nice(0), Path('/proc/self/oom_score_adj').read_text().strip(), *heavy)"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(target.artifact),
        "--device",
        "cpu",
        "--for-replica",
    ]
    with subprocess.Popen(
        [*command, "--seconds", "0.1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        status, niceness, oom_score, *loaded = child.stdout.read().split()
    assert (status, niceness, oom_score) == ("0", "19", "1000")
    assert {"onnxruntime", "numpy"} <= set(loaded)
    assert not HEAVY & set(loaded)
