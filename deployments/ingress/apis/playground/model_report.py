"""Report of a model: its candidates, and results of `hundredfold build` and `models report`.

A candidate is one compiled variant of the model, such as `cpu-int8`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from deployments.artifacts.manifest import GENERATION_NAME, ArtifactManifest, Candidate
from deployments.artifacts.store import list_host_files
from deployments.ingress.apis.shared.model_list import describe_source
from deployments.registry import RegisteredModel

log = logging.getLogger("ray.serve.hundredfold")

STAGES_NAME = "report.json"  # written by `hundredfold models report`, one per host
STAGES_KEYS = ("metric", "measured_at", "stages", "unmeasured")
GENERATION_KEYS = ("host", "threads", "throughput")


def build_model_report(model: RegisteredModel) -> dict[str, Any]:
    """Build the report. Blocks on files, so run it in a thread.

    `stages` comes from the newest report of any host. `stages` and `generation` are None if their
    file is missing or damaged.
    """
    reports = list_host_files(model.directory, STAGES_NAME)
    latest = max(reports, key=lambda path: path.stat().st_mtime, default=None)
    manifest = model.manifest
    return {
        "id": model.ref.id,
        "version": model.ref.version,
        "source": describe_source(manifest.source),
        "scores": manifest.scores,
        "candidates": [describe_candidate(manifest, each) for each in manifest.candidates],
        "stages": latest and _read(latest, STAGES_KEYS),
        "generation": _read(model.directory / GENERATION_NAME, GENERATION_KEYS),
    }


def describe_candidate(manifest: ArtifactManifest, candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "device": candidate.device,
        "precision": candidate.precision,
        "engine": candidate.engine,
        "size_bytes": manifest.count_bytes(candidate),
        "parity": candidate.parity.model_dump(),
        "scores": candidate.scores,
    }


def _read(path: Path, keys: tuple[str, ...]) -> Mapping[str, Any] | None:
    """Return `keys` of a JSON file; None if the file is missing or damaged."""
    try:
        content = orjson.loads(path.read_bytes())
        return {key: content[key] for key in keys}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be used: %s", path, error)
        return None
