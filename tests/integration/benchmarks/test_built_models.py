"""Benchmark commands with a tiny model that the compiler built."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest

from benchmarks.__main__ import main
from benchmarks.common.sentences import STSB_NAME
from benchmarks.graphs.candidates import (
    BASELINES,
    COMMON_RECIPE,
    DYNAMIC,
    OPENVINO,
    SEALED,
    TORCH,
)
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import BuildRecipe
from deployments.tuning.costs import CostTable
from tests.integration.benchmarks.test_commands import only_result
from tests.support.prepared_build import LITTLE
from tests.support.tiny_encoders import tiny_checkpoint

PAIRS = "score\tsentence1\tsentence2\n1\tgood\tbad\n2\tthe river\ta train\n3\tgood\tlovely film\n"
STATIC = OPENVINO[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    request = BuildRequest(
        ref=str(tiny_checkpoint(tmp_path_factory.mktemp("source") / "tiny", layers=1)),
        store=tmp_path_factory.mktemp("store"),
        recipe=BuildRecipe(candidates=(CPU_INT8,)),
        budget=LITTLE,
    )
    return build(request, BuildProgress(io.StringIO()))


def places(built: BuildResult, out: Path) -> list[str]:
    return ["--store", str(built.directory.parents[1]), "--out", str(out)]


@pytest.mark.slow
def test_graphs_measures_all_systems_and_goals(
    built: BuildResult,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.common.engine_timing.TIMING_S", 0.005)
    # The baseline OPENVINO[1] imports NNCF, which takes seconds.
    monkeypatch.delitem(BASELINES, OPENVINO[1])
    out, pairs = tmp_path / "out", tmp_path / "pairs.tsv"
    pairs.write_text(PAIRS, encoding="utf-8")
    command = ["graphs", built.manifest.id, *places(built, out), "--threads", "2"]
    command += ["--shapes", "1x4", "8x128", "--rounds", "2", "--eval", str(pairs)]
    assert main(command) == 0
    results = only_result(out)["results"]
    assert results["missing"] == {}
    assert set(results["systems"]) == {
        TORCH,
        "onnx",
        COMMON_RECIPE,
        SEALED,
        "cpu-int8",
        DYNAMIC,
        STATIC.name,
    }
    together, shared = results["runs"]
    assert together["split"] == {"threads": 2, "passes": 1}
    assert {one["system"] for one in together["latencies"]} == set(results["systems"])
    assert {one["system"] for one in shared["latencies"]} == set(results["systems"]) - {TORCH}
    assert {one["shape"] for one in shared["latencies"]} == {"8x64"}
    assert all(len(one["ms"]["values"]) == 2 for one in together["latencies"])
    near = {one["system"]: one for one in together["parity"]}
    assert near[TORCH]["cosine_worst"] == pytest.approx(1.0)
    assert near[SEALED]["violations"] == []
    assert set(results["scores"]) == {TORCH, COMMON_RECIPE, SEALED, DYNAMIC, STATIC.name}
    reached = [goal["reached"] is not None for goal in results["goals"]]
    assert reached == [True, True, True, True, False, True, True, False]
    assert "\ngoals\ntorch / sealed at 8x" in capsys.readouterr().out


def test_tuning_measures_the_selected_variants(
    built: BuildResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tuning", built.manifest.id, *places(built, tmp_path), "--seconds", "1"]
    assert main(command) == 0
    results = only_result(tmp_path)["results"]
    assert "cpu-int8" in results["measured"]
    assert results["skipped"] == {}
    table = CostTable.model_validate_json(Path(results["cost_table"]).read_bytes())
    assert [(one["shape"], one["selected"]) for one in results["checks"]] == [
        (str(shape), variant.name) for shape, variant in table.selection
    ]
    assert results["unmeasured"] == []
    assert {one["fastest"] for one in results["checks"]} <= set(results["measured"])
    assert all(one["ratio"] >= 1.0 for one in results["checks"])
    assert "selected / fastest at the worst shape" in capsys.readouterr().out


def test_tuning_without_cost_table_is_an_error(
    built: BuildResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tuning", built.manifest.id, *places(built, tmp_path), "--threads", "63"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "has no cost table for 63 threads on this host" in error
    assert "hint: run `hundredfold models tune" in error
    assert not list(tmp_path.iterdir())


def test_graphs_without_checkpoint_is_an_error(
    built: BuildResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = built.directory / "manifest.json"
    content = manifest.read_bytes()
    document = orjson.loads(content)
    try:
        manifest.write_bytes(
            orjson.dumps({**document, "source": {**document["source"], "ref": "/gone"}})
        )
        assert main(["graphs", built.manifest.id, *places(built, tmp_path)]) == 1
    finally:
        manifest.write_bytes(content)
    assert "/gone` is not a directory" in capsys.readouterr().err


def test_engine_compares_with_torch(
    built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.common.engine_timing.TIMING_S", 0.005)
    (tmp_path / STSB_NAME).write_text(PAIRS, encoding="utf-8")
    out = tmp_path / "out"
    command = ["engine", "--model", built.manifest.id, *places(built, out), "--torch"]
    assert main([*command, "--data", str(tmp_path), "--rounds", "1", "--batch", "2"]) == 0
    results = only_result(out)["results"]
    assert results["torch_over_engine"] > 0
    agreement = results["checks"][-1]
    assert (agreement["what"], agreement["compared"]) == ("the engine and torch eager fp32", 6)
