"""Which engines there are, and what happens where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from deployments.artifacts.manifest import Candidate, Device, EngineOptions, Head
from deployments.config import LaneSettings
from deployments.engines import ENGINES, GraphSpec, check_lane, lacking, open_engine, runs_here
from deployments.errors import EngineFailed, ManifestInvalid
from tests.support.artifacts import tiny_manifest

CPU = LaneSettings()
CUDA = LaneSettings(providers=("CUDAExecutionProvider",))
ABACUS = LaneSettings(providers=("CPUExecutionProvider", "AbacusExecutionProvider"))


def spec(engine: str, options: EngineOptions | None = None) -> GraphSpec:
    return GraphSpec(
        path=Path("nowhere/model.graph"),
        device=Device.CPU,
        precision="fp32",
        engine=engine,
        options=options or EngineOptions(),
        head=Head.VECTOR,
    )


def test_every_engine_that_a_manifest_may_name_is_known() -> None:
    for_text = {"transformers"}  # engines/decoders.py
    assert set(ENGINES) | for_text == set(get_args(get_type_hints(Candidate)["engine"]))


def test_an_engine_that_only_generates_runs_no_graph() -> None:
    manifest = tiny_manifest(devices=(Device.GPU,))
    (candidate,) = manifest.candidates
    other = candidate.model_copy(update={"engine": "transformers"})
    with pytest.raises(ManifestInvalid, match="transformers runs models that generate only"):
        GraphSpec.of(Path("somewhere"), manifest, other)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_an_engine_without_its_package_is_left_out_by_name(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    assert lacking(spec(engine), CPU) == f"the package `{engine}` is not installed"
    assert not runs_here(spec(engine), CPU)
    with pytest.raises(EngineFailed, match=rf"model\.graph: the package `{engine}`"):
        open_engine(spec(engine), CPU)


def test_a_provider_that_is_not_there_is_named() -> None:
    assert runs_here(spec("onnxruntime"), CPU)
    assert (
        lacking(spec("onnxruntime"), ABACUS) == "onnxruntime has no `AbacusExecutionProvider` here"
    )
    tensorrt = EngineOptions(providers=("AbacusExecutionProvider", "CPUExecutionProvider"))
    assert not runs_here(spec("onnxruntime", tensorrt), CPU)
    with pytest.raises(EngineFailed, match="`AbacusExecutionProvider`"):
        check_lane(ABACUS)
    check_lane(CPU)


def test_torch_on_a_gpu_lane_needs_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    assert runs_here(spec("torch"), CPU)
    assert runs_here(spec("torch"), CUDA) == torch.cuda.is_available()
