"""Resolution of a model name to the versions that answer.

A name is a model id, or `id@selector` with a version or an alias. If the name has no selector, the
default version answers: the version of the alias `stable`, else the version in the configuration,
else `latest`. Each split takes its percentage of the requests without a selector. A client keeps
its version until the splits change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from deployments.artifacts.manifest import ArtifactManifest, sealed_ns
from deployments.artifacts.store import (
    LATEST_NAME,
    find_artifact,
    list_version_directories,
    model_directory,
    resolve_version,
)
from deployments.errors import ArtifactError, ArtifactMissing, ManifestInvalid, UnknownModel
from deployments.plan.plan import STABLE, ModelPlan, Plan, Shadow

SEPARATOR = "@"
NO_VERSIONS: Mapping[str, str] = MappingProxyType({})


class Traffic(NamedTuple):
    """The versions that answer the requests for one name."""

    version: str  # answers all requests that no split takes
    splits: tuple[tuple[str, float], ...] = ()  # pairs of version and percent
    shadow: Shadow | None = None


def split_name(name: str) -> tuple[str, str | None]:
    """Return the model id, and the selector after the last `@`; None without one."""
    model_id, separator, selector = name.rpartition(SEPARATOR)
    return (model_id, selector) if separator else (name, None)


def find_traffic(
    store: Path, plan: Plan, name: str, configured: Mapping[str, str] = NO_VERSIONS
) -> Traffic:
    """Resolve a name. `configured` maps model ids to the versions that the configuration names.

    Reads one or two small files. Raises UnknownModel if the store has no such model or version, and
    ArtifactError if `latest` cannot be read.
    """
    model_id, selector = split_name(name)
    entry = plan.find(model_id)
    if selector is not None:
        return Traffic(resolve_selector(store, entry, model_id, selector))
    version = resolve_selector(
        store, entry, model_id, _default_selector(entry, model_id, configured)
    )

    def may_answer(other: str) -> bool:
        return other != version and other not in list_refused(store, model_id, entry)

    splits = tuple((split, share) for split, share in entry.splits.items() if may_answer(split))
    shadow = entry.shadow if entry.shadow and may_answer(entry.shadow.version) else None
    return Traffic(version, splits, shadow)


def resolve_selector(store: Path, entry: ModelPlan, model_id: str, selector: str) -> str:
    """Return the version for `selector`, a version or an alias.

    If an alias names a refused version, return the last version that the alias named before and
    that is not refused. If there is none, return the newest version that is not refused, else the
    refused version. Raises the errors of `resolve_even_refused`.
    """
    version = resolve_even_refused(store, entry, model_id, selector)
    if selector == version:
        return version
    return _skip_refused(store, entry, model_id, selector, version)


def resolve_even_refused(store: Path, entry: ModelPlan, model_id: str, selector: str) -> str:
    """Return the version that `selector` names, even if it is refused.

    Raises UnknownModel if the store has no such model or version, and ArtifactError if `latest` is
    damaged or cannot be read.
    """
    try:
        return resolve_version(store, model_id, entry.aliases.get(selector, selector))
    except (ArtifactMissing, ManifestInvalid) as exc:
        raise UnknownModel(
            _explain_missing(store, entry, model_id, selector), field="model"
        ) from exc


def list_substitutes(
    store: Path, plan: Plan, name: str, version: str, configured: Mapping[str, str] = NO_VERSIONS
) -> list[str]:
    """Return the versions that may answer in place of `version`, to which `name` was resolved.

    The versions that the alias named before come first, then all others, the newest first. The list
    is empty if the name or the configuration states this exact version.
    """
    model_id, selector = split_name(name)
    entry = plan.find(model_id)
    alias = selector or _default_selector(entry, model_id, configured)
    if alias == version:
        return []
    return [v for v in _list_usable_for_alias(store, entry, model_id, alias) if v != version]


def list_rollback_versions(
    store: Path, model_id: str, entry: ModelPlan, configured: Mapping[str, str] = NO_VERSIONS
) -> list[str]:
    """Return the versions to which a rollback may return. A rollback chooses the first.

    These are the versions that `stable` named before, else the configured version that `stable`
    replaced, else the versions that were sealed before the present one. Refused versions and those
    whose manifest the store lacks are left out. Raises UnknownModel if the store lacks the present
    version, and ArtifactError if `latest` cannot be read.
    """
    default = find_traffic(store, Plan(models={model_id: entry}), model_id, configured).version
    # If `stable` names a refused version, another one answers. A rollback may return to that one.
    present = entry.aliases.get(STABLE, default)
    sealed = sealed_versions(store, model_id)
    directory = model_directory(store, model_id)
    usable = [
        version
        for version in usable_versions(store, entry, model_id)
        if version != present and sealed_ns(directory / version)
    ]
    former = [v for v in entry.former.get(STABLE, ()) if v in usable]
    replaced = [v for v in usable if v == configured.get(model_id)]
    older = sealed[sealed.index(present) + 1 :] if present in sealed else []
    return former or replaced or [v for v in older if v in usable]


def list_answering(
    store: Path, plan: Plan, model_id: str, configured: Mapping[str, str] = NO_VERSIONS
) -> frozenset[str]:
    """Return the versions that answer requests without a version, splits excluded.

    This is the default version and, while its manifest is damaged, the first substitute with a
    valid one. Raises UnknownModel if there is no default version, and ArtifactError if `latest`
    cannot be read.
    """
    default = find_traffic(store, plan, model_id, configured).version
    for version in (default, *list_substitutes(store, plan, model_id, default, configured)):
        with suppress(ArtifactError):
            ArtifactManifest.parse(model_directory(store, model_id) / version)
            return frozenset((default, version))
    return frozenset((default,))


def find_for_inspection(store: Path, plan: Plan, name: str) -> Path:
    """Return the directory of `id`, `id@version` or `id@alias`; `id` means the latest version.

    This function is for inspection, so it finds refused versions too. Raises ArtifactMissing if
    there is no such version, ManifestInvalid for an invalid id.
    """
    model_id, selector = split_name(name)
    selector = selector or LATEST_NAME
    return find_artifact(store, model_id, plan.find(model_id).aliases.get(selector, selector))


def select_version(traffic: Traffic, client: str) -> str:
    """Return the version that answers `client`. A client keeps its version until the splits change.

    Weighted rendezvous hashing: when a split changes, only the clients that the split gains or
    loses get another version.
    """
    if not traffic.splits:
        return traffic.version
    rest = 100.0 - sum(percent for _, percent in traffic.splits)
    candidates = ((traffic.version, rest), *traffic.splits)
    return max(candidates, key=lambda each: _score(client, *each))[0]


def sealed_versions(store: Path, model_id: str) -> list[str]:
    """Return a model's versions, the newest first. Raises ManifestInvalid for an invalid id."""
    directory = model_directory(store, model_id)
    newest_first = sorted(list_version_directories(directory), key=sealed_ns, reverse=True)
    return [path.name for path in newest_first]


def usable_versions(store: Path, entry: ModelPlan, model_id: str) -> list[str]:
    """Return the versions that are not refused, the newest first.

    Raises ManifestInvalid for an invalid id.
    """
    refused = list_refused(store, model_id, entry)
    return [each for each in sealed_versions(store, model_id) if each not in refused]


def list_refused(store: Path, model_id: str, entry: ModelPlan) -> frozenset[str]:
    """Return the refused versions that were not sealed again after their refusal."""
    if not entry.refused:
        return frozenset()
    directory = model_directory(store, model_id)
    return frozenset(
        version
        for version, refusal in entry.refused.items()
        if refusal.sealed_ns == sealed_ns(directory / version)
    )


def _default_selector(entry: ModelPlan, model_id: str, configured: Mapping[str, str]) -> str:
    return STABLE if STABLE in entry.aliases else configured.get(model_id, LATEST_NAME)


def _skip_refused(store: Path, entry: ModelPlan, model_id: str, alias: str, version: str) -> str:
    if version not in list_refused(store, model_id, entry):
        return version
    return next(iter(_list_usable_for_alias(store, entry, model_id, alias)), version)


def _list_usable_for_alias(store: Path, entry: ModelPlan, model_id: str, alias: str) -> list[str]:
    """Return the usable versions. Those that `alias` named before come first."""
    usable = usable_versions(store, entry, model_id)
    former = [each for each in entry.former.get(alias, ()) if each in usable]
    return list(dict.fromkeys((*former, *usable)))


def _explain_missing(store: Path, entry: ModelPlan, model_id: str, selector: str) -> str:
    try:
        versions = sealed_versions(store, model_id)
    except ManifestInvalid:
        versions = []
    if not versions:
        return f"Model {model_id} does not exist"
    known = ", ".join(f"`{each}`" for each in (LATEST_NAME, *entry.aliases, *versions[:5]))
    return f"Model {model_id} has no version `{selector}`. It has: {known}"


def _score(client: str, version: str, percent: float) -> float:
    return -percent / math.log(_fraction(f"{version} {client}"))


def _fraction(key: str) -> float:
    """Hash a text to a number between 0 and 1, both excluded."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # The sum has at most 53 significant bits, so a float represents it exactly.
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52
