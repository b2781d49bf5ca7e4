from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from deployments.artifacts.manifest import REFERENCE_NAME, EngineOptions
from deployments.config import EncoderSettings
from deployments.errors import EngineFailed
from deployments.tuning import tuner
from deployments.tuning.costs import CostTable, TuningTarget
from deployments.tuning.parity import ReferenceOutputs, check_graph
from deployments.tuning.selection import select_variants
from deployments.tuning.tuner import (
    MeasurementPlan,
    VariantSpec,
    keep_fastest_options,
    measure_variants,
    merge_costs,
    tune,
)
from tests.support.cost_tables import row, shape
from tests.support.tuning_artifacts import seal_tunable

SHAPES = (shape("1x8"), shape("4x16"))


def create_plan(target: TuningTarget, available_bytes: int | None = None) -> MeasurementPlan:
    return MeasurementPlan(
        settings=target.settings,
        shapes=SHAPES,
        items=read_reference(target).items,
        seconds=0.1,
        available_bytes=available_bytes,
    )


def read_reference(target: TuningTarget) -> ReferenceOutputs:
    return ReferenceOutputs.read(target.artifact / REFERENCE_NAME)


def run_tune(target: TuningTarget) -> CostTable:
    return tune(target, read_reference(target), create_plan(target))


def variant_specs(target: TuningTarget) -> list[VariantSpec]:
    return [
        VariantSpec.of(candidate.name, target.spec(candidate)) for candidate in target.candidates
    ]


def measured_candidates(table: CostTable) -> set[str]:
    return {row.variant.candidate for row in table.rows}


def test_accurate_candidates_are_measured_at_every_shape(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    table = tune(target, read_reference(target), replace(create_plan(target), seconds=2.0))
    assert measured_candidates(table) == {"plain", "twin"}
    assert all(set(row.by_shape()) == set(SHAPES) for row in table.rows)
    assert {row.precision for row in table.rows} == {"fp32"}
    assert table.selection == select_variants(table.rows)
    assert table.rejected == table.unmeasured == {}


def test_table_has_host_threads_providers_and_engines(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, settings=EncoderSettings(intra_op_threads=2))
    table = run_tune(target)
    assert (table.version, table.host) == (target.manifest.version, target.host)
    assert (table.threads, table.providers) == (2, ("CPUExecutionProvider",))
    assert list(table.engines) == ["onnxruntime"]


@pytest.mark.parametrize(("threads", "options"), [(1, set()), (2, {"+spinning"})])
def test_winner_is_also_measured_with_session_options(
    tmp_path: Path, threads: int, options: set[str]
) -> None:
    target = seal_tunable(
        tmp_path, names=["plain"], settings=EncoderSettings(intra_op_threads=threads)
    )
    names = {row.variant.name for row in run_tune(target).rows}
    assert names == {"plain", *(f"plain{option}" for option in options)}


def test_trials_start_from_the_sealed_options(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain"], settings=EncoderSettings(intra_op_threads=2))
    (plain,) = target.candidates
    spinning = plain.model_copy(update={"options": EngineOptions(spinning=True)})
    spec = VariantSpec.of("plain", target.spec(spinning))
    rows = measure_variants([spec], create_plan(target))
    assert [row.variant.name for row in rows] == ["plain+spinning", "plain"]


def test_inaccurate_candidate_is_rejected(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "astray"], wrong=["astray"])
    table = run_tune(target)
    assert "cosine" in table.rejected["astray"]
    assert table.unmeasured == {}
    assert measured_candidates(table) == {"plain"}


def test_unsupported_candidate_is_not_measured(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["far", "plain"], absent=["far"])
    table = run_tune(target)
    assert "AbacusExecutionProvider" in table.unmeasured["far"]
    assert table.rejected == {}
    assert {variant.candidate for variant in table.selected_variants()} == {"plain"}


def test_no_accurate_candidate_raises_with_the_reasons(tmp_path: Path) -> None:
    target = seal_tunable(
        tmp_path, names=["plain", "far", "astray"], wrong=["astray"], absent=["far"]
    )
    without_plain = target.manifest.model_copy(
        update={"candidates": target.manifest.candidates[1:]}
    )
    corrupted = TuningTarget(target.artifact, without_plain, target.device, target.settings)
    with pytest.raises(EngineFailed, match=r"far: .*Abacus.*; astray: .*cosine"):
        run_tune(corrupted)


def test_memory_limits_the_measured_candidates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = seal_tunable(tmp_path, names=["plain", "twin", "third"])
    graph = variant_specs(target)[0].spec.path.stat().st_size
    plan = create_plan(target, available_bytes=13 * graph)
    table = tune(target, read_reference(target), plan)
    assert measured_candidates(table) == {"plain", "twin"}
    assert table.unmeasured == {"third": "it could not be measured together with the others"}
    assert table.rejected == {}
    assert "third is not measured: not enough memory" in caplog.text


def test_candidate_too_large_for_the_memory_is_not_even_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = seal_tunable(tmp_path, names=["plain", "slow"])
    plain, slow = variant_specs(target)
    graph = plain.spec.path.stat().st_size
    with slow.spec.path.open("ab") as file:  # as if its weights needed more memory
        file.truncate(10 * graph)
    checks = Mock(side_effect=check_graph)
    monkeypatch.setattr(tuner, "check_graph", checks)
    table = tune(target, read_reference(target), create_plan(target, available_bytes=7 * graph))
    assert table.unmeasured == {"slow": "not enough memory"}
    assert measured_candidates(table) == {"plain"}
    assert [call.args[0] for call in checks.call_args_list] == [plain.spec]


def test_too_little_memory_for_one_graph_raises(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    with pytest.raises(
        EngineFailed, match="not enough memory to measure the first graph: 0 MB are free"
    ):
        tune(target, read_reference(target), create_plan(target, available_bytes=100))


def test_damaged_graph_is_left_out(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    plain, twin = variant_specs(target)
    twin.spec.path.with_name("broken.onnx").write_bytes(b"no graph")
    broken = VariantSpec.of(
        "twin",
        target.spec(target.candidates[1].model_copy(update={"graph": "graphs/broken.onnx"})),
    )
    rows = measure_variants([plain, broken], create_plan(target))
    assert {row.variant.candidate for row in rows} == {"plain"}
    with pytest.raises(EngineFailed, match="every graph failed"):
        measure_variants([broken], create_plan(target))


def test_merge_costs_replaces_remeasured_shapes() -> None:
    first = [row("a", {"1x16": 1.0, "32x512": 900}), row("b", {"1x16": 2.0, "32x512": 950})]
    second = [row("a", {"1x16": 1.1}), row("a+spinning", {"1x16": 1.0})]
    times = {
        r.variant.name: {str(s): ms for s, ms in r.by_shape().items()}
        for r in merge_costs(first, second)
    }
    assert times == {
        "a": {"1x16": 1.1, "32x512": 900},
        "a+spinning": {"1x16": 1.0},
        "b": {"1x16": 2.0, "32x512": 950},
    }


def test_options_that_are_faster_over_most_shapes_are_kept() -> None:
    plain = row("a", {"1x16": 1.0, "1x64": 5.0, "1x256": 20.0, "8x256": 99.0})
    at_one_shape = row("a+spinning", {"1x16": 0.9, "1x64": 5.5, "1x256": 22.0})
    at_few_shapes = row("a+spinning", {"1x16": 0.5, "1x64": 2.5})
    other = row("b", {"1x16": 0.1})
    assert keep_fastest_options([plain, at_one_shape, other]) == [plain, other]
    assert keep_fastest_options([plain, at_few_shapes]) == [plain]
    (kept,) = keep_fastest_options(
        [plain, row("a+spinning", {"1x16": 0.9, "1x64": 4.9, "1x256": 20.0})]
    )
    assert kept.variant.name == "a+spinning"
    assert {str(shape): ms for shape, ms in kept.by_shape().items()} == {
        "1x16": 0.9,
        "1x64": 4.9,
        "1x256": 20.0,
        "8x256": 99.0,
    }
