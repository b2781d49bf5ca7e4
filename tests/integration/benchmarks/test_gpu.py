"""Dry runs of each part of `bench gpu`: a few cases per part, with tiny models on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

pytest.importorskip("torch", reason="`torch` is not installed")
pytest.importorskip("transformers", reason="`transformers` is not installed")

from benchmarks.__main__ import main
from benchmarks.gpu import transformers_generation
from benchmarks.gpu.cases import Bench, Target, index_by_name, run_case
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import build_tables

# Fast cases: none exports a graph to ONNX, which takes seconds.
CASES = {
    "device": ("description", "matrix-rate", "bandwidth"),
    "encoder-parity": tuple(
        f"{task}/gpu-fp16-torch"
        for task in ("feature-extraction", "fill-mask", "sparse-embeddings")
    ),
    "decoder-parity": (
        "llama/gpu-fp16-offloaded",
        "gemma2/gpu-fp16-torch",
        "gpt-oss/gpu-bf16-torch",
        "qwen3-moe/gpu-bf16-torch",
        "qwen3.5/gpu-bf16-transformers",
        "gemma4/gpu-bf16-torch",
        "deepseek-v3/gpu-bf16-torch",
    ),
    "encoder-latency": ("gpu-fp16-torch", "transformers-eager"),
    "bert-large": ("gpu-fp16-torch",),
    "streams": (
        "1b/gpu-fp16-torch/2",
        "1b/transformers-static/2",
        "1b/transformers-continuous/2",
        "moe/gpu-bf16-torch/2",
        "moe/transformers-static/2",
    ),
    "memory": ("gpu-fp16-torch", "gpu-fp16-transformers"),
}

# One case for each code path that CASES leaves out: ONNX exports, IO binding, quantized weights, a
# run of pytest. Compiled engines have cases only in the parts that measure times. The tests of the
# engines compare outputs of compiled engines.
SLOW_CASES = {
    "encoder-parity": tuple(
        f"feature-extraction/gpu-fp16{kind}" for kind in ("", "-bound", "-tensorrt")
    ),
    "decoder-parity": (
        "llama/gpu-fp16",
        "llama/gpu-int4",
        "llama/gpu-int8-bitsandbytes",
        "llama/gpu-fp16-eager",
        "gpt2/gpu-fp16-torch",
    ),
    "encoder-latency": ("transformers-compiled", "gpu-fp16-compiled"),
    "streams": ("1b/gpu-nf4-bitsandbytes/2", "1b/gpu-fp16-compiled/2"),
    "memory": ("gpu-fp16-offloaded",),
    "suite": ("test_gpu",),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Target(is_cuda=False), tmp_path_factory.mktemp("gpu"))


@pytest.mark.filterwarnings("default")  # generation in transformers emits warnings
@pytest.mark.parametrize("part", CASES)
def test_dry_form_of_a_part_runs(bench: Bench, part: str) -> None:
    cases = index_by_name(PARTS[part].cases(bench.target))
    results = [run_case(part, cases[name], bench) for name in CASES[part]]
    assert [(result.case, result.reason) for result in results if result.state != "passed"] == []
    assert build_tables(results)[0].rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in SLOW_CASES.items() for name in names]
)
def test_dry_form_of_a_slow_path_runs(bench: Bench, part: str, name: str) -> None:
    result = run_case(part, index_by_name(PARTS[part].cases(bench.target))[name], bench)
    if result.state == "blocked":
        # Either an engine is not installed, or the case `test_gpu` ran GPU tests, which pytest
        # skips on this machine.
        assert "is not installed" in result.reason or result.reason.startswith("no test ran: ")
    else:
        assert (result.state, result.reason) == ("passed", "")


@pytest.mark.parametrize("name", ["gpt2/gpu-fp16", "bart/gpu-int8"])
def test_candidate_that_no_gpu_runs_is_unsupported(bench: Bench, name: str) -> None:
    part = "decoder-parity"
    result = run_case(part, index_by_name(PARTS[part].cases(bench.target))[name], bench)
    assert result.state == "unsupported"
    assert "compute in fp32" in result.reason


class SlowManager:
    """A fake of transformers' batching manager with a clock. Start and first answer are slow."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.added: list[list[list[int]]] = []
        self._is_set_up = False
        self._waiting: list[str] = []

    def start(self) -> None:
        self.now_s += 10.0

    def add_requests(self, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
        self.added.append(prompts)
        self._waiting = [str(prompt) for prompt in prompts]
        return list(self._waiting)

    def get_result(self, timeout: float) -> SimpleNamespace:
        self.now_s += 1.0 if self._is_set_up else 100.0
        self._is_set_up = True
        return SimpleNamespace(error=None, request_id=self._waiting.pop())

    def stop(self, block: bool) -> None:
        pass


class WarmableManager(SlowManager):
    """The manager of newer versions of transformers."""

    is_warm = False

    def warmup(self) -> None:
        self.is_warm, self.now_s = True, self.now_s + 1_000.0


@pytest.mark.parametrize("manager", [SlowManager(), WarmableManager()])
def test_set_up_of_continuous_batching_is_not_timed(
    manager: SlowManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(init_continuous_batching=lambda **_: manager)
    monkeypatch.setattr(transformers_generation.time, "perf_counter", lambda: manager.now_s)
    run = transformers_generation.GENERATION_BASELINES[transformers_generation.CONTINUOUS]
    prompts = [[1, 2, 3], [4, 5, 6]]
    assert run(model, Target(is_cuda=False), prompts, 4) == 2.0
    assert manager.added == [[[3, 2, 1]], prompts]
    assert getattr(manager, "is_warm", True)


def test_command_runs_a_part_in_a_process_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "gpu-dry.json"
    arguments = ["gpu", "--dry", "--parts", "device", "--cases", "matrix*", "--out", str(path)]
    assert main(arguments) == 0
    written = orjson.loads(path.read_bytes())
    (case,) = written["results"]["cases"]
    assert (case["case"], case["state"], case["device"]) == ("matrix-rate", "passed", "cpu")
    assert case["values"]["tflops"] > 0
    assert main(arguments) == 0
    assert orjson.loads(path.read_bytes())["results"] == written["results"]
