"""Tuning of an encoder replica in the background, while it serves."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from deployments.artifacts.types import Device, TaskName
from deployments.batching.replica_hooks import LonePass
from deployments.config import AppArgs, BatchSettings, EncoderSettings, ModelSettings
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.errors import EngineFailed
from deployments.messages import BatchKey, CallResult, ModelRef, TokenizedBatch, TokenizedCall
from deployments.records import ForwardPassRecord
from deployments.replicas.encoder import EncoderReplica
from deployments.tuning.costs import TuningTarget, read_costs
from tests.support.artifacts import EMBEDDER
from tests.support.batch_schedulers import build_batch_scheduler
from tests.support.cost_tables import row
from tests.support.encoder_harness import RAW
from tests.support.fakes import FakeEngine, ListRecorder, far_deadline, item, wait_until
from tests.support.tuning_artifacts import STALE, seal_tunable, write_table

TOLERANCE = 1e-5
# Enough for a tuning process to start, measure for 0.2 s and end, even on a busy machine.
TIMEOUT_S = 900.0  # tuning has the lowest priority
UNTUNED, TUNED = "cpu-fp32", "cpu-int8"


def args(store: Path, **encoder: object) -> AppArgs:
    settings = EncoderSettings.parse({"concurrent_passes": 2, "tune_seconds": 0.2, **encoder})
    models = (ModelSettings(id=EMBEDDER),)
    return AppArgs(store=store, models=models, encoders={Device.CPU: settings})


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    """A model with a slow default candidate and a faster second candidate."""
    return seal_tunable(tmp_path, names=["slow", "int8"])


class TuningEncoderHarness:
    """A running encoder replica, and its client, which sends one text of three tokens."""

    def __init__(
        self, store: Path, version: str, *, is_pinned: bool = True, **encoder: object
    ) -> None:
        settings = args(store, **encoder)
        if not is_pinned:
            settings = settings.model_copy(update={"models": ()})
        self.replica = EncoderReplica(settings, Device.CPU, ListRecorder())
        self.replica.start()
        ref = ModelRef(EMBEDDER, version)
        self._key = BatchKey(ref, TaskName.FEATURE_EXTRACTION, Device.CPU, long=False)

    async def ask(self) -> CallResult:
        call = TokenizedCall((3,), 0, RAW, far_deadline())
        batch = TokenizedBatch(self._key, item(5, 3).ids.tobytes(), (call,), 0.0)
        (answer,) = await self.replica.infer(batch)
        assert isinstance(answer, CallResult), answer
        return answer

    def restart_tuning_rounds(self) -> None:
        """Apply another INTERVAL_S, instead of after the current wait."""
        self.replica._tuning_rounds.close()
        self.replica._tuning_rounds.start()

    def plan(self) -> LonePass:
        """Plan a forward pass of the text that `ask` sends."""
        return self.replica._lone_passes.plan(self._key.model, 1, 3)

    async def ask_until(self, compute_type: str) -> list[CallResult]:
        """Send requests until a response has `compute_type`, and return all responses."""
        answers = [await self.ask()]
        give_up_s = time.monotonic() + TIMEOUT_S
        while answers[-1].compute_type != compute_type:
            assert time.monotonic() < give_up_s, "it was not tuned"
            answers += await asyncio.gather(*(self.ask() for _ in range(4)))
            await asyncio.sleep(0.02)  # leave CPU time to tuning, which has the lowest priority
        return answers


@asynccontextmanager
async def running(
    target: TuningTarget, *, is_pinned: bool = True, **encoder: object
) -> AsyncIterator[TuningEncoderHarness]:
    store, version = target.artifact.parents[1], target.manifest.version
    made = TuningEncoderHarness(store, version, is_pinned=is_pinned, **encoder)
    try:
        yield made
    finally:
        await made.replica.close()


def tuning_threads() -> int:
    return sum(thread.name == "tuning" for thread in threading.enumerate())


async def test_replica_serves_the_default_then_the_winner(
    target: TuningTarget,
) -> None:
    async with running(target) as encoder:
        first = await encoder.ask()
        assert first.compute_type == UNTUNED
        assert read_costs(target) is None
        answers = await encoder.ask_until(TUNED)
    assert [a.compute_type for a in answers[:1]] == [UNTUNED]
    for answer in answers:
        np.testing.assert_allclose(answer.value, first.value, atol=TOLERANCE)
    assert tuning_threads() == 0


async def test_replica_with_tables_of_another_host_measures_one_thread_and_all_cores(
    target: TuningTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.usable_cores", lambda: 2)
    elsewhere = target.host.model_copy(update={"name": "another", "flags": ()})
    write_table(target, {"1x16": "slow"}, host=elsewhere)
    settings = target.settings.model_copy(update={"intra_op_threads": 2})
    all_cores = replace(target, settings=settings)
    async with running(target, lone_pass_bytes=1 << 30) as encoder:
        await encoder.ask_until(TUNED)
        await until_slowly(lambda: tuning_threads() == 0)
        assert read_costs(all_cores) is not None
        assert encoder.plan().is_brief, "the tables of this host are used"


async def test_pass_after_calls_that_overlapped_leaves_a_core_to_others(
    target: TuningTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.usable_cores", lambda: 2)
    monkeypatch.setattr("deployments.tuning.lone_passes.OVERLAP_S", 600.0)
    settings = target.settings.model_copy(update={"intra_op_threads": 2})
    # One thread seems far slower, whatever the passes of this test take.
    for each, ms in ((target, 1e3), (replace(target, settings=settings), 1.0)):
        write_table(each, {"1x16": "slow"}, rows=(row("slow", {"1x16": ms}, "fp32"),))
    async with running(target, lone_pass_bytes=1 << 30) as encoder:
        await encoder.ask()
        await wait_until(lambda: encoder.plan().engine is not None)
        await encoder.ask()
        assert encoder.plan().engine is not None, "the calls came one after the other"
        await asyncio.gather(encoder.ask(), encoder.ask())
        assert encoder.plan().engine is None


async def test_model_that_is_loaded_on_demand_is_tuned_while_it_is_used(
    target: TuningTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(target, is_pinned=False) as encoder:
        assert (await encoder.ask()).compute_type == UNTUNED
        assert tuning_threads() == 0
        monkeypatch.setattr("deployments.tuning.rounds.INTERVAL_S", 0.5)
        encoder.restart_tuning_rounds()
        await encoder.ask_until(TUNED)


async def test_second_replica_uses_the_table_of_the_first(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(target) as first, running(target) as second:
        await asyncio.gather(first.ask_until(TUNED), second.ask_until(TUNED))
        kept = target.costs_path.read_bytes()
        # If both replicas had measured, the second would have changed the figures in the file.
        await wait_until(lambda: tuning_threads() == 0)
        assert target.costs_path.read_bytes() == kept
    async with running(target) as third:
        assert (await third.ask()).compute_type == TUNED
        assert tuning_threads() == 0
    ended = [r.message for r in caplog.records if "is tuned for this host after" in r.message]
    assert len(ended) == 2
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


async def test_table_of_another_runtime_is_measured_again(target: TuningTarget) -> None:
    write_table(target, {"1x16": "int8"}, **STALE)
    async with running(target) as encoder:
        assert (await encoder.ask()).compute_type == UNTUNED
        await encoder.ask_until(TUNED)
    assert read_costs(target) is not None


async def test_existing_table_is_used_at_start(
    target: TuningTarget,
) -> None:
    write_table(target, {"1x16": "int8"})
    async with running(target) as encoder:
        assert (await encoder.ask()).compute_type == TUNED
        assert tuning_threads() == 0


async def test_winner_that_fails_to_open_once_replaces_the_default_later(
    target: TuningTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(target, {"1x16": "int8"})
    failures = iter([EngineFailed("out of memory")])

    def open_after_a_failure(spec: GraphSpec, settings: EncoderSettings) -> EncoderEngine:
        if spec.precision == "int8" and (failure := next(failures, None)) is not None:
            raise failure
        return open_engine(spec, settings)

    monkeypatch.setattr("deployments.tuning.opening.open_engine", open_after_a_failure)
    async with running(target) as encoder:
        await encoder.ask_until(TUNED)
    assert next(failures, None) is None, "no engine failed: the test shows nothing"


@pytest.mark.parametrize("off", ["off", False], ids=["quoted", "as YAML reads it"])
async def test_tuning_can_be_disabled(target: TuningTarget, off: object) -> None:
    async with running(target, tune=off) as encoder:
        assert (await encoder.ask()).compute_type == UNTUNED
        assert tuning_threads() == 0
    assert not (target.artifact / "hosts").exists()


async def test_untunable_model_is_served(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    (target.artifact / "hosts").write_text("in the way")
    async with running(target) as encoder:
        await until_slowly(lambda: tuning_threads() == 0)
        assert (await encoder.ask()).compute_type == UNTUNED
    (warning,) = (r.message for r in caplog.records if r.levelname == "WARNING")
    assert warning.startswith("models are not tuned for this host: ")


async def until_slowly(happened: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < give_up_s, "waited in vain"
        await asyncio.sleep(0.02)


async def test_running_pass_keeps_its_engine() -> None:
    former, latter = FakeEngine(held=True), FakeEngine()
    former.info = type(former.info)(compute_type="cpu-former")
    model = ModelRef(EMBEDDER, "0123456789ab")
    engines = {model: former}
    passes: ListRecorder[ForwardPassRecord] = ListRecorder()
    loop = build_batch_scheduler(engines, BatchSettings(), concurrent_passes=1, recorder=passes)
    begun = loop.submit(model, [item(1)], far_deadline())
    await wait_until(lambda: bool(former.passes))
    engines[model] = latter
    waiting = loop.submit(model, [item(2)], far_deadline())
    former.release()
    assert [(await call).compute_type for call in (begun, waiting)] == ["cpu-former", "cpu-fake"]
    assert [(await call).rows for call in (begun, waiting)] == [[[1]], [[2]]]
    await loop.drain()
    assert [record.compute for record in passes.records] == ["cpu-former", "cpu-fake"]
    assert (former.passes, latter.passes) == ([[1]], [[2]])


def test_tuning_process_ends_after_its_replica_is_killed(
    target: TuningTarget,
) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from tests.integration.serving.replicas.test_encoder_tuning import TuningEncoderHarness\n"
        "async def serve():\n"
        "    encoder = TuningEncoderHarness(Path(sys.argv[1]), sys.argv[2])\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(serve())"
    )
    store = target.artifact.parents[1]
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", code, str(store), target.manifest.version]
    replica = subprocess.Popen(command, cwd=root)
    try:
        child = wait_for_child(psutil.Process(replica.pid))
        child.suspend()
        replica.kill()
        replica.wait()
        assert child.is_running()
        child.resume()
        assert psutil.wait_procs([child], timeout=TIMEOUT_S)[1] == []
    finally:
        replica.kill()
        replica.wait()
    assert read_costs(target) is None


def wait_for_child(process: psutil.Process) -> psutil.Process:
    give_up_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_s:
        if children := process.children():
            return children[0]
        time.sleep(0.005)
    raise AssertionError("nothing was started")
