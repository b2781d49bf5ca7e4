"""Graphs of candidates: shared exports, reuse and failures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from build_artifacts.encoders.candidates import CandidateGraphs, with_other_calibrations
from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import (
    CPU_INT8,
    CPU_INT8_STATIC,
    CPU_INT8_WEIGHTS,
    OPENVINO_INT8,
)
from build_artifacts.recipes import (
    CPU_FP32,
    DynamicInt8,
    SmoothedInt8,
    StaticInt8,
    TorchProgramRecipe,
)
from build_artifacts.steps.rewrite import REWRITES, Rewrite
from deployments.tuning.parity import cosines
from tests.support.prepared_build import (
    FLOAT,
    PreparedBuild,
    RecordingRunner,
    op_counts,
    unreadable,
)

SHARED = (CPU_FP32, CPU_INT8, CPU_INT8_WEIGHTS, CPU_INT8_STATIC)


def test_candidates_share_export_and_rewrite(prepared_build: PreparedBuild, tmp_path: Path) -> None:
    runner = RecordingRunner(tmp_path / "work")
    graphs = CandidateGraphs(runner.steps, prepared_build.prepared)
    files = {recipe.name: graphs.graph(recipe) for recipe in SHARED}
    assert len(set(files.values())) == len(SHARED)
    assert [len(runner.lines(step)) for step in ("export", "rewrite", "quantize")] == [
        1,
        1,
        3,
    ]
    (line,) = runner.lines("export")
    assert line.startswith("float32 graph, opset 23: ")
    assert line.endswith(" MB")

    first_output = runner.output.getvalue()
    assert graphs.graph(CPU_INT8) == files["cpu-int8"]
    assert runner.output.getvalue() == first_output, "an existing graph was built or reported again"


def test_graph_of_interrupted_build_is_reused_and_reported_once(
    prepared_build: PreparedBuild, tmp_path: Path
) -> None:
    resumed_runner = RecordingRunner(tmp_path / "again")
    done = prepared_build.graphs.graph(CPU_INT8)
    (tmp_path / "again" / "steps").symlink_to(done.parents[1])
    graphs = CandidateGraphs(resumed_runner.steps, prepared_build.prepared)
    for _ in range(2):
        assert graphs.graph(CPU_INT8).read_bytes() == done.read_bytes()
    first_output = resumed_runner.output.getvalue().splitlines()
    assert len(first_output) == 3
    assert all(line.endswith(": done by an interrupted build") for line in first_output)


def test_calibration_and_excluded_nodes_change_graph(prepared_build: PreparedBuild) -> None:
    order = prepared_build.graphs.sensitive_nodes(CPU_INT8)
    attempts = [
        prepared_build.graphs.graph(CPU_INT8_STATIC),
        *map(prepared_build.graphs.graph, with_other_calibrations(CPU_INT8_STATIC)),
        prepared_build.graphs.graph(CPU_INT8_STATIC, order[:1]),
        prepared_build.graphs.graph(CPU_INT8_STATIC, order[:2]),
    ]
    assert len({path.read_bytes() for path in attempts}) == len(set(attempts)) == 5
    assert op_counts(attempts[-1])["MatMulNBits"] == 2


def test_other_calibrations_of_static_and_smoothed_int8() -> None:
    schemes = [other.quantization for other in with_other_calibrations(CPU_INT8_STATIC)]
    assert schemes == [StaticInt8(calibration="percentile"), StaticInt8(calibration="entropy")]
    per_token = SmoothedInt8(gated_ranges="token")
    assert [other.quantization for other in with_other_calibrations(CPU_INT8)] == [per_token]
    assert with_other_calibrations(OPENVINO_INT8) == []
    assert with_other_calibrations(CPU_FP32) == []


def test_sensitivity_order_is_shared_by_float_graph(prepared_build: PreparedBuild) -> None:
    dynamic = replace(CPU_INT8, quantization=DynamicInt8(symmetric_weights=True))
    assert prepared_build.graphs.sensitive_nodes(dynamic) == prepared_build.graphs.sensitive_nodes(
        CPU_INT8
    )
    ranked = prepared_build.runner.lines("rank")
    assert len(ranked) == len(set(ranked)), "one float graph was ranked twice"


def test_torch_program_matches_reference(prepared_build: PreparedBuild) -> None:
    recipe = replace(FLOAT, source=TorchProgramRecipe(dtype="float32"), engine="torch")
    program = prepared_build.graphs.graph(recipe)
    outputs = prepared_build.answers(recipe, program)
    assert float(cosines(outputs, prepared_build.prepared.reference.outputs).min()) > 0.99999


def test_failed_export_leaves_no_files(prepared_build: PreparedBuild, tmp_path: Path) -> None:
    runner = RecordingRunner(tmp_path / "work")
    missing_weights = replace(prepared_build.prepared, weights=tmp_path)
    with pytest.raises(UnsupportedModel):
        CandidateGraphs(runner.steps, missing_weights).graph(CPU_INT8)
    assert list((tmp_path / "work" / "steps").iterdir()) == []
    assert runner.lines("export") == ["float32 graph, opset 23: failed"]


def scale_a_norm(scale: float) -> Rewrite:
    """Return a rewrite that sets all scales of a LayerNormalization to `scale`."""

    def rewrite(model: ir.Model) -> int:
        scales = next(n for n in model.graph if n.op_type == "LayerNormalization").inputs[1]
        assert scales is not None
        values = np.full(scales.shape.numpy(), scale, np.float32)
        scales.const_value = ir.tensor(values, name=scales.name)
        return 1

    return rewrite


def test_rewrite_that_changes_outputs_is_discarded(
    prepared_build: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REWRITES, "drop-empty-rows", scale_a_norm(0.0))
    runner = RecordingRunner(tmp_path / "work")
    graphs = CandidateGraphs(runner.steps, prepared_build.prepared)
    exported = graphs.float_graph(FLOAT)
    assert graphs.graph(CPU_FP32).read_bytes() == exported.read_bytes()
    (line,) = runner.lines("rewrite")
    assert re.fullmatch(
        r"cpu-fp32: drop-empty-rows, packed-heads, matmul-pooling, direct-mask: "
        r"discarded, the outputs would change by \d\.\de[+-]\d\d",
        line,
    )
    assert op_counts(graphs.graph(CPU_INT8))["MatMulIntegerToFloat"], (
        "the exported graph was not quantized"
    )


def test_rewrite_with_nonfinite_outputs_is_discarded(
    prepared_build: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REWRITES, "drop-empty-rows", scale_a_norm(float("nan")))
    graphs = CandidateGraphs(RecordingRunner(tmp_path / "work").steps, prepared_build.prepared)
    assert graphs.float_graph(CPU_FP32).read_bytes() == graphs.float_graph(FLOAT).read_bytes()


def use_unknown_operator(model: ir.Model) -> int:
    """Rewrite that ONNX Runtime cannot open."""
    next(n for n in model.graph if n.op_type == "LayerNormalization").op_type = "Telepathy"
    return 1


def test_rewrite_that_does_not_run_is_discarded(
    prepared_build: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REWRITES, "drop-empty-rows", use_unknown_operator)
    graphs = CandidateGraphs(RecordingRunner(tmp_path / "work").steps, prepared_build.prepared)
    assert graphs.float_graph(CPU_FP32).read_bytes() == graphs.float_graph(FLOAT).read_bytes()


def test_export_that_does_not_run_is_unsupported(
    prepared_build: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = RecordingRunner(tmp_path / "work")
    graphs = CandidateGraphs(runner.steps, prepared_build.prepared)
    unreadable(graphs.float_graph(FLOAT))
    monkeypatch.setitem(REWRITES, "drop-empty-rows", lambda model: 1)
    with pytest.raises(UnsupportedModel, match="ONNX Runtime does not run the exported graph: "):
        graphs.float_graph(CPU_FP32)
