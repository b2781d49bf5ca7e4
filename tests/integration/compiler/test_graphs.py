"""What candidates share is made once, and everything else apart."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import (
    CPU_FP32,
    CPU_INT8,
    CPU_INT8_STATIC,
    CPU_INT8_WEIGHTS,
    DynamicInt8,
    StaticInt8,
    TorchProgramRecipe,
)
from build_artifacts.search import graphs as build_graphs
from build_artifacts.search.graphs import CandidateGraphs, with_other_calibrations
from build_artifacts.steps.rewrite import REWRITES
from deployments.tuning.parity import cosines
from tests.support.prepared_build import FLOAT, PreparedBuild, RecordingRunner, op_counts

SHARED = (CPU_FP32, CPU_INT8, CPU_INT8_WEIGHTS, CPU_INT8_STATIC)


def test_one_export_and_one_rewrite_serve_every_candidate_of_that_source(
    workshop: PreparedBuild, tmp_path: Path
) -> None:
    runner = RecordingRunner(tmp_path / "work")
    graphs = CandidateGraphs(runner.steps, workshop.prepared)
    files = {recipe.name: graphs.graph(recipe) for recipe in SHARED}
    assert len(set(files.values())) == len(SHARED)
    assert [len(runner.lines(step)) for step in ("export", "rewrite", "quantize")] == [1, 1, 3]
    (told,) = runner.lines("export")
    assert told.startswith("float32 graph, opset 23: ")
    assert told.endswith(" MB")

    lines = runner.told.getvalue()
    assert graphs.graph(CPU_INT8) == files["cpu-int8"]
    assert runner.told.getvalue() == lines, "a graph that is there is made and told once"


def test_a_graph_of_an_interrupted_build_is_found_and_told_once(
    workshop: PreparedBuild, tmp_path: Path
) -> None:
    again = RecordingRunner(tmp_path / "again")
    done = workshop.graphs.graph(CPU_INT8)
    (tmp_path / "again" / "steps").symlink_to(done.parents[1])
    graphs = CandidateGraphs(again.steps, workshop.prepared)
    for _ in range(2):
        assert graphs.graph(CPU_INT8).read_bytes() == done.read_bytes()
    lines = again.told.getvalue().splitlines()
    assert len(lines) == 3
    assert all(line.endswith(": done by an interrupted build") for line in lines)


def test_another_calibration_and_other_kept_nodes_are_other_graphs(workshop: PreparedBuild) -> None:
    order = workshop.graphs.sensitive_nodes(CPU_INT8)
    attempts = [
        workshop.graphs.graph(CPU_INT8_STATIC),
        *map(workshop.graphs.graph, with_other_calibrations(CPU_INT8_STATIC)),
        workshop.graphs.graph(CPU_INT8_STATIC, order[:1]),
        workshop.graphs.graph(CPU_INT8_STATIC, order[:2]),
    ]
    assert len({path.read_bytes() for path in attempts}) == len(set(attempts)) == 5
    assert op_counts(attempts[-1])["MatMulNBits"] == 2


def test_the_other_calibrations_are_those_of_the_recipe() -> None:
    schemes = [other.quantization for other in with_other_calibrations(CPU_INT8_STATIC)]
    assert schemes == [StaticInt8(calibration="percentile"), StaticInt8(calibration="entropy")]
    assert with_other_calibrations(CPU_INT8) == []
    assert with_other_calibrations(CPU_FP32) == []


def test_an_order_belongs_to_the_float_graph(workshop: PreparedBuild) -> None:
    dynamic = replace(CPU_INT8, quantization=DynamicInt8(symmetric_weights=True))
    assert workshop.graphs.sensitive_nodes(dynamic) == workshop.graphs.sensitive_nodes(CPU_INT8)
    ranked = workshop.runner.lines("rank")
    assert len(ranked) == len(set(ranked)), "one float graph was ranked twice"


def test_a_torch_program_answers_like_the_graph(workshop: PreparedBuild) -> None:
    recipe = replace(FLOAT, source=TorchProgramRecipe(dtype="float32"), engine="torch")
    program = workshop.graphs.graph(recipe)
    given = workshop.answers(recipe, program)
    assert float(cosines(given, workshop.prepared.reference.outputs).min()) > 0.99999


def test_a_model_that_cannot_be_exported_leaves_no_half_graph(
    workshop: PreparedBuild, tmp_path: Path
) -> None:
    runner = RecordingRunner(tmp_path / "work")
    nowhere = replace(workshop.prepared, weights=tmp_path)
    with pytest.raises(UnsupportedModel):
        CandidateGraphs(runner.steps, nowhere).graph(CPU_INT8)
    assert list((tmp_path / "work" / "steps").iterdir()) == []
    assert runner.lines("export") == ["float32 graph, opset 23: failed"]


def test_a_rewrite_that_would_change_answers_leaves_the_graph_as_exported(
    workshop: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_a_norm(model: ir.Model) -> int:
        scale = next(n for n in model.graph if n.op_type == "LayerNormalization").inputs[1]
        assert scale is not None
        scale.const_value = ir.tensor(np.zeros(scale.shape.numpy(), np.float32), name=scale.name)
        return 1

    monkeypatch.setitem(REWRITES, "drop-empty-rows", forget_a_norm)
    runner = RecordingRunner(tmp_path / "work")
    graphs = CandidateGraphs(runner.steps, workshop.prepared)
    exported = graphs.float_graph(FLOAT)
    assert graphs.graph(CPU_FP32).read_bytes() == exported.read_bytes()
    (told,) = runner.lines("rewrite")
    assert re.fullmatch(
        r"cpu-fp32: drop-empty-rows, packed-heads: "
        r"discarded, the outputs would change by \d\.\de[+-]\d\d",
        told,
    )
    assert op_counts(graphs.graph(CPU_INT8))["MatMulInteger"], "it is quantised all the same"


def test_a_rewrite_after_which_no_number_is_left_is_not_believed(
    workshop: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_graphs, "largest_difference", lambda *_: float("nan"))
    graphs = CandidateGraphs(RecordingRunner(tmp_path / "work").steps, workshop.prepared)
    assert graphs.float_graph(CPU_FP32).read_bytes() == graphs.float_graph(FLOAT).read_bytes()
