from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.engines import EncoderEngine
from deployments.messages import ModelRef
from deployments.tuning.costs import TuningTarget
from deployments.tuning.lone_passes import LonePassEngines
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


def engines(target: TuningTarget, max_bytes: int = 1 << 20) -> LonePassEngines:
    return LonePassEngines({MODEL: target}, threads=THREADS, max_bytes=max_bytes)


async def open_for(lone: LonePassEngines, items: int, tokens: int) -> EncoderEngine | None:
    await wait_until(lambda: lone.find(MODEL, items, tokens) is not None)
    return lone.find(MODEL, items, tokens)


async def test_shape_that_gains_gets_an_engine_after_its_first_use(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path)
    write_times(target, ONE_THREAD_MS)
    write_times(with_all_cores(target), ALL_CORES_MS)
    lone = engines(target)
    assert lone.find(MODEL, 1, 120) is None, "it is being opened"
    engine = await open_for(lone, 1, 120)
    assert engine is not None
    assert engine.info.compute_type == "cpu-fp32"
    assert lone.find(MODEL, 1, 12) is None, "short texts gain nothing"
    assert lone.find(ModelRef("tiny/other", MODEL.version), 1, 120) is None
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
    lone = engines(target, max_bytes=0 if case == "no memory" else 1 << 20)
    assert lone.find(MODEL, 1, 128) is None
    lone.close()  # waits for an engine that is being opened
    assert lone.find(MODEL, 1, 128) is None
