from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.serve_config import ServeConfig, build_encoder_config
from cluster.default_config import find_config


def test_config_is_a_copy(tmp_path: Path) -> None:
    config = ServeConfig.read()
    config.find_deployment("Ingress")["user_config"]["key_file"] = "keys.json"
    written = ServeConfig.read(config.write(tmp_path))
    assert written.find_deployment("Ingress")["user_config"]["key_file"] == "keys.json"
    shipped = yaml.safe_load(find_config(None).read_text(encoding="utf-8"))
    assert ServeConfig.read().document == shipped != written.document


def test_selected_models_replace_those_of_the_config(tmp_path: Path) -> None:
    config = ServeConfig.read()
    config.select_models(tmp_path, {"one": "0123456789ab", "two": None})
    assert config.arguments["store"] == str(tmp_path)
    assert config.arguments["models"] == [{"id": "one", "version": "0123456789ab"}, {"id": "two"}]


@pytest.mark.parametrize("content", ["applications: []", "applications:", "text", "{", ""])
def test_file_without_application_is_reported(tmp_path: Path, content: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(content)
    with pytest.raises(BenchmarkError, match=r"own\.yaml` is no Serve config"):
        ServeConfig.read(path)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="is no Serve config: FileNotFoundError"):
        ServeConfig.read(tmp_path / "own.yaml")


def test_encoders_have_a_constant_number_of_replicas(tmp_path: Path) -> None:
    config = build_encoder_config(tmp_path, ["one"], {"max_tokens": 7}, replicas=3, with_gpu=True)
    encoders = config.arguments["encoders"]
    assert [encoders[device]["tune"] for device in ("cpu", "gpu")] == ["off", "off"]
    assert (encoders["cpu"]["max_tokens"], "max_tokens" in encoders["gpu"]) == (7, False)
    assert config.arguments["generators"] == {}
    for name, count in (("CpuEncoder", 3), ("GpuEncoder", 1)):
        scaling = config.find_deployment(name)["autoscaling_config"]
        assert (scaling["min_replicas"], scaling["max_replicas"]) == (count, count)
        assert "initial_replicas" not in scaling
    with pytest.raises(KeyError):
        config.find_deployment("CpuGenerator")
