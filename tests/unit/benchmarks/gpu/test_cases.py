from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.cases import (
    Bench,
    Case,
    CaseResult,
    MissingRequirement,
    State,
    Target,
    require,
    run_case,
)
from benchmarks.gpu.encoders import count_flops
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.transformers_generation import GENERATION_BASELINES
from build_artifacts.errors import UnsupportedModel
from deployments.errors import EngineFailed

OWN_MODULES = (
    "hundredfold",
    "deployments.engines.gone",
    "build_artifacts.gone",
    "cluster.gone",
    "benchmarks.gpu.gone",
)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Target(is_cuda=False), tmp_path)


def raising(error: Exception) -> Case:
    def run(_bench: Bench) -> Mapping[str, Any]:
        raise error

    return Case("case", run)


@pytest.mark.parametrize(
    ("case", "state", "says"),
    [
        (Case("case", lambda _: {"tflops": 1.0}), "passed", ""),
        (Case("case", lambda _: {"reasons": ["cosine 0.2 < 0.9"]}), "rejected", "cosine 0.2"),
        (raising(MissingRequirement("no provider")), "blocked", "no provider"),
        (raising(ModuleNotFoundError("x", name="nncf")), "blocked", "`nncf` is not installed"),
        (raising(ModuleNotFoundError("x", name="nncf.torch")), "blocked", "`nncf.torch` is not"),
        *(
            (raising(ModuleNotFoundError(f"no {name}", name=name)), "failed", f"Error: no {name}")
            for name in OWN_MODULES
        ),
        (raising(UnsupportedModel("no fp16 graph", hint="-")), "unsupported", "no fp16 graph"),
        (raising(EngineFailed("CUDA error 700")), "failed", "CUDA error 700"),
        (raising(ValueError("bad\nshape")), "failed", "ValueError: bad shape"),
    ],
)
def test_every_outcome_becomes_a_result(bench: Bench, case: Case, state: str, says: str) -> None:
    result = run_case("part", case, bench)
    assert (result.state, result.device, result.is_proof) == (state, "cpu", False)
    assert says in result.reason


@pytest.mark.parametrize(
    ("state", "is_proof"),
    [
        ("passed", True),
        ("rejected", True),
        ("unsupported", False),
        ("blocked", False),
        ("failed", False),
    ],
)
def test_only_what_ran_on_a_gpu_is_proof(state: State, is_proof: bool) -> None:
    result = CaseResult(part="part", case="case", state=state, device="cuda", seconds=1.0)
    assert result.is_proof == is_proof


def test_require_names_what_is_missing() -> None:
    require(None)
    with pytest.raises(MissingRequirement, match="no CUDA"):
        require("no CUDA")


def test_models_are_built_once(bench: Bench) -> None:
    built: list[Path] = []

    def build(root: Path) -> int:
        built.append(root)
        return len(built)

    assert [bench.once("a/b", build), bench.once("a/b", build)] == [1, 1]
    assert [path.name for path in built] == ["a-b"]


def test_only_a_gpu_target_asks_for_cuda() -> None:
    on_gpu, dry = Target(is_cuda=True), Target(is_cuda=False)
    assert "CUDAExecutionProvider" in on_gpu.encoder_settings().providers
    assert "CUDAExecutionProvider" in on_gpu.generator_settings().providers
    assert dry.encoder_settings().providers == ("CPUExecutionProvider",)
    assert (on_gpu.choose(8, 1), dry.choose(8, 1)) == (8, 1)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_cases_of_a_part_have_distinct_names(is_cuda: bool) -> None:
    for part in PARTS.values():
        names = [case.name for case in part.cases(Target(is_cuda=is_cuda))]
        assert names
        assert len(names) == len(set(names))


def test_dry_speed_cases_are_those_of_a_gpu() -> None:
    for part in ("encoder-latency", "bert-large"):
        on_gpu, dry = (
            {case.name for case in PARTS[part].cases(Target(is_cuda=is_cuda))}
            for is_cuda in (True, False)
        )
        assert dry == on_gpu >= {"gpu-fp16-compiled", "transformers-compiled"}


def test_smollm_runs_all_numbers_of_streams_beside_transformers() -> None:
    names = {case.name for case in PARTS["streams"].cases(Target(is_cuda=True))}
    for system in ("gpu-fp16-torch", "gpu-fp16", *GENERATION_BASELINES):
        assert names >= {f"smollm2/{system}/{streams}" for streams in (1, 8, 32, 128)}


def test_flops_are_those_of_the_products() -> None:
    # Hidden size 2, inner size 4, three tokens. Weights: 2 * 3 * (4 * 2 * 2 + 2 * 2 * 4) = 192.
    # Attention: 4 * 3 * 3 * 2 = 72.
    assert count_flops((2, 1, 1, 4), 3) == 264


def test_preparation_that_failed_is_tried_again(bench: Bench) -> None:
    attempts: list[Path] = []

    def build(directory: Path) -> str:
        (directory / "part").touch(exist_ok=False)
        attempts.append(directory)
        if len(attempts) == 1:
            raise MissingRequirement("not installed")
        return "built"

    with pytest.raises(MissingRequirement):
        bench.once("a", build)
    assert bench.once("a", build) == "built"
