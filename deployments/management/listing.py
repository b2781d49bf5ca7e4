"""The models of a store with their versions, as operators see them.

Only manifests are read. `hundredfold models ls` (cluster/models/listing.py) lists the versions of
the whole store with their candidates, and verifies the digest of every file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deployments.artifacts.manifest import ArtifactManifest, sealed_ns
from deployments.artifacts.store import (
    LATEST_NAME,
    list_model_directories,
    model_directory,
    read_model_id,
)
from deployments.builds.estimates import BuildStatus
from deployments.builds.queue import BuildQueue
from deployments.errors import ArtifactError, ManifestInvalid, UnknownModel
from deployments.plan.plan import Plan, Shadow
from deployments.plan.plan_file import read_plan
from deployments.plan.resolution import (
    NO_VERSIONS,
    find_traffic,
    list_refused,
    resolve_selector,
    sealed_versions,
)


class VersionEntry(BaseModel):
    """One sealed version."""

    model_config = ConfigDict(frozen=True)

    version: str
    aliases: list[str]
    percent: float  # 0 to 100, of the requests that name no version
    created: int  # seconds since the epoch, when the version was sealed
    size_bytes: int  # of all files; 0 if the manifest cannot be used
    tasks: list[str]
    reason: str = ""  # why the version is refused or cannot be loaded; otherwise empty


class ModelEntry(BaseModel):
    """One model of the store, with the settings of the plan for it."""

    model_config = ConfigDict(frozen=True)

    id: str
    pinned: bool
    shadow: Shadow | None
    versions: list[VersionEntry]  # the newest first
    build: BuildStatus | None  # the model's last build, if the build queue has its record


def list_default_versions(store: Path) -> dict[str, str]:
    """Return the default version of every model of the store, by id, without reading manifests."""
    plan = read_plan(store)
    versions = {}
    for model_id in map(read_model_id, list_model_directories(store)):
        with suppress(ArtifactError, UnknownModel):  # unreadable, or removed meanwhile
            versions[model_id] = find_traffic(store, plan, model_id).version
    return versions


def describe_model(
    store: Path, model_id: str, configured: Mapping[str, str] = NO_VERSIONS
) -> ModelEntry:
    """Describe a model. `configured` maps model ids to the versions that the configuration names.

    Raises UnknownModel for an invalid id, or if the store has no version and no build of the model.
    Raises PlanUnusable.
    """
    try:
        entry = _describe(store, read_plan(store), model_id, configured)
    except ManifestInvalid as exc:
        raise UnknownModel(exc.message, field="model") from exc
    if not entry.versions and entry.build is None:
        raise UnknownModel(f"Model {model_id} does not exist", field="model")
    return entry


def _describe(store: Path, plan: Plan, model_id: str, configured: Mapping[str, str]) -> ModelEntry:
    entry = plan.find(model_id)
    aliases: dict[str, list[str]] = {}
    for alias in (LATEST_NAME, *entry.aliases):
        try:
            version = resolve_selector(store, entry, model_id, alias)
        except (ArtifactError, UnknownModel):
            continue
        aliases.setdefault(version, []).append(alias)
    shares = _shares(store, plan, model_id, configured)
    refused = list_refused(store, model_id, entry)
    return ModelEntry(
        id=model_id,
        pinned=entry.pinned,
        shadow=entry.shadow,
        versions=[
            _describe_version(
                model_directory(store, model_id) / version,
                aliases.get(version, []),
                shares.get(version, 0.0),
                entry.refused[version].reason if version in refused else "",
            )
            for version in sealed_versions(store, model_id)
        ],
        build=BuildQueue(store).status(model_id),
    )


def _shares(
    store: Path, plan: Plan, model_id: str, configured: Mapping[str, str]
) -> dict[str, float]:
    """Return the share of each version in the requests that name no version, in percent."""
    try:
        traffic = find_traffic(store, plan, model_id, configured)
    except (ArtifactError, UnknownModel):
        return {}
    shares = dict(traffic.splits)
    return {**shares, traffic.version: 100.0 - sum(shares.values())}


def _describe_version(
    directory: Path, aliases: list[str], percent: float, reason: str
) -> VersionEntry:
    try:
        manifest = ArtifactManifest.parse(directory)
    except ArtifactError as error:
        size, tasks, reason = 0, [], error.message
    else:
        size = sum(file.size for file in manifest.files.values())
        tasks = [str(task) for task in manifest.tasks]
    return VersionEntry(
        version=directory.name,
        aliases=aliases,
        percent=percent,
        created=sealed_ns(directory) // 10**9,
        size_bytes=size,
        tasks=tasks,
        reason=reason,
    )
