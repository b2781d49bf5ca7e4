"""`hundredfold models ls`: every version of a store, with its candidates. Needs no torch.

It verifies the digest of every file. deployments/management/listing.py describes one model for its
operators, with shares of requests and the last build, and reads only the manifests.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments.artifacts.manifest import PERPLEXITY, ArtifactManifest, Candidate
from deployments.artifacts.store import (
    LATEST_NAME,
    list_artifacts,
    read_model_id,
    resolve_version,
)
from deployments.errors import ArtifactError, BadSetting
from deployments.plan.plan import Plan
from deployments.plan.plan_file import read_plan
from deployments.plan.resolution import list_refused
from deployments.terminal.command_line import OK, show_activity
from deployments.terminal.console import add_json_option, add_store_option, format_table, print_json

_HEADER = ("MODEL", "VERSION", "TASKS", "CANDIDATE", "MB", "PARITY", "SOURCE")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One version in a store."""

    id: str
    version: str
    is_latest: bool
    aliases: tuple[str, ...]  # aliases of this version, from the store's plan
    refused: str  # why the plan refuses to serve the version; empty if it does not
    manifest: ArtifactManifest | ArtifactError  # ArtifactError: the version is damaged

    def to_json(self) -> dict[str, object]:
        value: dict[str, object] = {
            "id": self.id,
            "version": self.version,
            "is_latest": self.is_latest,
            "aliases": list(self.aliases),
            "refused": self.refused,
        }
        if isinstance(self.manifest, ArtifactError):
            return value | {"error": self.manifest.message}
        return value | {
            "tasks": list(self.manifest.tasks),
            "source": self.manifest.source.ref,
            "candidates": [candidate.name for candidate in self.manifest.candidates],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_option(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    entries = list_versions(arguments.store)
    if arguments.json:
        return print_json([entry.to_json() for entry in entries])
    if entries:
        print(table(entries))
    else:
        print(f"no artifacts in {arguments.store}; `hundredfold demo` builds some")
    return OK


def list_versions(store: Path) -> list[StoreEntry]:
    """List the versions of a store, sorted by id and version. Verify the digest of every file.

    Raises BadSetting if the store or its plan cannot be read.
    """
    if not store.exists():
        return []
    plan, entries = read_plan(store), []
    try:
        directories = list_artifacts(store)
    except OSError as exc:
        raise BadSetting(
            f"cannot read the store {store}: {exc.strerror or exc}. Check its permissions, or pass "
            "another `--store DIR`"
        ) from exc
    with show_activity("verifying digests") as show:
        for number, directory in enumerate(directories, start=1):
            show(f"verifying digests: {number} of {len(directories)} versions")
            entries.append(_describe(store, plan, directory))
    return entries


def _describe(store: Path, plan: Plan, directory: Path) -> StoreEntry:
    model_id, version = read_model_id(directory.parent), directory.name
    manifest: ArtifactManifest | ArtifactError
    try:
        manifest = ArtifactManifest.read(directory)
    except ArtifactError as exc:
        manifest = exc
    entry = plan.find(model_id)
    is_refused = version in list_refused(store, model_id, entry)
    return StoreEntry(
        model_id,
        version,
        is_latest=version == _latest(store, model_id),
        aliases=tuple(alias for alias, each in entry.aliases.items() if each == version),
        refused=entry.refused[version].reason if is_refused else "",
        manifest=manifest,
    )


def _latest(store: Path, model_id: str) -> str | None:
    try:
        return resolve_version(store, model_id, LATEST_NAME)
    except ArtifactError:
        return None


def table(entries: Sequence[StoreEntry]) -> str:
    """Format a line per candidate. `*` marks the latest version. Aliases follow the version."""
    return format_table([_HEADER, *(row for entry in entries for row in _rows(entry))])


def _rows(entry: StoreEntry) -> Iterator[tuple[str, ...]]:
    version = " ".join((entry.version, *("*" if entry.is_latest else ""), *entry.aliases))
    manifest = entry.manifest
    if isinstance(manifest, ArtifactError):
        yield entry.id, version, f"damaged ({manifest.code})", "", "", "", manifest.message
        return
    source = manifest.source
    origin = source.ref + (f" + {source.adapter}" if source.adapter else "")
    if entry.refused:
        yield entry.id, version, "refused", "", "", "", entry.refused
        version = ""
    first = (entry.id if version else "", version, ", ".join(manifest.tasks))
    for candidate in manifest.candidates:
        size = f"{manifest.count_bytes(candidate) / 1e6:.1f}"
        yield *first, candidate.name, size, _parity(candidate), origin
        first, origin = ("", "", ""), ""


def _parity(candidate: Candidate) -> str:
    parity = candidate.parity
    if PERPLEXITY in candidate.scores:
        perplexity = f"perplexity {candidate.scores[PERPLEXITY]:.2f}"
        return f"{perplexity}, next tokens {parity.top1_agreement or 0:.1%}"
    labels = "" if parity.top1_agreement is None else f", labels {parity.top1_agreement:.1%}"
    return (
        f"cosine {parity.cosine_mean:.4f} mean {parity.cosine_worst:.4f} worst, "
        f"{parity.batched_cosine_worst:.4f} batched{labels}"
    )
