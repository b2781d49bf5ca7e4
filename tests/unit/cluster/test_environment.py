"""The RAY_SERVE_ variables that the cluster sets exist in the pinned Ray.

Ray ignores unknown names silently.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.environment import RAY_ENVIRONMENT


def test_replicas_index_gpus_as_nvidia_smi() -> None:
    assert RAY_ENVIRONMENT["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("name", [n for n in RAY_ENVIRONMENT if n.startswith("RAY_SERVE_")])
def test_serve_reads_the_variable(name: str) -> None:
    spec = find_spec("ray.serve._private.constants")
    assert spec is not None
    assert spec.origin is not None
    assert f'"{name}"' in Path(spec.origin).read_text()
