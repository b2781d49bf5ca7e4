"""What kind of machine this is, as far as the speed of a graph depends on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

from pydantic import BaseModel, ConfigDict

from deployments.manifest import Device
from deployments.processors import installed_versions, this_processor, usable_cores
from deployments.tuning.driver import ask_driver

# The packages that may provide an engine.
_PACKAGES = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "torch": ("torch",),
}


class Host(BaseModel):
    """One kind of host. Equal hosts share their measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device
    name: str  # of the CPU, or of the GPU and its driver
    generation: str
    flags: tuple[str, ...]
    cores: int  # that this process may use

    @property
    def fingerprint(self) -> str:
        """Names the directory of what was measured here: 12 hex digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


@cache
def this_host(device: Device) -> Host:
    """The host this process runs on, as one that computes on `device`."""
    processor = this_processor()
    return Host(
        device=device,
        name=(ask_driver("name,driver_version") if device is Device.GPU else "") or processor.name,
        generation=processor.generation,
        flags=processor.flags,
        cores=usable_cores(),
    )


def engine_versions(engines: Iterable[str]) -> dict[str, str]:
    """The version of each of `engines` that is installed here."""
    found = {}
    for engine in sorted(set(engines)):
        for package, version in installed_versions(_PACKAGES[engine]).items():
            found[engine] = f"{package} {version}"
    return found
