"""Reader of production.yaml, which contains the settings for Kubernetes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.linting.document import UnreadableConfig, read_document


class InvalidOverlay(Exception):
    """production.yaml and serve_config.yaml do not describe a working deployment."""


class _OverlayModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Images(_OverlayModel):
    """Names of the images with packages for the CPU and for CUDA."""

    cpu: str
    gpu: str


class Pod(_OverlayModel):
    """Size of one pod in whole cores and GiB. Resource requests equal limits."""

    cpu: int = Field(ge=1)
    memory_gib: int = Field(ge=1)
    disk_gib: int = Field(8, ge=1)  # of the node, for logs; Kubernetes evicts a pod that takes more


class WorkerGroup(Pod):
    """A group of equal pods that the autoscaler adds and removes."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    image: Literal["cpu", "gpu"]
    gpus: int = Field(0, ge=0)
    gpu_memory_gib: int | None = Field(None, ge=1)  # memory per GPU; None: not checked
    # Models with `--offload-kv-cache`: each takes `kv_cache_bytes` of main memory per replica.
    offloaded_models: int = Field(0, ge=0)
    min_replicas: int = Field(ge=0)
    max_replicas: int = Field(ge=1)
    idle_timeout_s: int = Field(ge=0)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas exceeds max_replicas ({self.max_replicas})")
        return self


class Production(_OverlayModel):
    """Content of production.yaml. `merge` applies the field `serve` to serve_config.yaml."""

    name: str = Field(pattern=r"^[a-z]([a-z0-9-]{0,45}[a-z0-9])?$")
    images: Images
    artifacts_claim: str
    keys_secret: str | None = Field(None, min_length=1)  # None: no keys, or `key_file` in config
    head: Pod
    workers: tuple[WorkerGroup, ...] = Field(min_length=1)
    serve: dict[str, Any]


def read_production(path: Path) -> Production:
    """Parse the overlay. Raises InvalidOverlay if it is invalid, OSError if it cannot be read."""
    try:
        return Production.model_validate(read_yaml(path))
    except ValidationError as exc:
        raise InvalidOverlay(f"`{path.name}`: {exc}") from exc


def read_yaml(path: Path) -> Any:
    """Parse a YAML file. Raises InvalidOverlay, which names the invalid line, or OSError."""
    try:
        return read_document(path.read_text(encoding="utf-8")).value
    except (UnicodeDecodeError, UnreadableConfig) as exc:
        raise InvalidOverlay(f"`{path.name}`: {exc}") from exc


def merge(base: Any, changes: Any, path: str = "serve") -> Any:
    """Return a copy of `base` with `changes` applied.

    Mappings merge by key. Lists of items with a `name` merge by name. Other values of `changes`
    replace those of `base`. Raises InvalidOverlay for a named item that `base` does not have.
    """
    if isinstance(base, dict) and isinstance(changes, dict):
        merged = {key: copy.deepcopy(value) for key, value in base.items()}
        for key, value in changes.items():
            merged[key] = merge(base.get(key), value, f"{path}.{key}")
        return merged
    if _is_named(base) and _is_named(changes):
        by_name = {item["name"]: item for item in changes}
        for unknown_name in by_name.keys() - {item["name"] for item in base}:
            raise InvalidOverlay(f"`{path}`: there is no `{unknown_name}` in serve_config.yaml")
        return [merge(i, by_name.get(i["name"], {}), f"{path}[{i['name']}]") for i in base]
    return copy.deepcopy(changes)


def _is_named(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value)
    )
