"""Configurations of benchmark servers that serve encoder models only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.default_config import CONFIG_NAME, find_config
from deployments.artifacts.types import Device
from deployments.deployment_names import ENCODER_DEPLOYMENTS, INGRESS, TOKENIZER


def write_encoder_config(
    root: Path,
    store: Path,
    models: Sequence[str],
    encoder: Mapping[str, Any],
    *,
    replicas: int = 1,
    with_gpu: bool = False,
) -> Path:
    """Write the default configuration without generators to `root`. Return the file's path.

    Replicas load `models` at their start. `encoder` holds settings of the CPU encoder, which has a
    constant number of `replicas`. `with_gpu` adds one replica of the GPU encoder. Tuning is off.
    """
    document = yaml.safe_load(find_config(None).read_text(encoding="utf-8"))
    (application,) = document["applications"]
    arguments = application["args"]
    arguments["store"] = str(store)
    arguments["models"] = [{"id": model_id} for model_id in models]
    arguments["generators"] = {}
    cpu, gpu = (arguments["encoders"][device] | {"tune": "off"} for device in ("cpu", "gpu"))
    arguments["encoders"] = {"cpu": cpu | encoder} | ({"gpu": gpu} if with_gpu else {})
    devices = {Device.CPU: replicas} | ({Device.GPU: 1} if with_gpu else {})
    counts = {ENCODER_DEPLOYMENTS[device]: count for device, count in devices.items()}
    names = (INGRESS, TOKENIZER, *counts)
    deployments = [d for d in application["deployments"] if d["name"] in names]
    application["deployments"] = deployments
    for deployment in deployments:
        if (count := counts.get(deployment["name"])) is not None:
            scaling = deployment["autoscaling_config"]
            scaling |= dict.fromkeys(("min_replicas", "max_replicas"), count)
            scaling.pop("initial_replicas", None)
    path = root / CONFIG_NAME
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path
