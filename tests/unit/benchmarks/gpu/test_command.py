from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.common.report import RunMetadata
from benchmarks.gpu import command
from benchmarks.gpu.cases import Bench, Case, CaseResult, Target, run_case
from benchmarks.gpu.parts import GpuPart
from benchmarks.gpu.results import GpuResults
from benchmarks.gpu.suite import summarize_report
from deployments.host.gpus import Gpu

ROOT = Path(__file__).parents[4]
RUN = RunMetadata(benchmark="gpu", command="test", seed=0)
# Packages that `bench gpu --list` must not import. A GPU machine may have only torch and
# transformers, and only the cases import these two.
ABSENT = ("ray", "msgspec", "starlette", "llguidance", "nncf", "openvino", "httptools", "uvloop",
          "shtab", "torch", "transformers", "onnxruntime", "onnx", "hundredfold.none")  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the worker with a fake that omits the last of its cases.

    Return the list of the names of the cases that ran.
    """
    names: list[str] = []

    def run_worker(
        part: str, cases: list[str], target: Target, seconds: float, log: Path
    ) -> Iterator[CaseResult]:
        assert 0 < seconds <= 480
        assert log.suffix == ".log"
        for case in cases[:-1]:
            names.append(case)
            yield CaseResult(
                part=part, case=case, state="passed", device=target.device, seconds=0.1
            )

    monkeypatch.setattr(command, "run_worker", run_worker)
    return names


# Worker program that crashes in a case named `crash` and hangs in a case named `hang`.
WORKER = """
import json, os, subprocess, sys
part, request = sys.argv[1], json.loads(sys.argv[2])
for name in request["cases"]:
    print(json.dumps({"started": name}), flush=True)
    if name == "crash":
        print("CUDA error 700", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang":
        open(os.path.join(request["scratch"], "weights"), "w").close()
        child = subprocess.Popen(["sleep", "60"], stdout=sys.stderr)
        print(f"child {child.pid} in {request['scratch']}", file=sys.stderr, flush=True)
        child.wait()
    values = dict(part=part, case=name, state="passed", device="cpu", seconds=0.1)
    print(json.dumps({"result": values}), flush=True)
"""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(command, "_WORKER", (sys.executable, str(script)))


class HangTimer(Timer):
    """Timer that starts to run once a case hangs, because the start of a worker takes long."""

    def __init__(self, log: Path, interval: float, function: Callable[[], None]) -> None:
        super().__init__(interval, function)
        self._log = log

    def run(self) -> None:
        while "child " not in self._log.read_text() and not self.finished.wait(0.01):
            pass
        super().run()


def run_cases(names: list[str], path: Path, seconds: float = 60.0) -> dict[str, CaseResult]:
    """Run `names` as the remaining cases of a part; return the results by name."""
    part = GpuPart("scripted", lambda _: [Case(name, lambda _: {}) for name in names])
    log = path.with_suffix(".log")
    plan = command._CasePlan(Target(is_cuda=False), ["*"], log)
    results = GpuResults.read_or_start(path, RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PARTS", {"device": part})
        patch.setattr(command, "Timer", partial(HangTimer, log))
        return {result.case: result for result in plan.run("device", results, seconds)}


@pytest.mark.usefixtures("scripted")
def test_crash_fails_one_case_and_the_others_continue(tmp_path: Path) -> None:
    found = run_cases(["first", "crash", "last"], tmp_path / "out.json")
    assert {name: result.state for name, result in found.items()} == {
        "first": "passed",
        "crash": "failed",
        "last": "passed",
    }
    assert found["crash"].reason == "its process ended with 3: CUDA error 700"
    assert (tmp_path / "out.log").read_text() == "CUDA error 700\n"


@pytest.mark.usefixtures("scripted")
def test_time_limit_leaves_cases_for_the_next_run(tmp_path: Path) -> None:
    assert set(run_cases(["first", "hang", "last"], tmp_path / "out.json", 1.0)) == {"first"}
    (tmp_path / "out.log").unlink()  # the timer must not find the child of the first run
    # A case that runs first and still exceeds the limit would do so in every run, so it counts as
    # failed.
    (result,) = run_cases(["hang", "last"], tmp_path / "out.json", 1.0).values()
    assert (result.case, result.state) == ("hang", "failed")


@pytest.mark.usefixtures("scripted")
def test_time_limit_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    run_cases(["hang"], tmp_path / "out.json", 1.0)
    _, child, _, scratch = (tmp_path / "out.log").read_text().split()
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == "zombie"
    assert not Path(scratch).exists()


def test_second_run_continues(started: list[str], tmp_path: Path) -> None:
    arguments = ["gpu", "--dry", "--parts", "device", "--out", str(tmp_path / "out.json")]
    assert main(arguments) == 0
    assert started == ["description", "matrix-rate"]
    assert main(arguments) == 0
    assert started == ["description", "matrix-rate"]  # the fake worker omits the last case


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


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("570.86.15", "no CUDA device: NVIDIA H200, driver 570.86.15 is too old for CUDA 13: "),
        ("580.159.03", "torch sees no CUDA device\n"),
    ],
)
def test_gpu_that_cuda_cannot_use_is_told_with_the_reason(
    driver: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(command, "read_gpus", lambda: (Gpu(name="NVIDIA H200", driver=driver),))
    assert main(["gpu"]) == 1
    assert message in capsys.readouterr().err


def test_command_needs_only_torch_and_transformers() -> None:
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


def test_report_of_skipped_tests_only_is_no_proof(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase name="a"><skipped message="no CUDA"/></testcase>'
        '<testcase name="b"><skipped message="no CUDA"/></testcase>'
        '<testcase name="c"><skipped message="no TensorRT"/></testcase>'
        "</testsuite></testsuites>"
    )
    case = Case("test_gpu", lambda _: summarize_report(report))
    found = run_case("suite", case, Bench(Target(is_cuda=True), tmp_path))
    assert (found.state, found.is_proof) == ("blocked", False)
    assert found.reason == "no test ran: no CUDA; no TensorRT"
