"""The table of encoder engines: requirements, errors, and adding an engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.config import EncoderSettings
from deployments.engines import (
    ENGINES,
    GraphSpec,
    check_providers,
    missing_requirement,
    open_engine,
)
from deployments.errors import RequirementMissing

CPU = EncoderSettings()
CUDA = EncoderSettings(providers=("CUDAExecutionProvider",))
UNKNOWN_PROVIDER = EncoderSettings(providers=("CPUExecutionProvider", "AbacusExecutionProvider"))
REQUIREMENTS = [
    (engine, package)
    for engine, kind in ENGINES.items()
    if kind.open_encoder is not None
    for package in kind.packages
]


def build_spec(engine: str, options: EngineOptions | None = None) -> GraphSpec:
    return GraphSpec(
        path=Path("nowhere/model.graph"),
        device=Device.CPU,
        precision="fp32",
        engine=engine,
        options=options or EngineOptions(),
        head=ModelHead.VECTOR,
    )


def test_import_of_the_table_loads_no_runtime() -> None:
    code = "import sys, deployments.engines; print(*{m.partition('.')[0] for m in sys.modules})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not set(output.stdout.split()) & {"onnxruntime", "openvino", "torch", "transformers"}


def test_open_engine_with_unknown_engine_fails() -> None:
    with pytest.raises(
        RequirementMissing, match="engine `abacus` is unknown; known are onnxruntime, "
    ):
        open_engine(build_spec("abacus"), CPU)


def test_open_engine_with_decoder_engine_fails() -> None:
    reason = "transformers does not run encoder models"
    assert missing_requirement(build_spec("transformers"), CPU) == reason
    with pytest.raises(RequirementMissing, match=reason):
        open_engine(build_spec("transformers"), CPU)


@pytest.mark.parametrize(("engine", "package"), REQUIREMENTS)
def test_missing_package_is_named(
    engine: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    spec = build_spec(engine)
    assert missing_requirement(spec, CPU) == f"the package `{package}` is not installed"
    with pytest.raises(RequirementMissing, match=rf"model\.graph: the package `{package}`"):
        open_engine(spec, CPU)


def test_missing_provider_is_named() -> None:
    assert missing_requirement(build_spec("onnxruntime"), CPU) is None
    reason = "onnxruntime has no `AbacusExecutionProvider` here"
    assert missing_requirement(build_spec("onnxruntime"), UNKNOWN_PROVIDER) == reason
    options = EngineOptions(providers=UNKNOWN_PROVIDER.providers)
    assert missing_requirement(build_spec("onnxruntime", options), CPU) == reason
    with pytest.raises(RequirementMissing, match="`AbacusExecutionProvider`"):
        check_providers(UNKNOWN_PROVIDER)
    check_providers(CPU)


def test_torch_with_cuda_provider_requires_cuda() -> None:
    torch = pytest.importorskip("torch")
    assert missing_requirement(build_spec("torch"), CPU) is None
    has_requirements = missing_requirement(build_spec("torch"), CUDA) is None
    assert has_requirements == torch.cuda.is_available()


def test_compiled_program_on_a_gpu_requires_a_c_compiler_and_the_headers_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    programs: list[str] = []
    monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
    compiled = build_spec("torch", EngineOptions(compile=True, buckets=((1, 4),)))
    assert missing_requirement(build_spec("torch"), CUDA) is None
    assert missing_requirement(compiled, CPU) is None
    reason = "torch.compile needs a C compiler on a GPU: install `gcc`"
    assert missing_requirement(compiled, CUDA) == reason
    programs.append("gcc")
    assert f"{tmp_path}/Python.h" in (missing_requirement(compiled, CUDA) or "")
    (tmp_path / "Python.h").touch()
    assert missing_requirement(compiled, CUDA) is None
