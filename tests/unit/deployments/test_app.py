from __future__ import annotations

import pytest
import yaml

from cluster.default_config import find_config
from deployments.app import build_app


@pytest.mark.parametrize(("cores", "replicas"), [(1, 1), (2, 1), (7, 1), (8, 2), (64, 16)])
def test_ingress_replicas_follow_from_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, replicas: int
) -> None:
    monkeypatch.setattr("deployments.app.count_cores", lambda: cores)
    (application,) = yaml.safe_load(find_config(None).read_text())["applications"]
    ingress = build_app(application["args"])
    assert ingress._bound_deployment.num_replicas == replicas
