from __future__ import annotations

import asyncio
import threading

import pytest

from deployments.artifacts.manifest import Device
from deployments.config import LaneSettings
from deployments.ingress.cluster_state import ClusterView, LaneBoard, LaneState
from tests.support.fakes import PATIENCE_S, until

ALL = {"Tokenizer": 1, "CpuLane": 2, "GpuLane": 0}


class FakeLook:
    """What the cluster answers: the latest of `views`, or a failure for None."""

    def __init__(self, *views: ClusterView | None) -> None:
        self.views = list(views)
        self.looks = 0

    def __call__(self) -> ClusterView:
        self.looks += 1
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if view is None:
            raise ConnectionError("the controller does not answer")
        return view


def board(look: FakeLook, *, gpu: str = "auto") -> LaneBoard:
    return LaneBoard({Device.CPU: LaneSettings(), Device.GPU: LaneSettings(available=gpu)}, look)


@pytest.mark.parametrize(
    ("setting", "gpus", "available"),
    [("auto", 0.0, False), ("auto", 1.0, True), ("always", 0.0, True), ("always", 4.0, True)],
)
async def test_a_gpu_lane_is_there_with_gpus_or_when_one_can_be_added(
    setting: str, gpus: float, available: bool
) -> None:
    lanes = board(FakeLook(ClusterView(ALL, gpus)), gpu=setting)
    await lanes.refresh()
    assert lanes.states[Device.GPU] == LaneState(available=available, running=0)
    assert lanes.states[Device.CPU] == LaneState(available=True, running=2)


async def test_a_gpu_lane_that_cannot_start_is_no_lane() -> None:
    failing = frozenset(ALL)
    lanes = board(FakeLook(ClusterView(ALL, gpus=1.0, failing=failing)))
    await lanes.refresh()
    assert not lanes.states[Device.GPU].available
    assert lanes.states[Device.CPU].available


async def test_a_wave_of_refreshes_is_one_look() -> None:
    look = FakeLook(ClusterView(ALL))
    lanes = board(look)
    await asyncio.gather(*(lanes.refresh() for _ in range(20)))
    assert look.looks == 1
    await lanes.refresh()
    assert look.looks == 2


async def test_the_cpu_lane_needs_no_gpu_to_be_available() -> None:
    lanes = LaneBoard({Device.CPU: LaneSettings(available="auto")}, FakeLook(ClusterView()))
    await lanes.refresh()
    assert lanes.states == {Device.CPU: LaneState(available=True, running=0)}


def test_before_the_first_look_nothing_runs() -> None:
    lanes = board(FakeLook(ClusterView(ALL)))
    assert lanes.states[Device.CPU].running == 0
    assert lanes.missing() == ["no tokenizer is running", "no cpu lane is running"]


@pytest.mark.parametrize(
    ("running", "missing"),
    [
        (ALL, []),
        ({"CpuLane": 1}, ["no tokenizer is running"]),
        ({"Tokenizer": 1, "CpuLane": 0, "GpuLane": 1}, ["no cpu lane is running"]),
    ],
)
async def test_what_is_missing_is_what_ordinary_requests_need(
    running: dict[str, int], missing: list[str]
) -> None:
    lanes = board(FakeLook(ClusterView(running)))
    await lanes.refresh()
    assert lanes.missing() == missing


async def test_a_failed_look_keeps_the_former_view() -> None:
    lanes = board(FakeLook(ClusterView(ALL, 1.0), None))
    await lanes.refresh()
    seen = lanes.states
    await lanes.refresh()
    assert lanes.states == seen
    assert lanes.missing() == []


async def test_the_view_is_kept_fresh_until_the_block_ends() -> None:
    lanes = board(FakeLook(ClusterView({}), ClusterView(ALL)))
    before = asyncio.all_tasks()
    async with lanes.refreshing():
        assert lanes.missing(), "the first look is done"
        await until(lambda: not lanes.missing())  # about REFRESH_STARTING_S
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "nobody looks any more"


async def test_a_controller_that_hangs_keeps_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.cluster_state.LOOK_PATIENCE_S", 0.01)
    held = threading.Event()

    def look() -> ClusterView:
        held.wait(PATIENCE_S)
        return ClusterView({"CpuLane": 1})

    board = LaneBoard({Device.CPU: LaneSettings()}, look)
    await board.look_again()
    assert board.states[Device.CPU].running == 0
    held.set()
    await board.refresh()
    assert board.states[Device.CPU].running == 1
