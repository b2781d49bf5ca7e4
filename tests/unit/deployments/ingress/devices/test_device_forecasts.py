from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from deployments.artifacts.store import model_directory
from deployments.artifacts.types import Device
from deployments.config import AppArgs, EncoderSettings, GeneratorSettings, ModelSettings
from deployments.ingress.devices.cluster_state import ClusterMonitor, ClusterSnapshot
from deployments.ingress.devices.device_forecasts import (
    USUAL_GENERATED_TOKENS,
    DeviceForecasts,
    RequestWork,
)
from deployments.ingress.devices.start_times import ESTIMATED_START_S
from deployments.messages import (
    CallTimings,
    Finished,
    FinishReason,
    GenerationTimings,
    ModelRef,
    PoolRequest,
    PoolState,
)
from deployments.registry import ModelRegistry, RegisteredModel
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.tuning_artifacts import seal_tunable, write_table

CPU, GPU = Device.CPU, Device.GPU
ENCODERS = {CPU: EncoderSettings(concurrent_passes=2), GPU: EncoderSettings()}
GENERATORS = {CPU: GeneratorSettings(kv_slots=4), GPU: GeneratorSettings(kv_slots=4)}
RUNNING = {"CpuEncoder": 1, "GpuEncoder": 1, "CpuGenerator": 1, "GpuGenerator": 1}


class LoadedModels:
    """A ModelPoolClient that only reports which models are loaded."""

    def __init__(self, *names: str) -> None:
        self._names = names

    async def send(self, request: PoolRequest) -> Mapping[str, PoolState]:
        raise AssertionError("unexpected call")

    def has_model(self, model: ModelRef) -> bool:
        return model.id in self._names


def build(
    store: Path,
    running: Mapping[str, int] = RUNNING,
    pools: Mapping[str, LoadedModels] | None = None,
) -> tuple[DeviceForecasts, RegisteredModel]:
    """Return forecasts for the store, and the only model of the store."""
    args = AppArgs(store=store, encoders=ENCODERS, generators=GENERATORS)
    monitor = ClusterMonitor(ENCODERS, ClusterSnapshot, GENERATORS)
    monitor.apply(ClusterSnapshot(running, gpus=1))
    model_id = EMBEDDER if model_directory(store, EMBEDDER).is_dir() else DECODER
    model = ModelRegistry(store, [ModelSettings(id=model_id)]).find(model_id)
    return DeviceForecasts(args, monitor, pools or {}), model


def test_first_forecasts_come_from_the_cost_table(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, settings=ENCODERS[CPU])
    write_table(target, {"1x32": "plain", "32x32": "plain"})  # 1 ms for each shape
    forecasts, model = build(tmp_path)
    forecast = forecasts.forecast(RequestWork(model, tokens=1_024), CPU)
    assert forecast.work_s == pytest.approx(0.001 / 2)  # two concurrent passes
    assert forecast.run_s == pytest.approx(0.001 + forecast.work_s)
    assert (forecast.queue_s, forecast.load_s, forecast.price) == (0, 0, 1.0)


def test_gpu_is_queried_before_the_first_request_only(
    tmp_path: Path, fake_nvidia_smi: Callable[[str], None]
) -> None:
    queries, store = tmp_path / "queries", tmp_path / "store"
    fake_nvidia_smi(f"echo query >> {queries}; echo 'NVIDIA H200, 570.86.15'")
    seal_tiny(store, EMBEDDER)
    forecasts, model = build(store)
    assert queries.read_text() == "query\n"
    forecasts.start(RequestWork(model, tokens=1), GPU)
    assert queries.read_text() == "query\n", "the request does not wait for nvidia-smi"


def test_answers_replace_the_first_forecast(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    forecasts, model = build(tmp_path)
    work = RequestWork(model, tokens=100)
    forecasts.start(work, GPU)()
    before = forecasts.forecast(work, GPU)
    for _ in range(200):
        timings = CallTimings(forward_s=2.0, batch_items=4)
        forecasts.record_result(work, GPU, items=1, timings=timings)
    after = forecasts.forecast(work, GPU)
    assert before.run_s < 0.1
    assert after.work_s == pytest.approx(0.5, rel=0.01)  # four items share a pass of 2 s
    assert after.run_s == pytest.approx(2.5, rel=0.01)


def test_sent_work_is_the_queue_of_its_deployment_until_it_ends(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    forecasts, model = build(tmp_path, {**RUNNING, "CpuEncoder": 2, "Ingress": 3})
    work = RequestWork(model, tokens=1_000)
    ends = [forecasts.start(work, CPU) for _ in range(4)]
    forecast = forecasts.forecast(work, CPU)
    assert forecast.queue_s == pytest.approx(4 * forecast.work_s * 3 / 2)
    assert forecasts.forecast(work, GPU).queue_s == 0
    for end in ends:
        end()
    assert forecasts.forecast(work, CPU).queue_s == pytest.approx(0)


def test_cold_model_costs_its_load_and_a_sleeping_deployment_its_start(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    pools = {"CpuEncoder": LoadedModels(EMBEDDER), "GpuEncoder": LoadedModels()}
    forecasts, model = build(tmp_path, RUNNING, pools)
    work = RequestWork(model, tokens=1)
    assert forecasts.forecast(work, CPU).load_s == 0
    cold = forecasts.forecast(work, GPU).load_s
    assert 0 < cold < 0.1
    forecasts, model = build(tmp_path, {**RUNNING, "GpuEncoder": 0}, pools)
    assert forecasts.forecast(work, GPU).load_s == pytest.approx(ESTIMATED_START_S + cold)


def test_generator_divides_its_time_among_its_slots_and_learns_lengths(tmp_path: Path) -> None:
    seal_tiny_decoder(tmp_path)
    forecasts, model = build(tmp_path)
    assert forecasts.expect_tokens(model, None) == USUAL_GENERATED_TOKENS
    assert forecasts.expect_tokens(model, 5) == 5
    forecasts.start(RequestWork(model, tokens=1), CPU)()
    answer = Finished(FinishReason.END, 10, GenerationTimings(prefill_s=1.0, decode_s=4.0))
    for _ in range(200):
        forecasts.record_answers(model, CPU, [answer])
    forecast = forecasts.forecast(RequestWork(model, tokens=20), CPU)
    assert forecast.run_s == pytest.approx(10, rel=0.01)
    assert forecast.work_s == pytest.approx(10 / 4, rel=0.01)
    assert forecasts.expect_tokens(model, None) == pytest.approx(10, rel=0.01)


def test_nothing_is_kept_while_only_one_device_is_available(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    args = AppArgs(store=tmp_path, encoders={CPU: ENCODERS[CPU]})
    monitor = ClusterMonitor(args.encoders, ClusterSnapshot)
    monitor.apply(ClusterSnapshot(RUNNING))
    model = ModelRegistry(tmp_path, []).find(EMBEDDER)
    forecasts = DeviceForecasts(args, monitor, {})
    end = forecasts.start(RequestWork(model, tokens=1_000), CPU)
    forecasts.record_result(RequestWork(model, 1_000), CPU, 1, CallTimings(forward_s=9.0))
    assert forecasts.forecast(RequestWork(model, 1_000), CPU).queue_s == 0
    assert forecasts.forecast(RequestWork(model, 1_000), CPU).run_s < 1
    end()
