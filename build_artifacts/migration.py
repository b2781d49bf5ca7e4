"""Migration of a store: rewrite of all manifests that have the previous schema.

deployments/artifacts/migration.py converts a single manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest, has_previous_schema
from deployments.artifacts.store import list_artifacts
from deployments.files import write_atomically


def migrate_manifests(store: Path) -> Iterator[Path]:
    """Rewrite manifests of the previous schema in the present schema. Yield their directories.

    The other files and the modification time of the manifest stay unchanged. Raises ArtifactError
    for a damaged artifact, or OSError.
    """
    for directory in list_artifacts(store):
        path = directory / MANIFEST_NAME
        if not path.is_file() or not has_previous_schema(directory):
            continue
        manifest, stat = ArtifactManifest.read(directory), path.stat()
        write_atomically(path, manifest.to_json())
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        yield directory
