"""The dry form of each part of `bench gpu`: tiny models on the CPU, a few cases per part."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

pytest.importorskip("torch", reason="`torch` is not installed")
pytest.importorskip("transformers", reason="`transformers` is not installed")

from benchmarks.__main__ import main
from benchmarks.gpu.cases import Bench, Target, named, run_case
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import build_tables

# Without exports to ONNX, which take seconds each.
CASES = {
    "device": ("description", "matrix-rate", "bandwidth"),
    "encoder-parity": ("feature-extraction/gpu-fp16-torch", "fill-mask/gpu-fp16-torch"),
    "decoder-parity": ("llama/gpu-fp16-offloaded",),
    "encoder-latency": ("gpu-fp16-torch", "transformers-eager"),
    "bert-large": ("gpu-fp16-torch",),
    "streams": (
        "135m/gpu-fp16-torch/2",
        "135m/transformers-static/2",
        "135m/transformers-continuous/2",
    ),
    "memory": ("gpu-fp16-torch", "gpu-fp16-transformers"),
}

# One case for each further path: exports, bindings, quantized weights, encoder-decoders, pytest.
SLOW_CASES = {
    "encoder-parity": tuple(
        f"feature-extraction/gpu-fp16{kind}" for kind in ("", "-bound", "-tensorrt")
    ),
    "decoder-parity": (
        "llama/gpu-fp16",
        "llama/gpu-int8-bitsandbytes",
        "llama/gpu-fp16-eager",
        "gpt2/gpu-fp16-torch",
        "bart/gpu-int8",
    ),
    "streams": ("1b/gpu-nf4-bitsandbytes/2",),
    "memory": ("gpu-fp16-offloaded",),
    "suite": ("test_gpu",),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Target(is_cuda=False), tmp_path_factory.mktemp("gpu"))


@pytest.mark.filterwarnings("default")  # of transformers' own generation
@pytest.mark.parametrize("part", CASES)
def test_dry_form_of_a_part_runs(bench: Bench, part: str) -> None:
    cases = named(PARTS[part].cases(bench.target))
    results = [run_case(part, cases[name], bench) for name in CASES[part]]
    assert [(result.case, result.reason) for result in results if result.state != "passed"] == []
    assert build_tables(results)[0].rows


@pytest.mark.slow
@pytest.mark.parametrize("part", SLOW_CASES)
def test_dry_form_of_a_slow_path_runs(bench: Bench, part: str) -> None:
    cases = named(PARTS[part].cases(bench.target))
    results = [run_case(part, cases[name], bench) for name in SLOW_CASES[part]]
    assert [(r.case, r.reason) for r in results if r.state not in ("passed", "blocked")] == []
    assert all("is not installed" in r.reason for r in results if r.state == "blocked")


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
