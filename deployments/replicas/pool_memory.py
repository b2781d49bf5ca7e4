"""Memory accounting of a pool: its own limit, and on a GPU the budget of the device."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import DEFAULT_POOL_BYTES
from deployments.engines.base import limit_pass_tokens
from deployments.errors import ModelUnavailable
from deployments.messages import ModelRef
from deployments.replicas.device_memory import DeviceMemory

# Memory that ONNX Runtime's arena keeps after a pass of 1,024 tokens (measured: MiniLM, hidden size
# 384). Larger passes return their memory. On a GPU an fp16 pass of 2,048 tokens needs as many
# bytes.
ARENA_BYTES_PER_PASS = 40_000_000
# Memory that the arena keeps per score of a sparse encoder: four fp32 numbers (measured: 512 tokens
# with BERT's vocabulary). On a GPU they have fp16.
_BYTES_PER_SCORE: Mapping[Device, int] = {Device.CPU: 16, Device.GPU: 8}


def leave_room_for_arena(
    pool_bytes: int | None, device: Device, concurrent_passes: int
) -> int | None:
    """Return `pool_bytes` without the arena's memory; on a GPU, return `pool_bytes` unchanged.

    On the CPU, None stands for DEFAULT_POOL_BYTES, and the result is never None.
    """
    if device is not Device.CPU:
        return pool_bytes
    max_bytes = DEFAULT_POOL_BYTES if pool_bytes is None else pool_bytes
    return max(max_bytes - concurrent_passes * ARENA_BYTES_PER_PASS, 0)


def count_arena_bytes(device: Device, concurrent_passes: int) -> int:
    """Return the bytes to count per encoder for its arena.

    Return 0 on the CPU, where `leave_room_for_arena` subtracts the shared arena from the pool.
    """
    return 0 if device is Device.CPU else concurrent_passes * ARENA_BYTES_PER_PASS


def count_score_bytes(manifest: ArtifactManifest, device: Device, concurrent_passes: int) -> int:
    """Return the bytes to count for the scores of passes with the head SPARSE; else 0.

    A text that exceeds the limit of a pass alone runs whole.
    """
    limit = limit_pass_tokens(manifest.head, manifest.output_width, device)
    if limit is None:
        return 0
    scores = max(limit, manifest.max_tokens) * manifest.output_width
    return concurrent_passes * scores * _BYTES_PER_SCORE[device]


class PoolMemory:
    """Bytes of the models of one pool.

    Pinned models may exceed `max_bytes`, but never the memory budget of the device.
    """

    def __init__(
        self,
        max_bytes: int | None,
        device_memory: DeviceMemory | None,
        size_settings: str = "",
        limit_setting: str = "pool_bytes",
    ) -> None:
        """Limit the models to `max_bytes`.

        If `max_bytes` is None, use the limit of `device_memory`. If both are None, use
        DEFAULT_POOL_BYTES. See ModelLoader for `size_settings` and `limit_setting`.
        """
        default = DEFAULT_POOL_BYTES if device_memory is None else device_memory.limit
        self.max_bytes = default if max_bytes is None else max_bytes
        self.bytes = 0
        self._device = device_memory
        self._size_settings = size_settings
        self._limit_setting = limit_setting

    def has_room(self, size: int) -> bool:
        return self.bytes + size <= self.max_bytes

    def take(self, size: int, *, is_pinned: bool) -> bool:
        """Count `size` more bytes as used if that many are free. Return whether they were."""
        if not is_pinned and not self.has_room(size):
            return False
        if self._device is not None and not self._device.claim(size):
            return False
        self.bytes += size
        return True

    def give_back(self, size: int) -> None:
        self.bytes -= size
        if self._device is not None:
            self._device.release(size)

    def can_take(self, size: int, staying: int, *, is_pinned: bool) -> bool:
        """Return whether `size` bytes would be free if only models of `staying` bytes remained."""
        if not is_pinned and staying + size > self.max_bytes:
            return False
        evictable = self.bytes - staying
        return self._device is None or size <= self._device.count_free() + evictable

    def build_refusal(self, ref: ModelRef, size: int) -> ModelUnavailable:
        """Build the error with the tighter limit, its free bytes and the needed bytes.

        The error advises a retry only if the model fits in the limit.
        """
        free = max(0, self.max_bytes - self.bytes)
        name, limit = self._limit_setting, self.max_bytes
        if self._device is not None and (on_device := self._device.count_free()) <= free:
            name, limit, free = "gpu_memory", self._device.limit, on_device
        remedies = ["retry later"] if size <= limit else []
        remedies.append(f"raise `{name}`")
        if self._size_settings:
            remedies.append(f"lower {self._size_settings}")
        advice = ", or ".join(remedies)
        return ModelUnavailable(
            f"Model {ref.id} needs {size} bytes of memory; `{name}` allows {limit}, of which "
            f"{free} are available. {advice[0].upper()}{advice[1:]}"
        )

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
