"""Options of a request, in every API: cache, device, deadline, priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.config import Compute
from deployments.ingress.arrivals import current_arrival
from deployments.messages import PRIORITIES, Priority


class RequestOptions(BaseModel):
    """`options` of the Hugging Face body. null means "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    use_cache: bool | None = None
    wait_for_model: bool | None = None
    use_gpu: bool | None = None  # a hint: the CPU computes where no GPU is available
    require_gpu: bool | None = None
    hardware: Literal["cpu", "gpu"] | None = None  # the request fails without this hardware
    compute: Compute | None = None  # `gpu` is a hint, like `use_gpu`; `auto`: the server chooses
    # Whether zero-shot responses have the form for clients before mid-2025. None: by user agent.
    legacy_format: bool | None = None
    # Milliseconds until the client needs the answer, at most the configured timeout.
    deadline_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    priority: Priority | None = None

    @property
    def requested_compute(self) -> Compute | None:
        """The hardware that the request names.

        `hardware` takes precedence over `use_gpu` and `require_gpu`. These take precedence over
        `compute`.
        """
        if self.hardware is not None:
            return self.hardware
        if self.use_gpu or self.require_gpu:
            return "gpu"
        return "cpu" if self.use_gpu is False else self.compute

    @property
    def hardware_option(self) -> str:
        """Name of the option that determines `requested_compute`, for error messages."""
        if self.hardware is not None:
            return "hardware"
        if self.require_gpu:
            return "require_gpu"
        return "compute" if self.use_gpu is None else "use_gpu"

    @property
    def requires_device(self) -> bool:
        """Whether the request fails if the device is not available."""
        return self.hardware is not None or bool(self.require_gpu)

    @property
    def priority_index(self) -> int:
        return 0 if self.priority is None else PRIORITIES.index(self.priority)

    def limit_timeout(self, timeout_s: float) -> float:
        """Return the seconds that the request may take, at most the configured `timeout_s`."""
        return timeout_s if self.deadline_ms is None else min(timeout_s, self.deadline_ms / 1000)

    def start_deadline(self, timeout_s: float) -> float:
        """Return the request's deadline (time.monotonic), counted from its arrival at HAProxy."""
        return current_arrival() + self.limit_timeout(timeout_s)


NO_OPTIONS = RequestOptions()
# Options that name hardware, and the header that sets each of them.
HARDWARE_HEADERS: Mapping[str, str] = {
    "use_gpu": "x-use-gpu",
    "require_gpu": "x-use-gpu",
    "hardware": "x-hardware",
    "compute": "x-compute",
}
