from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest

from deployments.host.idle_cores import LINGER_S, IdleCores, keep_cores_awake

AWAKE, ANY = 0, 2_000_000_000


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "cpu_dma_latency"
    path.touch()
    return path


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "current_driver"
    path.write_text("haltpoll\n")
    return path


def written(device: Path) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<i", device.read_bytes())]


def is_open(device: Path) -> bool:
    return device.resolve() in {link.resolve() for link in Path("/proc/self/fd").iterdir()}


async def test_cores_stay_awake_from_the_first_request_to_shortly_after_the_last(
    device: Path, driver: Path
) -> None:
    cores = IdleCores(device, driver)
    with cores:
        with cores:
            assert written(device) == [AWAKE]
        await asyncio.sleep(2 * LINGER_S)
        assert written(device) == [AWAKE], "one request is still in flight"
    with cores:
        pass
    assert written(device) == [AWAKE], "the next request came in time"
    await asyncio.sleep(2 * LINGER_S)
    assert written(device) == [AWAKE, ANY]
    with cores:
        assert written(device) == [AWAKE, ANY, AWAKE]


async def test_setting_ends_it_with_the_requests_in_flight(device: Path, driver: Path) -> None:
    cores = IdleCores(device, driver)
    with cores:
        cores.is_enabled = False
    await asyncio.sleep(2 * LINGER_S)
    with cores:
        assert written(device) == [AWAKE, ANY]


@pytest.mark.parametrize("case", ["physical cores", "no driver", "no device"])
async def test_other_machines_are_left_alone(case: str, device: Path, driver: Path) -> None:
    if case == "physical cores":
        driver.write_text("intel_idle\n")
    elif case == "no driver":
        driver.unlink()
    else:
        device.unlink()
    with IdleCores(device, driver):
        pass
    await asyncio.sleep(2 * LINGER_S)
    assert not device.exists() or written(device) == []


async def test_device_that_fails_is_left_alone(
    driver: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cores = IdleCores(Path("/dev/full"), driver)
    for _ in range(2):
        with cores:
            pass
        await asyncio.sleep(2 * LINGER_S)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "written once"


def test_cores_are_kept_awake_within_a_block(device: Path, driver: Path) -> None:
    with keep_cores_awake(device, driver):
        assert written(device) == [AWAKE]
        assert is_open(device)
    assert not is_open(device), "closing the device ends it"
    with keep_cores_awake(Path("/dev/full"), driver), keep_cores_awake(device / "missing", driver):
        pass
