"""One budget of GPU memory for the models of all replicas on a device.

Encoder and generator replicas are separate processes. Each claims the bytes of a model before it
loads the model. The claims are in one directory per device, with one locked file per replica. A
lock ends with its process, so the claim of a replica that was killed does not count.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.artifacts.types import Device
from deployments.errors import BadSetting
from deployments.host.gpus import VISIBLE_GPUS_VARIABLE, VisibleGpu, read_visible_gpus

log = logging.getLogger("ray.serve.hundredfold")

_ROOT = "hundredfold-gpu-{user}"
_LOCK = "lock"  # held while claims are read and written
_SUFFIX = ".claim"


class DeviceMemory:
    """Memory that one replica claims on its device, within a limit that all replicas share."""

    def __init__(self, directory: Path, limit: int) -> None:
        """Add an empty claim to `directory`. `limit` bounds the sum of its claims, in bytes.

        Raises BadSetting if another user owns the directory.
        """
        self.limit = limit
        self._directory = directory
        self._claimed = 0
        _create_private(directory)
        with self._locked():
            handle, name = tempfile.mkstemp(_SUFFIX, f"{os.getpid()}-", directory)
            self._file, self._path = os.fdopen(handle, "r+b", buffering=0), Path(name)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def claim(self, size: int) -> bool:
        """Claim `size` more bytes if that many are free. Return whether they were."""
        with self._locked():
            if self._claimed + size + self._count_others() > self.limit:
                return False
            self._write(self._claimed + size)
        return True

    def release(self, size: int) -> None:
        if self._file.closed:  # a load ended after the replica was closed
            return
        with self._locked():
            self._write(self._claimed - size)

    def count_free(self) -> int:
        """Return the bytes that this replica can still claim; 0 if the claims exceed the limit."""
        with self._locked():
            return max(0, self.limit - self._claimed - self._count_others())

    def close(self) -> None:
        """End the claim, as the end of the process also would."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _write(self, size: int) -> None:
        self._file.seek(0)
        self._file.write(b"%020d" % size)
        self._claimed = size

    def _count_others(self) -> int:
        return sum(_read_claim(p) for p in self._directory.glob(f"*{_SUFFIX}") if p != self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._directory / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def open_device_memory(
    budget: float, device: Device, root: Path | None = None
) -> DeviceMemory | None:
    """Open the memory budget of this process's GPUs.

    `budget` applies to each GPU: a fraction (up to 1) of its memory, or a number of bytes. Returns
    None if `device` is the CPU, or if `budget` is a fraction and the memory of the GPUs is unknown.
    Raises BadSetting if another user owns the directory of the claims.
    """
    if device is Device.CPU:
        return None
    gpus = read_visible_gpus()
    limit = count_budget(budget, gpus)
    if limit is None:
        log.warning(
            "nvidia-smi does not list the memory of the GPUs of this process, so that the fraction "
            "%g of `gpu_memory` bounds nothing: each replica is bounded by its `pool_bytes` alone, "
            "and pinned models by nothing. Set `gpu_memory` in bytes",
            budget,
        )
        return None
    root = root or Path(tempfile.gettempdir(), _ROOT.format(user=os.getuid()))
    # nvidia-smi does not list some GPUs, such as MIG instances. CUDA_VISIBLE_DEVICES names these.
    names = ",".join(gpu.uuid for gpu in gpus) or os.environ.get(VISIBLE_GPUS_VARIABLE, "")
    # The UUIDs of seven GPUs exceed the longest file name.
    return DeviceMemory(root / hashlib.sha256(names.encode()).hexdigest()[:32], limit)


def count_budget(budget: float, gpus: Sequence[VisibleGpu]) -> int | None:
    """Return the bytes of a budget on all of `gpus`; None for a fraction if `gpus` is empty."""
    if budget > 1:
        return int(budget) * max(1, len(gpus))
    return int(sum(gpu.memory_bytes for gpu in gpus) * budget) if gpus else None


def _create_private(directory: Path) -> None:
    """Create a directory and its parent, mode 0700. Raises BadSetting if another user owns them."""
    for path in (directory.parent, directory):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.lstat().st_uid != os.getuid():
            raise BadSetting(f"`{path}` belongs to another user: claims of GPU memory lie there")


def _read_claim(path: Path) -> int:
    """Return the bytes of a claim. If its process has ended, remove the file and return 0."""
    try:
        with path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
            path.unlink(missing_ok=True)
    except FileNotFoundError:  # its replica has ended the claim meanwhile
        pass
    return 0
