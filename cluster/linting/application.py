"""The parts of a Serve config that only this project reads: `args`, `user_config`, names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cluster.linting.document import KeyPath
from cluster.linting.schema import Finding, Section, sections
from deployments.config import USER_CONFIGS, AppArgs
from deployments.ingress.cluster_state import ENCODER_DEPLOYMENTS

IMPORT_PATH = "deployments.app:build_app"


@dataclass(frozen=True, slots=True)
class DeploymentEntry:
    """One item of an application's `deployments`; `ours` if this project's code runs in it."""

    path: KeyPath
    name: str
    raw: Mapping[str, Any]
    ours: bool


@dataclass(frozen=True, slots=True)
class ApplicationEntry:
    """One item of `applications`."""

    path: KeyPath
    raw: Mapping[str, Any]

    @property
    def import_path(self) -> str:
        """What Serve imports."""
        return str(self.raw.get("import_path"))

    @property
    def ours(self) -> bool:
        """Whether this project's code is what Serve imports."""
        return self.import_path == IMPORT_PATH

    def deployments(self) -> Iterator[DeploymentEntry]:
        """Its entries, as far as they are mappings."""
        for path, raw in _mappings(self.raw.get("deployments"), (*self.path, "deployments")):
            yield DeploymentEntry(path, str(raw.get("name")), raw, self.ours)


def applications(config: Any) -> Iterator[ApplicationEntry]:
    """The applications of a config, as far as they are mappings."""
    if isinstance(config, dict):
        for path, raw in _mappings(config.get("applications"), ("applications",)):
            yield ApplicationEntry(path, raw)


def our_sections(application: ApplicationEntry) -> Iterator[Section]:
    """The mappings that our own settings types read."""
    if not application.ours:
        return
    yield from sections(AppArgs, application.raw.get("args") or {}, (*application.path, "args"))
    for entry in application.deployments():
        if entry.name in USER_CONFIGS:
            settings = entry.raw.get("user_config") or {}
            yield from sections(USER_CONFIGS[entry.name], settings, (*entry.path, "user_config"))


def wrong_names(application: ApplicationEntry) -> Iterator[Finding]:
    """An import path of ours that leads nowhere, and entries for deployments we do not make."""
    if not application.ours:
        if application.import_path.startswith(IMPORT_PATH.split(".")[0] + "."):
            yield (*application.path, "import_path"), f"the application is `{IMPORT_PATH}`"
        return
    made = _deployments_made(application)
    listed = [entry.name for entry in application.deployments()]
    for entry in application.deployments():
        if entry.name not in made:
            close = difflib.get_close_matches(entry.name, sorted(made), n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            yield (*entry.path, "name"), f"there is no deployment `{entry.name}`{hint}"
    for name in sorted(made - set(listed)):
        yield (*application.path, "deployments"), f"`{name}` is missing: it would run unbounded"


def _deployments_made(application: ApplicationEntry) -> set[str]:
    """Those of the encoders that `args` declares, and the rest; all of them if `args` is wrong."""
    try:
        encoders = AppArgs.model_validate(application.raw.get("args") or {}).encoders
    except ValidationError:
        return set(USER_CONFIGS)
    absent = {name for device, name in ENCODER_DEPLOYMENTS.items() if device not in encoders}
    return set(USER_CONFIGS) - absent


def _mappings(items: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield (*path, index), item
