"""Applications and deployments of a Serve config. Reading them does not import Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.config import default_store, expand_home
from deployments.deployment_names import INGRESS

IMPORT_PATH = "deployments.app:build_app"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class DeploymentEntry:
    """One item of `deployments`. `is_ingress`: it is the Ingress of this project."""

    path: KeyPath
    name: str
    raw: dict[str, Any]
    is_ingress: bool


@dataclass(frozen=True, slots=True)
class ApplicationEntry:
    """One item of `applications` in a Serve config."""

    path: KeyPath
    raw: dict[str, Any]

    @property
    def import_path(self) -> str:
        return str(self.raw.get("import_path"))

    @property
    def is_hundredfold(self) -> bool:
        return self.import_path == IMPORT_PATH

    def deployments(self) -> Iterator[DeploymentEntry]:
        """Yield the entries that are mappings. The schema check reports all others."""
        for path, raw in _mappings(self.raw.get("deployments"), (*self.path, "deployments")):
            name = str(raw.get("name"))
            yield DeploymentEntry(path, name, raw, self.is_hundredfold and name == INGRESS)

    def ingresses(self) -> Iterator[DeploymentEntry]:
        """Yield the entries of the Ingress. A valid application of this project has one."""
        return (entry for entry in self.deployments() if entry.is_ingress)


def find_applications(config: Any) -> Iterator[ApplicationEntry]:
    """Yield the applications that are mappings. The schema check reports all others."""
    if isinstance(config, dict):
        for path, raw in _mappings(config.get("applications"), ("applications",)):
            yield ApplicationEntry(path, raw)


def find_ingresses(config: Any) -> Iterator[DeploymentEntry]:
    """Yield the entries of the Ingress of each application of this project."""
    for application in find_applications(config):
        yield from application.ingresses()


def read_args(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the `args` of each application of this project."""
    for application in find_applications(config):
        if application.is_hundredfold:
            yield read_mapping(application.raw, "args")


def find_store(args: Mapping[str, Any]) -> Path:
    """Return the store that `args` of an application name, else the default store.

    Raises BadSetting if its path begins with `~` and there is no home.
    """
    store = args.get("store")
    return expand_home(store) if isinstance(store, str) else default_store()


def read_mapping(owner: Any, key: str) -> Mapping[str, Any]:
    """Return the mapping under `key`; {} if there is no mapping."""
    value = owner.get(key) if isinstance(owner, dict) else None
    return value if isinstance(value, dict) else {}


def read_number(owner: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> float | None:
    """Return the number under `key`, or its default. Return None for any other type."""
    value = owner.get(key, defaults.get(key))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _mappings(items: Any, path: KeyPath) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield (*path, index), item
