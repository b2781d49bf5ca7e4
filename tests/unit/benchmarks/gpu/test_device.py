from __future__ import annotations

from benchmarks.gpu.device import describe_gpus
from deployments.host.gpus import Gpu


def test_description_tells_the_compute_capability() -> None:
    known = Gpu(name="NVIDIA H200", driver="580.159.03", compute_capability=(9, 0))
    unknown = Gpu(name="NVIDIA H200", driver="580.159.03")
    described = describe_gpus([known, unknown])
    assert [gpu["compute_capability"] for gpu in described] == ["9.0", ""]
