from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.batching.scheduler import LonePass
from deployments.engines import EncoderEngine
from deployments.messages import ModelRef
from deployments.tuning.costs import TuningTarget
from deployments.tuning.lone_passes import BRIEF_MS, LonePassPlanner, measure_graphs
from tests.support.cost_tables import row
from tests.support.fakes import wait_until
from tests.support.tuning_artifacts import seal_tunable, write_table

MODEL = ModelRef("tiny/embedder", "0123456789ab")
THREADS = 2
ONE_THREAD_MS = {"1x16": 1.0, "1x128": 4.0}
ALL_CORES_MS = {"1x16": 1.0, "1x128": 2.0}  # long texts gain


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


async def open_for(lone: LonePassPlanner, items: int, tokens: int) -> EncoderEngine | None:
    await wait_until(lambda: lone.plan(MODEL, items, tokens).engine is not None)
    return lone.plan(MODEL, items, tokens).engine


async def test_shape_that_gains_gets_an_engine_after_its_first_use(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone = planner(target)
    assert lone.plan(MODEL, 1, 120).engine is None, "it is being opened"
    engine = await open_for(lone, 1, 120)
    assert engine is not None
    assert engine.info.compute_type == "cpu-fp32"
    assert lone.plan(MODEL, 1, 12).engine is None, "short texts gain nothing"
    assert lone.plan(ModelRef("tiny/other", MODEL.version), 1, 120) == LonePass()
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


@pytest.mark.parametrize("case", ["no table", "other precision", "no gain", "no memory"])
async def test_nothing_is_opened_without_a_reason(case: str, tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain"])
    write_times(target, ONE_THREAD_MS)
    if case == "other precision":
        write_times(with_all_cores(target), ALL_CORES_MS, "int8")
    elif case != "no table":
        all_cores_ms = ONE_THREAD_MS if case == "no gain" else ALL_CORES_MS
        write_times(with_all_cores(target), all_cores_ms)
    lone = planner(target, max_bytes=0 if case == "no memory" else 1 << 20)
    assert lone.plan(MODEL, 1, 128).engine is None
    lone.close()  # waits for an engine that is being opened
    assert lone.plan(MODEL, 1, 128).engine is None


def brief_shapes(target: TuningTarget) -> list[bool]:
    lone = planner(target)
    return [lone.plan(MODEL, 1, tokens).is_brief for tokens in (14, 70, 120)]


async def test_pass_is_brief_by_its_fastest_time(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain"])
    write_times(target, {"1x16": BRIEF_MS, "1x64": BRIEF_MS + 1, "1x128": 2 * BRIEF_MS})
    lone = planner(target)
    assert [lone.plan(MODEL, 1, tokens).is_brief for tokens in (14, 70, 120)] == [
        True,
        False,
        False,
    ]
    write_times(with_all_cores(target), {"1x16": 1.0, "1x64": BRIEF_MS - 1, "1x128": BRIEF_MS + 1})
    assert brief_shapes(target) == [True, True, False]


async def test_pass_of_a_model_without_measurements_is_not_brief(tmp_path: Path) -> None:
    assert planner(seal_tunable(tmp_path)).plan(MODEL, 1, 3) == LonePass()
