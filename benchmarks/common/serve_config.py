"""Configurations of the servers that benchmarks start: copies of a Serve config, with changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from benchmarks.common.errors import BenchmarkError
from cluster.default_config import CONFIG_NAME, find_config
from deployments.artifacts.types import Device
from deployments.deployment_names import ENCODER_DEPLOYMENTS, INGRESS, TOKENIZER


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A copy of a Serve config with one application. Benchmarks change it in place."""

    document: dict[str, Any]

    @classmethod
    def read(cls, path: Path | None = None) -> Self:
        """Copy the config at `path`, or the default config.

        Raises BenchmarkError for a file that cannot be read, or that has no application.
        """
        path = find_config(path)
        try:
            config = cls(yaml.safe_load(path.read_text(encoding="utf-8")))
            _ = config.application
        except (OSError, yaml.YAMLError, LookupError, TypeError) as exc:
            raise BenchmarkError(
                f"`{path}` is no Serve config: {exc!r}", hint="name one with --config FILE"
            ) from exc
        return config

    @property
    def application(self) -> dict[str, Any]:
        application: dict[str, Any] = self.document["applications"][0]
        return application

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the application: store, models, encoders and generators."""
        arguments: dict[str, Any] = self.application.setdefault("args", {})
        return arguments

    def find_deployment(self, name: str) -> dict[str, Any]:
        """Return the settings of a deployment. Raises KeyError if the config has none."""
        deployments: Sequence[dict[str, Any]] = self.application["deployments"]
        return {each["name"]: each for each in deployments}[name]

    def select_models(self, store: Path, models: Mapping[str, str | None]) -> None:
        """Serve only `models` of `store`: versions by id. None stands for the usual version."""
        self.arguments["store"] = str(store.resolve())
        self.arguments["models"] = [
            {"id": id_} | ({} if version is None else {"version": version})
            for id_, version in models.items()
        ]

    def write(self, directory: Path) -> Path:
        """Write the config to `directory`, which must exist. Return the path of the file."""
        path = directory / CONFIG_NAME
        path.write_text(yaml.safe_dump(self.document, sort_keys=False), encoding="utf-8")
        return path


def build_encoder_config(
    store: Path,
    models: Sequence[str],
    encoder: Mapping[str, Any],
    *,
    replicas: int = 1,
    with_gpu: bool = False,
) -> ServeConfig:
    """Return the default config without generators.

    Replicas load `models` at their start. `encoder` holds settings of the CPU encoder, which has a
    constant number of `replicas`. `with_gpu` adds one replica of the GPU encoder. Tuning is off.
    """
    config = ServeConfig.read()
    config.select_models(store, dict.fromkeys(models))
    config.arguments["generators"] = {}
    encoders = config.arguments["encoders"]
    cpu, gpu = (encoders[device] | {"tune": "off"} for device in ("cpu", "gpu"))
    config.arguments["encoders"] = {"cpu": cpu | encoder} | ({"gpu": gpu} if with_gpu else {})
    devices = {Device.CPU: replicas} | ({Device.GPU: 1} if with_gpu else {})
    counts = {ENCODER_DEPLOYMENTS[device]: count for device, count in devices.items()}
    names = (INGRESS, TOKENIZER, *counts)
    application = config.application
    application["deployments"] = [d for d in application["deployments"] if d["name"] in names]
    for name, count in counts.items():
        scaling = config.find_deployment(name)["autoscaling_config"]
        scaling |= dict.fromkeys(("min_replicas", "max_replicas"), count)
        scaling.pop("initial_replicas", None)
    return config
