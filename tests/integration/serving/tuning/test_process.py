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
from tests.support.tuning_artifacts import seal_tunable, write_table
from tests.unit.deployments.tuning.test_session import STALE, somebody_tunes

TIMEOUT_S = 30.0
HEAVY = {"torch", "transformers", "onnx", "ray", "starlette", "tokenizers", "openvino"}


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


@pytest.fixture
def started(target: TuningTarget) -> Iterator[subprocess.Popen[bytes]]:
    """The process a replica starts, standing still until the test lets it go on."""
    with process.start(target) as child:
        psutil.Process(child.pid).suspend()
        yield child
        child.kill()


def ended(target: TuningTarget) -> tuple[int, str]:
    """How the process for `target` ends, and what it says."""
    with process.start(target) as child:
        assert child.stderr is not None
        said = child.stderr.read().decode()
    return child.returncode, said


def test_it_measures_and_keeps_the_table(target: TuningTarget) -> None:
    status, said = ended(target)
    table = read_costs(target)
    assert (status, table is not None) == (ExitCode.TUNED, True), said
    assert table is not None
    assert {row.variant.candidate for row in table.rows} == {"plain", "twin"}
    assert said.splitlines()[-1].startswith("tiny/embedder: ")


def test_it_measures_as_the_encoder_runs(target: TuningTarget) -> None:
    wide = replace(
        target,
        settings=EncoderSettings(intra_op_threads=2, concurrent_passes=2, tune_seconds=0.1),
    )
    write_table(target, {"1x16": "plain"})
    assert ended(wide)[0] == ExitCode.TUNED
    assert read_costs(wide) is not None


def test_a_table_of_another_runtime_is_measured_again(target: TuningTarget) -> None:
    write_table(target, {"1x16": "plain"}, **STALE)
    assert ended(target)[0] == ExitCode.TUNED
    assert read_costs(target) is not None


def test_it_leaves_at_once_when_somebody_else_is_at_it(target: TuningTarget) -> None:
    with somebody_tunes(target):
        status, said = ended(target)
    assert status == ExitCode.BUSY
    assert said == "tiny/embedder is being tuned by another process\n"


def test_a_store_that_cannot_be_written_is_told_in_one_line(target: TuningTarget) -> None:
    (target.artifact / "hosts").write_text("in the way")
    status, said = ended(target)
    assert status == ExitCode.STORE_NOT_WRITABLE
    assert said.startswith(f"error: cannot write to {target.artifact}: ")
    assert said.count("\n") == 1


def test_a_damaged_artifact_is_told_in_one_line(target: TuningTarget) -> None:
    (target.artifact / "tokenizer.json").write_text("{}")
    status, said = ended(target)
    assert status == ExitCode.FAILED
    assert said.startswith("error: ")
    assert "tokenizer.json" in said
    assert said.count("\n") == 1


def test_it_ends_when_its_standard_input_is_closed(started: subprocess.Popen[bytes]) -> None:
    assert started.stdin is not None
    started.stdin.close()
    psutil.Process(started.pid).resume()
    assert started.wait(TIMEOUT_S) == ExitCode.FAILED


def test_by_hand_it_needs_no_standard_input(target: TuningTarget) -> None:
    command = [sys.executable, "-m", "deployments.tuning", str(target.artifact)]
    done = subprocess.run(
        [*command, "--device", "cpu", "--seconds", "0.1"], stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == ExitCode.TUNED


def test_it_stays_where_those_who_end_its_replica_find_it(
    started: subprocess.Popen[bytes],
) -> None:
    own = psutil.Process()
    assert os.getsid(started.pid) == os.getsid(own.pid)
    assert os.getpgid(started.pid) == os.getpgid(own.pid)


def test_it_gives_way_and_loads_only_what_it_needs(target: TuningTarget) -> None:
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
