"""`hundredfold models migrate`: rewrite of a store's manifests that have the previous schema.

deployments/artifacts/migration.py converts a single manifest. The command imports no compiler: the
images for Kubernetes have none, and there only a pod with such an image can write to the store.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.models.store_check import check_store_exists
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest, has_previous_schema
from deployments.artifacts.migration import PREVIOUS, SCHEMA
from deployments.artifacts.store import list_artifacts, store_errors
from deployments.files import write_atomically
from deployments.terminal.console import add_store_option, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_option(parser)


def run(arguments: argparse.Namespace) -> int:
    check_store_exists(arguments.store)
    migrated = 0
    for directory in migrate_manifests(arguments.store):
        print(f"{directory}: schema {PREVIOUS} -> {SCHEMA}", flush=True)
        migrated += 1
    return print_text(f"{migrated} manifests migrated")


def migrate_manifests(store: Path) -> Iterator[Path]:
    """Rewrite manifests of the previous schema in the present schema. Yield their directories.

    The other files and the modification time of the manifest stay unchanged. Raises ArtifactError
    for a damaged artifact, or StoreNotWritable if a file cannot be read or written.
    """
    with store_errors(store, "migrate"):
        directories = list_artifacts(store)
    for directory in directories:
        with store_errors(store, "migrate"):
            is_migrated = _migrate(directory)
        if is_migrated:
            yield directory


def _migrate(directory: Path) -> bool:
    """Rewrite the manifest in `directory`. Return False if there is no previous schema."""
    path = directory / MANIFEST_NAME
    if not path.is_file() or not has_previous_schema(directory):
        return False
    manifest, stat = ArtifactManifest.read(directory), path.stat()
    write_atomically(path, manifest.to_json())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return True
