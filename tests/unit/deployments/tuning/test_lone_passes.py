from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from deployments.artifacts.types import Device
from deployments.batching.replica_hooks import LonePass
from deployments.engines import EncoderEngine
from deployments.errors import EngineFailed
from deployments.messages import ModelRef
from deployments.tuning import lone_passes
from deployments.tuning.costs import TuningTarget
from deployments.tuning.lone_passes import BRIEF_MS, LonePassPlanner, measure_graphs
from deployments.tuning.lone_times import TRIAL_INTERVAL
from deployments.tuning.opening import open_selected
from tests.support.cost_tables import row
from tests.support.fakes import TIMEOUT_S, wait_until
from tests.support.tuning_artifacts import seal_tunable, write_table

MODEL = ModelRef("tiny/embedder", "0123456789ab")
OTHER = ModelRef("tiny/other", "0123456789ab")
THREADS = 2
OPENING_S = 0.1  # longer than the opening of a tiny graph
ONE_THREAD_MS = {"1x16": 1.0, "1x128": 4.0}
ALL_CORES_MS = {"1x16": 1.2, "1x128": 2.0}  # only long texts gain from all cores


def with_all_cores(target: TuningTarget) -> TuningTarget:
    settings = target.settings.model_copy(update={"intra_op_threads": THREADS})
    return replace(target, settings=settings)


def write_times(
    target: TuningTarget, medians_ms: dict[str, float], precision: str = "fp32"
) -> None:
    rows = (row("plain", medians_ms, precision),)
    write_table(target, dict.fromkeys(medians_ms, "plain"), rows=rows)


def planner(target: TuningTarget, max_bytes: int = 1 << 20) -> LonePassPlanner:
    lone = LonePassPlanner(threads=THREADS, max_bytes=max_bytes)
    lone.add(MODEL, target)
    return lone


async def open_for(
    lone: LonePassPlanner, items: int, tokens: int, model: ModelRef = MODEL
) -> EncoderEngine | None:
    await wait_until(lambda: lone.plan(model, items, tokens).engine is not None)
    return lone.plan(model, items, tokens).engine


async def test_shape_that_gains_gets_an_engine_after_its_first_use(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone = planner(target)
    assert lone.plan(MODEL, 1, 120).engine is None, "it is being opened"
    engine = await open_for(lone, 1, 120)
    assert engine is not None
    assert engine.info.compute_type == "cpu-fp32"
    assert lone.plan(MODEL, 1, 12).engine is None, "short texts take longer"
    assert lone.plan(OTHER, 1, 120) == LonePass()
    lone.close()


async def test_tie_goes_to_all_cores_but_not_at_shapes_that_they_were_not_measured_at(
    tmp_path: Path,
) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, {"1x16": 1.0, "1x128": 4.0, "1x512": 16.0})
    write_times(with_all_cores(target), {"1x16": 1.09, "1x128": 4.0})
    lone = planner(target)
    assert await open_for(lone, 1, 16) is await open_for(lone, 1, 128) is not None
    assert lone.plan(MODEL, 1, 512).engine is None
    lone.close()


async def test_calls_that_overlap_leave_each_other_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone = planner(target)
    engine = await open_for(lone, 1, 120)
    monkeypatch.setattr(lone_passes, "OVERLAP_S", TIMEOUT_S)
    with lone.overlaps:
        assert lone.plan(MODEL, 1, 120).engine is engine, "one call is alone"
        with lone.overlaps:
            pass
    planned = [lone.plan(MODEL, 1, 120) for _ in range(2 * TRIAL_INTERVAL)]
    assert not any(each.engine for each in planned), "two calls overlapped just now"
    assert all(each.is_brief for each in planned)
    monkeypatch.setattr(lone_passes, "OVERLAP_S", 0.0)
    assert lone.plan(MODEL, 1, 120).engine is engine, "that was long ago"
    lone.close()


async def test_removed_model_returns_its_memory(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone = planner(target, max_bytes=measure_graphs(target))
    engine = await open_for(lone, 1, 120)
    lone.remove(MODEL)
    assert engine is not None
    assert lone.plan(MODEL, 1, 120) == LonePass()
    lone.add(MODEL, target)
    assert await open_for(lone, 1, 120) is not engine
    lone.close()


@pytest.mark.parametrize("error", [EngineFailed("no memory"), OSError("the disk is gone")])
async def test_session_that_cannot_be_opened_returns_its_memory(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone = planner(target, max_bytes=measure_graphs(target))

    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(lone_passes, "open_selected", fail)
    with caplog.at_level(logging.WARNING, "ray.serve.hundredfold"):
        assert lone.plan(MODEL, 1, 120).engine is None
        lone.close()
    assert str(error) in caplog.text
    assert lone._free_bytes == measure_graphs(target)


async def test_refused_model_gets_its_engine_once_another_is_gone(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone = planner(target, max_bytes=measure_graphs(target))
    lone.add(OTHER, target)
    first = await open_for(lone, 1, 120)
    assert lone.plan(OTHER, 1, 120).engine is None, "there is room for one"
    await asyncio.sleep(OPENING_S)
    lone.remove(MODEL)
    second = await open_for(lone, 1, 120, OTHER)
    assert first is not second
    lone.close()


async def test_tables_are_read_again_and_an_open_session_stays(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    lone = planner(target)
    assert lone.plan(MODEL, 1, 120) == LonePass()
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone.add(MODEL, target)
    engine = await open_for(lone, 1, 120)
    lone.add(MODEL, target)
    lone.plan(MODEL, 1, 120)
    await asyncio.sleep(OPENING_S)
    assert lone.plan(MODEL, 1, 120).engine is engine
    lone.close()


async def test_model_that_comes_back_while_its_session_is_opened_has_one(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    size = measure_graphs(target)
    lone = planner(target, max_bytes=2 * size)
    for _ in range(2):
        lone.plan(MODEL, 1, 120)
        lone.remove(MODEL)
        lone.add(MODEL, target)
    await open_for(lone, 1, 120)
    lone.add(OTHER, target)
    assert await open_for(lone, 1, 120, OTHER) is not None, "the memory of others was returned"
    lone.close()


def test_measure_graphs_counts_the_first_candidate_that_can_run(tmp_path: Path) -> None:
    plain = seal_tunable(tmp_path / "a", names=["plain"])
    names = ["far", "plain"]
    target = seal_tunable(tmp_path / "b", names=names, wrong=["far"], absent=["far"])
    assert measure_graphs(target) == measure_graphs(plain)


async def test_lowest_times_are_the_first_estimate_of_all_cores(tmp_path: Path) -> None:
    """A pass that waits for cores has a higher median, but hardly a higher lowest time."""
    target = seal_tunable(tmp_path, names=["plain"])
    write_times(target, {"1x128": 8.0})
    (costs,) = row("plain", {"1x128": 4.0}, "fp32").costs
    disturbed = row("plain", {}, "fp32").model_copy(
        update={"costs": (costs.model_copy(update={"median_ms": 9.0}),)}
    )
    write_table(with_all_cores(target), {"1x128": "plain"}, rows=(disturbed,))
    lone = planner(target)
    assert not lone.plan(MODEL, 1, 128).is_brief, "it runs on one thread until all cores are ready"
    assert await open_for(lone, 1, 128) is not None
    assert lone.plan(MODEL, 1, 128).is_brief
    lone.close()


def run_passes(lone: LonePassPlanner, one_thread_ms: float, all_cores_ms: float, count: int) -> int:
    """Run lone passes of 120 tokens. Return how many used all cores."""
    planned = 0
    for _ in range(count):
        lone_pass = lone.plan(MODEL, 1, 120)
        uses_all_cores = lone_pass.engine is not None
        lone_pass.record((all_cores_ms if uses_all_cores else one_thread_ms) / 1e3)
        planned += uses_all_cores
    return planned


async def open_both(
    target: TuningTarget, one_thread_ms: float, all_cores_ms: float
) -> LonePassPlanner:
    """Open both sessions of a model whose tables state these milliseconds for 128 tokens."""
    write_times(target, {"1x128": one_thread_ms})
    write_times(with_all_cores(target), {"1x128": all_cores_ms})
    lone = planner(target)
    await open_for(lone, 1, 120)
    return lone


@pytest.mark.parametrize(
    ("tables_ms", "passes_ms"), [((4.0, 4.9), (4.0, 2.0)), ((4.0, 2.0), (4.0, 6.0))]
)
async def test_passes_correct_the_tables_until_these_are_read_again(
    tables_ms: tuple[float, float], passes_ms: tuple[float, float], tmp_path: Path
) -> None:
    target = seal_tunable(tmp_path)
    lone = await open_both(target, *tables_ms)
    run_passes(lone, *passes_ms, 2 * TRIAL_INTERVAL)
    on_all_cores = run_passes(lone, *passes_ms, TRIAL_INTERVAL)
    gains = passes_ms[1] < passes_ms[0]
    assert on_all_cores >= TRIAL_INTERVAL - 1 if gains else on_all_cores <= 1
    lone.add(MODEL, target)
    assert (lone.plan(MODEL, 1, 120).engine is None) is gains
    lone.close()


async def test_passes_that_calls_overlapped_teach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = await open_both(seal_tunable(tmp_path), 4.0, 2.0)
    planned = [lone.plan(MODEL, 1, 120) for _ in range(10)]
    monkeypatch.setattr(lone_passes, "OVERLAP_S", TIMEOUT_S)
    with lone.overlaps, lone.overlaps:
        for each in planned:
            each.record(1.0)
    monkeypatch.setattr(lone_passes, "OVERLAP_S", 0.0)
    assert lone.plan(MODEL, 1, 120).engine is not None
    for each in planned:
        each.record(1.0)
    assert lone.plan(MODEL, 1, 120).engine is None, "these passes took a second"
    lone.close()


@pytest.mark.parametrize("case", ["possible", "measured", "all cores are usual", "no room", "GPU"])
def test_second_session_is_measured_where_it_may_be_opened(case: str, tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    if case == "measured":
        write_times(with_all_cores(target), ALL_CORES_MS)
    elif case == "all cores are usual":
        target = with_all_cores(target)
    elif case == "GPU":
        target = replace(target, device=Device.GPU)
    lone = LonePassPlanner(threads=THREADS, max_bytes=0 if case == "no room" else 1 << 20)
    expected = (with_all_cores(target),) if case == "possible" else ()
    assert lone.find_unmeasured(target) == expected
    lone.close()


async def test_second_session_rounds_as_the_usual_one(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["int8", "int8-twin"])
    write_table(target, {"1x128": "int8-twin"}, rows=(row("int8-twin", {"1x128": 4.0}),))
    rows = (row("int8", {"1x128": 1.0}), row("int8-twin", {"1x128": 2.0}))
    write_table(with_all_cores(target), {"1x128": "int8"}, rows=rows)
    opened: list[str] = []
    lone = planner(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            lone_passes,
            "open_selected",
            lambda target, table: (
                opened.append(table.selection[0][1].name) or open_selected(target, table)
            ),
        )
        assert await open_for(lone, 1, 128) is not None
    assert opened == ["int8-twin"]
    lone.close()


@pytest.mark.parametrize("case", ["no table", "other precision", "no memory"])
async def test_nothing_is_opened_without_a_reason(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[TuningTarget] = []
    monkeypatch.setattr(lone_passes, "open_selected", lambda target, _table: opened.append(target))
    target = seal_tunable(tmp_path, names=["plain"])
    write_times(target, ONE_THREAD_MS)
    if case == "other precision":
        write_times(with_all_cores(target), ALL_CORES_MS, "int8")
    elif case != "no table":
        write_times(with_all_cores(target), ALL_CORES_MS)
    lone = planner(target, max_bytes=0 if case == "no memory" else 1 << 20)
    for _ in range(2 * TRIAL_INTERVAL):
        lone_pass = lone.plan(MODEL, 1, 128)
        assert lone_pass.engine is None
        lone_pass.record(1.0)
    lone.close()  # `close` waits until a pending engine is open
    assert opened == []


async def test_pass_is_brief_by_the_time_of_its_session(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain"])
    write_times(target, {"1x16": BRIEF_MS, "1x64": BRIEF_MS + 1, "1x128": 2 * BRIEF_MS})
    lone = planner(target)
    assert [lone.plan(MODEL, 1, tokens).is_brief for tokens in (14, 70, 120)] == [
        True,
        False,
        False,
    ]
    write_times(with_all_cores(target), {"1x16": 1.0, "1x64": BRIEF_MS - 1, "1x128": BRIEF_MS + 1})
    lone.add(MODEL, target)
    assert not lone.plan(MODEL, 1, 70).is_brief, "all cores are being opened"
    await open_for(lone, 1, 70)
    assert [lone.plan(MODEL, 1, tokens).is_brief for tokens in (14, 70, 120)] == [
        True,
        True,
        False,
    ]
    slower = lone.plan(MODEL, 1, 70)
    slower.record(2 * BRIEF_MS / 1e3)
    assert not lone.plan(MODEL, 1, 70).is_brief
    lone.close()


async def test_pass_of_a_model_without_measurements_is_not_brief(tmp_path: Path) -> None:
    assert planner(seal_tunable(tmp_path)).plan(MODEL, 1, 3) == LonePass()
