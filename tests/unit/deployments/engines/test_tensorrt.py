"""TensorRT through ONNX Runtime, without a GPU: options, caches, and errors if it is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, save

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import missing_requirement, open_engine, tensorrt
from deployments.engines.base import GraphSpec
from deployments.engines.onnx import sessions
from deployments.engines.onnx.io_binding import IoBindingEngine
from deployments.engines.tensorrt import TENSORRT, build_tensorrt_options, missing_tensorrt
from deployments.errors import RequirementMissing
from tests.support.fakes import build_item

CUDA = "CUDAExecutionProvider"
BUCKETS = ((1, 32), (1, 128), (8, 32), (8, 128), (32, 128))
SETTINGS = EncoderSettings(providers=(CUDA,))


@pytest.fixture(autouse=True)
def _fresh_caches() -> Iterator[None]:
    for cached in (missing_tensorrt, tensorrt.load_tensorrt_libraries):
        cached.cache_clear()
    yield
    for cached in (missing_tensorrt, tensorrt.load_tensorrt_libraries):
        cached.cache_clear()


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Write a graph that sums the embeddings of the unmasked tokens, [B, 2], for ten token ids."""
    ids, mask = (
        helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "T"])
        for name in ("input_ids", "attention_mask")
    )
    table = helper.make_tensor("table", TensorProto.FLOAT, [10, 2], np.arange(20.0))
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    last = helper.make_tensor("last", TensorProto.INT64, [1], [2])
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weights", "last"], ["column"]),
        helper.make_node("Mul", ["words", "column"], ["valid"]),
        helper.make_node("ReduceSum", ["valid", "axes"], ["output"], keepdims=0),
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["B", 2])
    body = helper.make_graph(nodes, "sum", [ids, mask], [output], [table, axes, last])
    path = tmp_path / "gpu-fp16-tensorrt.onnx"
    opset = helper.make_opsetid("", 18)
    save(helper.make_model(body, opset_imports=[opset], ir_version=10), path)
    return path


def build_spec(graph: Path, host_folder: Path | None, providers: tuple[str, ...]) -> GraphSpec:
    return GraphSpec(
        path=graph,
        device=Device.GPU,
        precision="fp16",
        engine="onnxruntime",
        options=EngineOptions(providers=providers, buckets=BUCKETS),
        head=ModelHead.VECTOR,
        host_folder=host_folder,
    )


def test_profile_reaches_from_the_smallest_to_the_largest_bucket(graph: Path) -> None:
    assert build_tensorrt_options(graph, "fp16", BUCKETS, None) == {
        "trt_fp16_enable": "True",
        "trt_profile_min_shapes": "input_ids:1x32,attention_mask:1x32",
        "trt_profile_opt_shapes": "input_ids:8x32,attention_mask:8x32",
        "trt_profile_max_shapes": "input_ids:32x128,attention_mask:32x128",
    }
    assert build_tensorrt_options(graph, "fp32", (), None) == {}


def test_mask_positions_have_one_dimension(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "_read_inputs", lambda _: ["input_ids", "mask_positions"])
    options = build_tensorrt_options(graph, "fp16", BUCKETS, None)
    assert options["trt_profile_max_shapes"] == "input_ids:32x128,mask_positions:32"


def test_engine_and_times_are_kept_in_the_host_folder(graph: Path, tmp_path: Path) -> None:
    options = build_tensorrt_options(graph, "fp16", (), tmp_path / "hosts" / "f00")
    folder = Path(options["trt_engine_cache_path"])
    assert folder.is_dir()
    assert folder.parents[2] == tmp_path / "hosts" / "f00"
    # An engine of another onnxruntime version is invalid, so each version has its own folder.
    assert folder.parent.name == f"onnxruntime-{ort.__version__}"
    assert folder.name == "gpu-fp16-tensorrt"
    assert options["trt_timing_cache_path"] == str(folder)
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"


def test_read_only_store_keeps_nothing(
    graph: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hosts").write_text("a file instead of a folder")
    caplog.set_level("INFO")
    options = build_tensorrt_options(graph, "fp16", (), tmp_path / "hosts")
    assert options == {"trt_fp16_enable": "True"}
    assert "compiled at each start" in caplog.text


def test_missing_provider_and_package_are_told_in_one_line(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = build_spec(graph, None, (TENSORRT, CUDA))
    assert missing_requirement(spec, SETTINGS) == f"onnxruntime has no `{TENSORRT}` here"
    monkeypatch.setattr(ort, "get_available_providers", lambda: [TENSORRT, CUDA])
    monkeypatch.setattr(tensorrt, "find_library", lambda _: None)
    reason = (
        "TensorRT 10 is not installed: `libnvinfer.so.10` is missing "
        "(`pip install 'tensorrt-cu13-libs>=10,<11'`)"
    )
    assert missing_requirement(spec, SETTINGS) == reason
    with pytest.raises(RequirementMissing, match=r"tensorrt\.onnx: TensorRT 10 is not installed"):
        open_engine(spec, SETTINGS)
    missing_tensorrt.cache_clear()
    monkeypatch.setattr(tensorrt, "find_library", lambda _: "libnvinfer.so.10")
    assert missing_requirement(spec, SETTINGS) is None


@pytest.mark.parametrize(("version", "is_missing"), [("10", False), ("11", True)])
def test_package_of_another_major_version_is_missing(
    version: str, is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime links one major version of TensorRT, but pip installs the latest version."""
    package = tmp_path / "tensorrt_libs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / f"libnvinfer.so.{version}").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tensorrt, "find_library", lambda _: None)
    assert (missing_tensorrt() is not None) == is_missing
    missing_tensorrt.cache_clear()
    monkeypatch.setattr(tensorrt, "find_library", lambda _: "libnvinfer.so.11")
    assert (missing_tensorrt() is not None) == is_missing
    sys.modules.pop("tensorrt_libs", None)


def test_damaged_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tensorrt_libs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "libnvinfer.so.10").write_text("no library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RequirementMissing, match=r"TensorRT cannot be loaded: .*libnvinfer\.so\.10"
    ):
        tensorrt.load_tensorrt_libraries()
    sys.modules.pop("tensorrt_libs", None)


def test_session_gets_the_options_and_computes(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FakeSession computes on the CPU, but reports the GPU providers, which a host may lack."""
    given: list[Any] = []

    class FakeSession:
        def __init__(self, path: Path, sess_options: Any, providers: Any, **_: Any) -> None:
            given.extend(providers)
            self._session = ort_session(path, sess_options)

        def get_providers(self) -> list[str]:
            return [name for name, _ in given]

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

    ort_session = ort.InferenceSession
    monkeypatch.setattr(ort, "get_available_providers", lambda: [TENSORRT, CUDA])
    monkeypatch.setattr(tensorrt, "find_library", lambda _: "libnvinfer.so.10")
    monkeypatch.setattr(sessions, "_load_cuda_libraries", lambda: None)
    monkeypatch.setattr(sessions.ort, "InferenceSession", FakeSession)
    spec = build_spec(graph, tmp_path, (TENSORRT, CUDA))
    session = sessions.open_session(spec, SETTINGS)
    (_, options), (_, cuda_options) = given
    assert [name for name, _ in given] == [TENSORRT, CUDA]
    assert options["trt_profile_max_shapes"].startswith("input_ids:32x128")
    assert Path(options["trt_engine_cache_path"]).is_relative_to(tmp_path)
    assert cuda_options == {}
    assert isinstance(session, FakeSession)


def test_provider_that_does_not_start_is_a_missing_requirement(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CpuSession:
        """Session on a host whose GPU driver is missing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(sessions, "_load_cuda_libraries", lambda: None)
    monkeypatch.setattr(sessions.ort, "InferenceSession", CpuSession)
    with pytest.raises(RequirementMissing, match=f"`{CUDA}` did not start"):
        sessions.open_session(build_spec(graph, None, (CUDA,)), SETTINGS)


def test_batch_beyond_the_buckets_is_split(graph: Path) -> None:
    spec = replace(build_spec(graph, None, ()), device=Device.CPU)
    engine = IoBindingEngine(spec, EncoderSettings())
    shapes = []
    run_unbound = engine._run_unbound

    def spy(*arguments: Any) -> Any:
        shapes.append(arguments[2]["input_ids"].shape)
        return run_unbound(*arguments)

    engine._run_unbound = spy  # type: ignore[method-assign]
    batch = collate([build_item(range(1 + number % 5)) for number in range(70)])
    expected = engine.run(batch).items
    assert shapes == [(70, 5)]
    engine._compiles_shapes = True  # as if the first provider were TensorRT
    rows = engine.run(batch).items
    assert shapes == [(70, 5)]
    np.testing.assert_allclose(np.stack(rows), expected, rtol=1e-6)
    long = collate([build_item([number] * 200) for number in (1, 2)])
    assert len(engine.run(long).items) == 2
    assert shapes == [(70, 5), (1, 200), (1, 200)]
    engine.close()
