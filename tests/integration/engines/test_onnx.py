from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.engines.base import translate_errors
from deployments.engines.onnx.sessions import open_session, select_providers
from deployments.errors import EngineFailed
from deployments.host.machine import CpuInfo
from tests.integration.engines.conftest import KINDS, SETTINGS, Written
from tests.support.artifacts import WIDTH, seal_tiny, tiny_manifest
from tests.support.engine_programs import write_model
from tests.support.fakes import item

ONNX = KINDS["onnxruntime"]


def spec_with(path: Path, options: EngineOptions) -> GraphSpec:
    return GraphSpec(
        path=path,
        device=Device.CPU,
        precision="fp32",
        engine="onnxruntime",
        options=options,
        head=ModelHead.VECTOR,
    )


@pytest.mark.parametrize("device", list(Device))
def test_compute_type_of_sealed_candidate(device: Device, tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    manifest = tiny_manifest("tiny/model")
    candidate = manifest.candidate_for(device)
    assert candidate is not None
    engine = open_engine(GraphSpec.of(directory, manifest, candidate), SETTINGS)
    assert engine.info.compute_type == f"{device}-fp32"
    (row,) = engine.run(collate([item(1)])).items
    assert row.shape == (WIDTH,)


def test_options_reach_the_session(written: Written) -> None:
    path = written(ONNX, ModelHead.VECTOR)
    quiet = open_session(spec_with(path, EngineOptions()), EncoderSettings(intra_op_threads=3))
    options = quiet.get_session_options()
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.use_env_allocators") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    eager = open_session(spec_with(path, EngineOptions(spinning=True)), SETTINGS)
    options = eager.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "500"
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


@pytest.mark.parametrize("flags", [("avx2",), ("avx2", "avx_vnni")])
def test_exact_int8_is_enabled_on_cpus_with_overflow(
    flags: tuple[str, ...], written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = CpuInfo("some", "1", flags, "x86_64")
    monkeypatch.setattr("deployments.engines.onnx.sessions.read_cpu_info", lambda: processor)
    session = open_session(spec_with(written(ONNX, ModelHead.VECTOR), EngineOptions()), SETTINGS)
    options = session.get_session_options()
    if processor.int8_overflows:
        assert options.get_session_config_entry("session.x64quantprecision") == "1"
    else:
        with pytest.raises(RuntimeError, match="x64quantprecision"):
            options.get_session_config_entry("session.x64quantprecision")


def test_disabled_optimizer_does_not_run(tmp_path: Path) -> None:
    """The graph adds zero, which turns -0 into +0 unless the optimizer removes the addition."""
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["zero"], to=1),
        helper.make_node("Neg", ["zero"], ["minus"]),
        helper.make_node("Add", ["minus", "nothing"], ["plus"]),
        helper.make_node("Reciprocal", ["plus"], ["output"]),
    ]
    path = tmp_path / "zero.onnx"
    write_model(path, nodes, {"nothing": np.zeros((), np.float32)}, ("input_ids",))
    for disabled, expected in (((), -np.inf), (("NoopElimination",), np.inf)):
        session = open_session(
            spec_with(path, EngineOptions(disabled_optimizers=disabled)), SETTINGS
        )
        (answer,) = session.run(None, {"input_ids": np.zeros((1, 1), np.int64)})
        assert answer.item() == expected


def test_candidate_providers_override_settings() -> None:
    encoder = EncoderSettings(providers=("CUDAExecutionProvider",))
    options = EngineOptions(providers=("CPUExecutionProvider",))
    assert select_providers(options, encoder) == ("CPUExecutionProvider",)
    assert select_providers(EngineOptions(), encoder) == encoder.providers


def ort_exceptions() -> list[type[Exception]]:
    exceptions = [getattr(ort_state, name) for name in dir(ort_state)]
    return [kind for kind in exceptions if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", [*ort_exceptions(), RuntimeError, ValueError])
def test_translate_errors_keeps_the_cause(kind: type[Exception]) -> None:
    with (
        pytest.raises(EngineFailed, match="graph: went wrong") as failure,
        translate_errors("graph"),
    ):
        raise kind("went wrong")
    assert isinstance(failure.value.__cause__, kind)
