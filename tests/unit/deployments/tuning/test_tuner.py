from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.artifacts.manifest import REFERENCE_NAME, EngineOptions
from deployments.config import EncoderSettings
from deployments.errors import EngineFailed
from deployments.tuning.costs import CostTable, TuningTarget
from deployments.tuning.parity import ReferenceOutputs
from deployments.tuning.selection import select_variants
from deployments.tuning.tuner import (
    MeasurementPlan,
    VariantSpec,
    drop_marginal_variants,
    measure_variants,
    merge_costs,
    tune,
)
from tests.support.cost_tables import row, shape
from tests.support.tuning_artifacts import seal_tunable

SHAPES = (shape("1x8"), shape("4x16"))


def contest(target: TuningTarget, available_bytes: int | None = None) -> MeasurementPlan:
    return MeasurementPlan(
        settings=target.settings,
        shapes=SHAPES,
        items=reference(target).items,
        seconds=0.1,
        available_bytes=available_bytes,
    )


def reference(target: TuningTarget) -> ReferenceOutputs:
    return ReferenceOutputs.read(target.artifact / REFERENCE_NAME)


def tuned(target: TuningTarget) -> CostTable:
    return tune(target, reference(target), contest(target))


def specs(target: TuningTarget) -> list[VariantSpec]:
    return [VariantSpec.of(c.name, target.spec(c)) for c in target.candidates]


def measured(table: CostTable) -> set[str]:
    return {row.variant.candidate for row in table.rows}


def test_every_candidate_that_is_right_is_measured_at_every_shape(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    table = tune(target, reference(target), replace(contest(target), seconds=2.0))
    assert measured(table) == {"plain", "twin"}
    assert all(set(row.by_shape()) == set(SHAPES) for row in table.rows)
    assert {row.precision for row in table.rows} == {"fp32"}
    assert table.selection == select_variants(table.rows)
    assert table.rejected == {}


def test_the_table_says_where_and_with_what_it_was_measured(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, settings=EncoderSettings(intra_op_threads=2))
    table = tuned(target)
    assert (table.version, table.host) == (target.manifest.version, target.host)
    assert (table.threads, table.providers) == (2, ("CPUExecutionProvider",))
    assert list(table.engines) == ["onnxruntime"]


@pytest.mark.parametrize(("threads", "options"), [(1, {"+arena"}), (2, {"+arena", "+spinning"})])
def test_the_winner_is_also_tried_with_other_session_options(
    tmp_path: Path, threads: int, options: set[str]
) -> None:
    target = seal_tunable(
        tmp_path, names=["plain"], settings=EncoderSettings(intra_op_threads=threads)
    )
    names = {row.variant.name for row in tuned(target).rows}
    assert names == {"plain", *(f"plain{option}" for option in options)}


def test_options_that_were_sealed_are_where_the_trials_start(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain"])
    (plain,) = target.candidates
    with_arena = plain.model_copy(update={"options": EngineOptions(arena=True)})
    contender = VariantSpec.of("plain", target.spec(with_arena))
    rows = measure_variants([contender], contest(target))
    assert [row.variant.name for row in rows] == ["plain+arena", "plain"]


def test_a_candidate_that_is_wrong_here_is_refused_and_never_wins(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "astray"], wrong=["astray"])
    table = tuned(target)
    assert "cosine" in table.rejected["astray"]
    assert measured(table) == {"plain"}


def test_a_candidate_that_cannot_run_here_is_left_out(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["far", "plain"], absent=["far"])
    table = tuned(target)
    assert "AbacusExecutionProvider" in table.rejected["far"]
    assert {variant.candidate for variant in table.selected_variants()} == {"plain"}


def test_when_no_candidate_is_right_the_reasons_are_told(tmp_path: Path) -> None:
    target = seal_tunable(
        tmp_path, names=["plain", "far", "astray"], wrong=["astray"], absent=["far"]
    )
    without_plain = target.manifest.model_copy(
        update={"candidates": target.manifest.candidates[1:]}
    )
    corrupted = TuningTarget(target.artifact, without_plain, target.device, target.settings)
    with pytest.raises(EngineFailed, match=r"far: .*Abacus.*; astray: .*cosine"):
        tuned(corrupted)


def test_as_many_are_compared_as_there_is_memory_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = seal_tunable(tmp_path, names=["plain", "twin", "third"])
    graph = specs(target)[0].spec.path.stat().st_size
    two = contest(target, available_bytes=13 * graph)
    table = tune(target, reference(target), two)
    assert measured(table) == {"plain", "twin"}
    assert table.rejected == {"third": "it could not be measured together with the others"}
    assert "third is not measured: not enough memory" in caplog.text


def test_without_memory_for_one_graph_nothing_is_opened(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    with pytest.raises(
        EngineFailed, match="not enough memory to measure the first graph: 0 MB are free"
    ):
        tune(target, reference(target), contest(target, available_bytes=100))


def test_a_graph_that_cannot_be_opened_does_not_keep_the_others_away(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    plain, twin = specs(target)
    twin.spec.path.with_name("broken.onnx").write_bytes(b"no graph")
    broken = VariantSpec.of(
        "twin",
        target.spec(target.candidates[1].model_copy(update={"graph": "graphs/broken.onnx"})),
    )
    rows = measure_variants([plain, broken], contest(target))
    assert {row.variant.candidate for row in rows} == {"plain"}
    with pytest.raises(EngineFailed, match="every graph failed"):
        measure_variants([broken], contest(target))


def test_new_figures_replace_old_ones_where_there_was_time_for_them() -> None:
    first = [row("a", {"1x16": 1.0, "32x512": 900}), row("b", {"1x16": 2.0, "32x512": 950})]
    second = [row("a", {"1x16": 1.1}), row("a+arena", {"1x16": 1.0})]
    times = {
        r.variant.name: {str(s): ms for s, ms in r.by_shape().items()}
        for r in merge_costs(first, second)
    }
    assert times == {
        "a": {"1x16": 1.1, "32x512": 900},
        "a+arena": {"1x16": 1.0},
        "b": {"1x16": 2.0, "32x512": 950},
    }


def test_options_must_gain_on_the_whole_and_not_at_some_shapes_only() -> None:
    plain = row("a", {"1x16": 1.0, "1x64": 5.0, "1x256": 20.0})
    once = row("a+arena", {"1x16": 0.9, "1x64": 5.0, "1x256": 20.0})
    little_seen = row("a+arena", {"1x16": 0.5, "1x64": 2.5})
    always = row("a+arena", {"1x16": 0.9, "1x64": 4.5, "1x256": 18.0})
    assert drop_marginal_variants([plain, once]) == [plain]
    assert drop_marginal_variants([plain, little_seen]) == [plain]
    assert drop_marginal_variants([plain, always]) == [plain, always]
