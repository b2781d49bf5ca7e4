"""Latency limit that keeps idle cores of a virtual machine awake while requests are in flight.

A core without work halts. In a virtual machine only the hypervisor can wake it. The threads and
processes that handle one request wake cores about a dozen times. Measured on two virtual cores: a
lone request takes 6.6 ms, or 3.5 ms if idle cores stay awake.

While a process keeps /dev/cpu_dma_latency open with the value 0, idle cores poll for work in a
loop. The loop takes no time from any process. But the host sees a busy machine, so the polling ends
soon after the last request.
https://docs.kernel.org/power/pm_qos_interface.html, .../virt/guest-halt-polling.html
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("ray.serve.hundredfold")

LATENCY_DEVICE = Path("/dev/cpu_dma_latency")
IDLE_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
# Idle driver that Linux loads in virtual machines. With any other driver, this module lets idle
# cores sleep: they wake fast, and their idle states cost less than a polling loop.
_HALTING_DRIVER = "haltpoll"
# Seconds that cores stay awake after a request. A client in a loop sends the next request sooner.
LINGER_S = 0.01
# Microseconds that a core may take to wake, encoded for the device. _ANY is the kernel's default.
_AWAKE, _ANY = struct.pack("<i", 0), struct.pack("<i", 2_000_000_000)


class IdleCores:
    """Context that keeps idle cores awake while any request of this process is inside it.

    Use from one event loop. Each request enters the context once.
    """

    def __init__(self, device: Path = LATENCY_DEVICE, driver: Path = IDLE_DRIVER) -> None:
        self.is_enabled = True
        self._requests = 0
        self._is_awake = False
        self._descriptor = _open(device, driver)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        """Count a request, and keep the cores awake if `is_enabled`."""
        self._requests += 1
        if self._descriptor is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_awake and self.is_enabled:
            self._is_awake = self._write(_AWAKE)

    def __exit__(self, *_: object) -> None:
        """Count the end of a request. After the last one the cores may halt again."""
        self._requests -= 1
        if self._is_awake and self._requests == 0:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._release)

    def _release(self) -> None:
        self._timer = None
        self._write(_ANY)
        self._is_awake = False

    def _write(self, latency: bytes) -> bool:
        """Write a latency limit; return whether it succeeded. After a failure, write no more."""
        if self._descriptor is None:
            return False
        try:
            os.write(self._descriptor, latency)
        except OSError as error:
            log.warning("idle cores may halt during requests: %s", error)
            os.close(self._descriptor)
            self._descriptor = None
        return self._descriptor is not None


@contextmanager
def keep_cores_awake(device: Path = LATENCY_DEVICE, driver: Path = IDLE_DRIVER) -> Iterator[None]:
    """Keep idle cores awake within the block, if they halt and the device may be written."""
    descriptor = _open(device, driver)
    if descriptor is None:
        yield
        return
    try:
        with suppress(OSError):
            os.write(descriptor, _AWAKE)
        yield
    finally:
        os.close(descriptor)  # withdraws the latency limit


def halts_idle_cores(driver: Path = IDLE_DRIVER) -> bool:
    """Return whether only the hypervisor can wake an idle core of this machine."""
    try:
        return driver.read_text().strip() == _HALTING_DRIVER
    except OSError:
        return False


def _open(device: Path, driver: Path) -> int | None:
    """Open `device`. Return None if cores wake fast anyway, or if writing is not permitted."""
    if not halts_idle_cores(driver):
        return None
    try:
        return os.open(device, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        log.info("idle cores may halt during requests: %s", error)
        return None
