from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu import command
from benchmarks.gpu.cases import CaseResult, Target
from benchmarks.gpu.suite import summarize_report

ROOT = Path(__file__).parents[4]
# What a borrowed machine may lack. `benchmarks.gpu.command` must not import it.
ABSENT = ("ray", "msgspec", "starlette", "llguidance", "nncf", "openvino", "httptools", "uvloop",
          "shtab", "torch", "transformers", "onnxruntime", "onnx", "hundredfold.none")  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of cases that a fake worker ran; it ends before the last case of a part."""
    names: list[str] = []

    def run_worker(
        part: str, cases: list[str], target: Target, seconds: float
    ) -> Iterator[CaseResult]:
        assert 0 < seconds <= 480
        for case in cases[:-1]:
            names.append(case)
            yield CaseResult(
                part=part, case=case, state="passed", device=target.device, seconds=0.1
            )

    monkeypatch.setattr(command, "run_worker", run_worker)
    return names


def test_second_run_continues(started: list[str], tmp_path: Path) -> None:
    arguments = ["gpu", "--dry", "--parts", "device", "--out", str(tmp_path / "out.json")]
    assert main(arguments) == 0
    assert started == ["description", "matrix-rate"]
    assert main(arguments) == 0
    assert started == ["description", "matrix-rate"]  # the fake worker never runs the last one


def test_pattern_and_time_limit_select_cases(started: list[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    arguments = ["gpu", "--dry", "--parts", "memory", "device", "--out", out]
    assert main([*arguments, "--cases", "*offload*"]) == 0
    assert started == []
    assert main([*arguments, "--seconds", "1"]) == 0
    assert started == []


def test_without_a_gpu_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["gpu"]) == 1
    assert "--dry" in capsys.readouterr().err


def test_command_imports_nothing_that_a_borrowed_machine_lacks() -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        "from benchmarks.__main__ import main\n"
        "sys.exit(main(['gpu', '--list']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "llama/gpu-fp16-offloaded" in done.stdout


def test_report_of_pytest_becomes_outcomes(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase name="a"/><testcase name="b"><skipped message="no TensorRT"/></testcase>'
        '<testcase name="c"><failure message="cosine"/></testcase>'
        "</testsuite></testsuites>"
    )
    outcomes = summarize_report(report)
    assert (outcomes["passed"], outcomes["skipped"], outcomes["failed"]) == (["a"], ["b"], ["c"])
    assert outcomes["reasons"] == ["c: cosine"]
