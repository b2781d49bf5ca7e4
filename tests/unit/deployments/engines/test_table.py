"""Which engines there are, and what happens where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from deployments.artifacts.manifest import Candidate, EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.config import EncoderSettings
from deployments.engines import (
    ENGINES,
    GraphSpec,
    can_run,
    check_providers,
    missing_requirement,
    open_engine,
)
from deployments.errors import EngineFailed, ManifestInvalid
from tests.support.artifacts import tiny_manifest

CPU = EncoderSettings()
CUDA = EncoderSettings(providers=("CUDAExecutionProvider",))
ABACUS = EncoderSettings(providers=("CPUExecutionProvider", "AbacusExecutionProvider"))


def spec(engine: str, options: EngineOptions | None = None) -> GraphSpec:
    return GraphSpec(
        path=Path("nowhere/model.graph"),
        device=Device.CPU,
        precision="fp32",
        engine=engine,
        options=options or EngineOptions(),
        head=ModelHead.VECTOR,
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
    assert missing_requirement(spec(engine), CPU) == f"the package `{engine}` is not installed"
    assert not can_run(spec(engine), CPU)
    with pytest.raises(EngineFailed, match=rf"model\.graph: the package `{engine}`"):
        open_engine(spec(engine), CPU)


def test_a_provider_that_is_not_there_is_named() -> None:
    assert can_run(spec("onnxruntime"), CPU)
    assert (
        missing_requirement(spec("onnxruntime"), ABACUS)
        == "onnxruntime has no `AbacusExecutionProvider` here"
    )
    tensorrt = EngineOptions(providers=("AbacusExecutionProvider", "CPUExecutionProvider"))
    assert not can_run(spec("onnxruntime", tensorrt), CPU)
    with pytest.raises(EngineFailed, match="`AbacusExecutionProvider`"):
        check_providers(ABACUS)
    check_providers(CPU)


def test_torch_on_a_gpu_encoder_needs_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    assert can_run(spec("torch"), CPU)
    assert can_run(spec("torch"), CUDA) == torch.cuda.is_available()
