"""Quantization: converted operators, excluded nodes and accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import CPU_INT8_DYNAMIC
from build_artifacts.recipes import (
    CPU_FP32,
    CalibrationMethod,
    DynamicInt8,
    NncfInt8,
    Quantization,
    SmoothedInt8,
    StaticInt8,
    WeightOnlyInt8,
)
from build_artifacts.steps.quantize import EXCLUDED_BLOCK_SIZE, quantize
from deployments.host.machine import CpuInfo
from deployments.tuning.parity import cosines
from tests.support.prepared_build import PreparedBuild, op_counts, unreadable
from tests.support.tiny_encoders import tiny_checkpoint

POOLING = 1  # number of MatMuls in mean pooling: the mask times the token vectors
WITHOUT_VNNI = CpuInfo("Xeon", "6-79-1", ("avx2",), "x86_64")
# Number of MatMuls with constant weights: four in attention and two feed-forward, in two layers.
PRODUCTS = 12


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreparedBuild:
    """The model of `prepared_build` without its outlier, so that int8 is accurate."""
    root = tmp_path_factory.mktemp("plain")
    return PreparedBuild.of(tiny_checkpoint(root / "model"), root / "work")


def quantized(
    build: PreparedBuild, scheme: Quantization, graph: Path, excluded_nodes: tuple[str, ...] = ()
) -> Path:
    quantize(
        build.graphs.float_graph(CPU_FP32),
        scheme,
        graph,
        items=build.items,
        excluded_nodes=excluded_nodes,
    )
    return graph


def worst_cosine(build: PreparedBuild, graph: Path) -> float:
    """Return the worst cosine to the reference over all probes, in padded batches."""
    return float(
        cosines(build.answers(CPU_INT8_DYNAMIC, graph), build.prepared.reference.outputs).min()
    )


def test_dynamic_int8_quantizes_matmuls_and_tables(plain: PreparedBuild, tmp_path: Path) -> None:
    graph = quantized(plain, DynamicInt8(), tmp_path / "graph.onnx")
    counts = op_counts(graph)
    assert counts["MatMulInteger"] == PRODUCTS
    assert counts["MatMul"] == POOLING
    # Three embedding tables: tokens, positions and token types.
    assert (counts["Gather"], counts["DequantizeLinear"]) == (3, 3)
    # `Attention` of opset 23 stays float, because no engine runs it quantized.
    assert counts["Attention"] == 2
    assert "QAttention" not in counts
    assert graph.stat().st_size < 0.75 * plain.graphs.float_graph(CPU_FP32).stat().st_size
    assert worst_cosine(plain, graph) > 0.995


@pytest.mark.parametrize("calibration", ["minmax", "percentile", "entropy"])
def test_static_int8_uses_calibrated_ranges(
    plain: PreparedBuild, tmp_path: Path, calibration: CalibrationMethod
) -> None:
    graph = quantized(plain, StaticInt8(calibration=calibration), tmp_path / "graph.onnx")
    counts = op_counts(graph)
    assert counts["MatMul"] == PRODUCTS + POOLING
    # Every MatMul except the one of pooling reads dequantized activations and weights.
    assert count_readers("DequantizeLinear", "MatMul", graph) == 2 * PRODUCTS
    assert counts["QuantizeLinear"] > 0
    assert graph.stat().st_size < 0.9 * plain.graphs.float_graph(CPU_FP32).stat().st_size
    assert worst_cosine(plain, graph) > 0.97


def test_calibration_methods_return_different_ranges(
    prepared_build: PreparedBuild, tmp_path: Path
) -> None:
    def steps(calibration: CalibrationMethod) -> dict[str, float]:
        scheme = StaticInt8(calibration=calibration)
        graph = onnx.load(quantized(prepared_build, scheme, tmp_path / f"{calibration}.onnx")).graph
        scales = [i for i in graph.initializer if i.name.endswith("_scale") and not i.dims]
        return {i.name: float(numpy_helper.to_array(i)) for i in scales}

    everything, most, telling = steps("minmax"), steps("percentile"), steps("entropy")
    assert len(everything) > PRODUCTS / 2
    # The planted outlier widens the minmax range.
    assert max(most.values()) < max(everything.values())
    assert all(most[name] <= step for name, step in everything.items())
    assert telling not in (everything, most)
    minmax, entropy = tmp_path / "minmax.onnx", tmp_path / "entropy.onnx"
    # Measured cosines: 0.79 with entropy, 0.13 with minmax.
    assert worst_cosine(prepared_build, entropy) > worst_cosine(prepared_build, minmax) + 0.2


def test_nncf_int8_moves_outliers_into_weights(
    prepared_build: PreparedBuild, tmp_path: Path
) -> None:
    pytest.importorskip("nncf")
    graph = quantized(prepared_build, NncfInt8(), tmp_path / "graph.onnx")
    counts = op_counts(graph)
    assert counts["MatMul"] == PRODUCTS + POOLING
    assert count_readers("DequantizeLinear", "MatMul", graph) >= PRODUCTS
    static_graph = quantized(prepared_build, StaticInt8(), tmp_path / "static.onnx")
    assert worst_cosine(prepared_build, graph) > worst_cosine(prepared_build, static_graph)


def test_weights_only_int8_keeps_tables_and_activations(
    plain: PreparedBuild, tmp_path: Path
) -> None:
    graph = quantized(plain, WeightOnlyInt8(block=32), tmp_path / "graph.onnx")
    counts = op_counts(graph)
    assert counts["MatMulNBits"] == PRODUCTS
    assert counts["MatMul"] == POOLING
    assert not {"DynamicQuantizeLinear", "DequantizeLinear"} & counts.keys()
    assert graph.stat().st_size < 0.9 * plain.graphs.float_graph(CPU_FP32).stat().st_size
    assert worst_cosine(plain, graph) > 0.999


@pytest.mark.parametrize("scheme", [DynamicInt8(), StaticInt8()], ids=lambda s: type(s).__name__)
def test_excluded_nodes_keep_float_activations(
    plain: PreparedBuild, tmp_path: Path, scheme: Quantization
) -> None:
    every = quantized(plain, scheme, tmp_path / "every.onnx")
    excluded_nodes = tuple(plain.graphs.sensitive_nodes(CPU_INT8_DYNAMIC)[:3])
    graph = quantized(plain, scheme, tmp_path / "graph.onnx", excluded_nodes)
    int8 = "MatMulInteger" if isinstance(scheme, DynamicInt8) else "MatMul"
    assert op_counts(graph)[int8] == op_counts(every)[int8] - 3
    blocks = [n for n in onnx.load(graph).graph.node if n.op_type == "MatMulNBits"]
    assert len(blocks) == 3
    assert all(name in {n.name.removesuffix("_Q8") for n in blocks} for name in excluded_nodes)
    assert {a.i for n in blocks for a in n.attribute if a.name == "block_size"} == {
        EXCLUDED_BLOCK_SIZE
    }
    # The excluded nodes still have int8 weights, so the graph is hardly larger.
    assert graph.stat().st_size < 1.2 * every.stat().st_size
    assert worst_cosine(plain, graph) > worst_cosine(plain, every) - 0.001


@pytest.mark.parametrize("scheme", [DynamicInt8(), StaticInt8()], ids=lambda s: type(s).__name__)
def test_shared_weights_run_without_vnni(
    tmp_path: Path, scheme: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of ALBERT share their weights, and ONNX Runtime must handle that without VNNI.

    On CPUs without VNNI, it runs in a precise mode, which copies int8 weights.
    """
    monkeypatch.setattr("deployments.engines.onnx.sessions.read_cpu_info", lambda: WITHOUT_VNNI)
    source = tiny_checkpoint(tmp_path / "model", model_type="albert")
    build = PreparedBuild.of(source, tmp_path / "work")
    assert worst_cosine(build, quantized(build, scheme, tmp_path / "graph.onnx")) > 0.97


@pytest.mark.parametrize("scheme", [SmoothedInt8(layout="pairs"), NncfInt8()], ids=str)
def test_openvino_sums_do_not_overflow_without_vnni(
    plain: PreparedBuild, tmp_path: Path, scheme: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("build_artifacts.smoothing.writing", "build_artifacts.steps.quantize"):
        monkeypatch.setattr(f"{module}.read_cpu_info", lambda: WITHOUT_VNNI)
    graph = quantized(plain, scheme, tmp_path / "graph.onnx")
    tables = {i.name: numpy_helper.to_array(i) for i in onnx.load(graph).graph.initializer}
    # Embedding tables are left out. They keep 8 bits, because no product sums their rows.
    weights = [
        table
        for name, table in tables.items()
        if table.dtype == np.int8 and table.ndim == 2 and "embedding" not in name
    ]
    assert len(weights) == PRODUCTS
    assert max(int(np.abs(table.astype(int)).max()) for table in weights) == 64
    assert worst_cosine(plain, graph) > 0.97


def test_weight_zero_points_are_optional(plain: PreparedBuild, tmp_path: Path) -> None:
    def zero_points(symmetric: bool) -> bool:
        scheme = DynamicInt8(symmetric_weights=symmetric)
        graph = onnx.load(quantized(plain, scheme, tmp_path / f"{symmetric}.onnx")).graph
        points = [i for i in graph.initializer if i.name.endswith("_zero_point") and i.dims]
        assert len(points) >= PRODUCTS
        return any(np.any(numpy_helper.to_array(point)) for point in points)

    assert zero_points(symmetric=False)
    assert not zero_points(symmetric=True)


def test_quantizer_failure_has_one_line(plain: PreparedBuild, tmp_path: Path) -> None:
    graph = unreadable(tmp_path / "graph.onnx")
    with pytest.raises(UnsupportedModel, match="StaticInt8 failed on this graph: "):
        quantize(graph, StaticInt8(), tmp_path / "q.onnx", items=plain.items)


def count_readers(writer: str, reader: str, graph: Path) -> int:
    """Count the inputs of `reader` nodes that are outputs of `writer` nodes."""
    nodes = onnx.load(graph).graph.node
    written = {name for node in nodes if node.op_type == writer for name in node.output}
    read = [name for node in nodes if node.op_type == reader for name in node.input]
    return sum(name in written for name in read)
