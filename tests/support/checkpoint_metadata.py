"""Metadata of local checkpoints, read as a build with `--task` reads them."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.families import read_metadata
from deployments.artifacts.manifest import ModelSource


def read_checkpoint_metadata(directory: Path, task: str | None = None) -> CheckpointMetadata:
    checkpoint = Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")
    return read_metadata(checkpoint, select_tasks(checkpoint, None, task))
