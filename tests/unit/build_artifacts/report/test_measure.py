from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from build_artifacts.report.measure import MeasurementInputs, StageMeasurement, group_by_memory
from build_artifacts.report.stages import Stage
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine
from deployments.errors import EngineFailed
from deployments.tuning.parity import ReferenceOutputs, run_probes
from tests.support.fakes import FakeEngine, item
from tests.support.prepared_build import RecordingRunner


def stage(name: str, size_bytes: int) -> Stage:
    def fail_to_open(_settings: EncoderSettings) -> EncoderEngine:
        raise AssertionError("nothing is opened to be grouped")

    encoder = EncoderSettings()
    return Stage(
        name=name,
        what="",
        size_bytes=size_bytes,
        open=fail_to_open,
        single_pass=encoder,
        throughput=encoder,
        scores={},
    )


@pytest.mark.parametrize(
    ("available_bytes", "groups"),
    [
        (10_000, ["abc"]),
        (1_300, ["ab", "c"]),  # 3 x (100 + 200) bytes are less than 0.7 x 1300
        (10, ["a", "b", "c"]),
    ],
)
def test_stages_are_grouped_by_available_memory(available_bytes: int, groups: list[str]) -> None:
    stages = [stage("a", 100), stage("b", 200), stage("c", 300)]
    actual_groups = group_by_memory(stages, available_bytes)
    assert ["".join(s.name for s in group) for group in actual_groups] == groups


def test_stage_that_fails_in_full_batches_is_measured_without_throughput(tmp_path: Path) -> None:
    items = (item(1, 32), item(2, 32))
    full = EncoderSettings(concurrent_passes=2)

    def open_engine(settings: EncoderSettings) -> EncoderEngine:
        if settings == full:
            raise EngineFailed("out of memory")
        return FakeEngine()

    inputs = MeasurementInputs(
        reference=ReferenceOutputs(items, tuple(run_probes(FakeEngine(), items, 1))),
        head=ModelHead.VECTOR,
        gate=Gate(),
        evaluation=None,
        single_items={32: collate(items[:1])},
        full_batch=collate(items),
        runs=1,
        seconds=0.0,
    )
    measurement = StageMeasurement(inputs, RecordingRunner(tmp_path / "work").steps)
    sound = replace(stage("sound", 100), open=open_engine)
    weak = replace(sound, name="weak", throughput=full)
    results = {result.name: result for result in measurement.measure([sound, weak])}
    assert results["sound"].throughput is not None
    assert len(results["weak"].latencies) == 1
    assert results["weak"].throughput is None
    assert measurement.failed == {"the throughput of weak": "out of memory"}
