"""Names of the deployments, as in serve_config.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.artifacts.types import Device

INGRESS = "Ingress"
TOKENIZER = "Tokenizer"
ENCODER_DEPLOYMENTS: Mapping[Device, str] = {Device.CPU: "CpuEncoder", Device.GPU: "GpuEncoder"}
GENERATOR_DEPLOYMENTS: Mapping[Device, str] = {
    Device.CPU: "CpuGenerator",
    Device.GPU: "GpuGenerator",
}
# Deployments that `GET /ready` requires if they are configured, besides the Ingress that answers
# it, and how its answer describes them.
REQUIRED_FOR_READY: Mapping[str, str] = {
    TOKENIZER: "tokenizer",
    ENCODER_DEPLOYMENTS[Device.CPU]: "cpu encoder",
    GENERATOR_DEPLOYMENTS[Device.CPU]: "cpu generator",
}
