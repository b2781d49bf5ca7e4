"""Keeps the idle cores of a virtual machine awake while requests are in flight.

A core without work halts, and in a virtual machine it wakes by way of the hypervisor. The stations
of one request wake cores about a dozen times; between them all cores may be idle. Measured on two
virtual cores: 6.6 ms for a lone request, 3.5 ms with cores that wait awake.

A process that holds /dev/cpu_dma_latency with 0 makes Linux wait for work in a loop. This takes no
time from any process, but the machine looks busy to its host, so it ends soon after the last
request. https://docs.kernel.org/power/pm_qos_interface.html, .../virt/guest-halt-polling.html
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
# Linux loads this driver in virtual machines. Other drivers know cheaper states than a loop.
_HALTING_DRIVER = "haltpoll"
# s after the last request: a client in a loop sends its next one within this time.
LINGER_S = 0.01
# Microseconds that a core may take to wake; the second is the kernel's own default.
_AWAKE, _ANY = struct.pack("<i", 0), struct.pack("<i", 2_000_000_000)


class IdleCores:
    """Counts the requests in flight of one process. Use from one event loop."""

    def __init__(self, device: Path = LATENCY_DEVICE, driver: Path = IDLE_DRIVER) -> None:
        self.is_enabled = True
        self._requests = 0
        self._is_awake = False
        self._descriptor = _open(device, driver)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        """Count a request, and keep the cores awake."""
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
        """Return whether it succeeded; if not, stop trying."""
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
    """Keep the cores awake within the block, as during requests."""
    descriptor = _open(device, driver)
    if descriptor is None:
        yield
        return
    try:
        with suppress(OSError):
            os.write(descriptor, _AWAKE)
        yield
    finally:
        os.close(descriptor)  # which withdraws what was written


def halts_idle_cores(driver: Path = IDLE_DRIVER) -> bool:
    """Whether waking an idle core of this machine takes the hypervisor."""
    try:
        return driver.read_text().strip() == _HALTING_DRIVER
    except OSError:
        return False


def _open(device: Path, driver: Path) -> int | None:
    """Return a descriptor; None where halting is cheap or the device may not be written."""
    if not halts_idle_cores(driver):
        return None
    try:
        return os.open(device, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        log.info("idle cores may halt during requests: %s", error)
        return None
