from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import yaml

from benchmarks.__main__ import main
from benchmarks.autoscaling.results import weighted_percentile

REPOSITORY = Path(__file__).parents[4]


def test_replay_writes_results_of_every_policy(tmp_path: Path) -> None:
    config = ["--config", str(REPOSITORY / "serve_config.yaml"), "--out", str(tmp_path)]
    assert main(["autoscaling", "--hours", "1", "--bursts", "1", *config]) == 0
    (path,) = tmp_path.glob("*.json")
    results = orjson.loads(path.read_bytes())
    assert results["tables"][0]["name"] == "policies"
    policies = {one["name"]: one for one in results["results"]["policies"]}
    assert policies["no autoscaling"]["replica_hours"] == pytest.approx(8.0)
    assert 1.0 <= policies["work"]["replica_hours"] < 8.0
    assert all(len(one["replicas"]) == 12 for one in policies.values())
    assert {plot.suffix for plot in tmp_path.iterdir()} == {".json", ".png", ".svg"}


def test_policy_of_serve_needs_no_settings(tmp_path: Path) -> None:
    scaling = {"name": "CpuEncoder", "autoscaling_config": {"target_ongoing_requests": 8}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"deployments": [scaling]}]}))
    arguments = ["--config", str(config), "--out", str(tmp_path)]
    assert main(["autoscaling", "--hours", "1", "--bursts", "1", *arguments]) == 0


def test_invalid_settings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", str(REPOSITORY / "serve_config.yaml"), "--out", str(tmp_path)]
    assert main(["autoscaling", "--deployment", "Ingress", *config]) == 1
    assert "no autoscaling_config of `Ingress`" in capsys.readouterr().err
    assert main(["autoscaling", "--min-replicas", "2", "--max-replicas", "1", *config]) == 1
    assert "max_replicas (1) must be greater" in capsys.readouterr().err
    assert main(["autoscaling", "--base-work", "1e-9", "--bursts", "0", *config]) == 1
    assert "the day has no requests" in capsys.readouterr().err


def test_weighted_percentile() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 98.0, 1.0])
    assert weighted_percentile(values, weights, 50) == 1.0
    assert weighted_percentile(values, weights, 99) == 2.0
    assert weighted_percentile(values, weights, 100) == 3.0
    assert weighted_percentile(values[:0], weights[:0], 99) == 0.0
