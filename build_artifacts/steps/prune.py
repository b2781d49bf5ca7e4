"""Pruning of a checkpoint: the same files with other weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import copy_without_weights
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import load_model
from build_artifacts.compaction.find import find
from build_artifacts.pruning.prune import prune
from deployments.messages import TokenizedItem


def prune_checkpoint(
    weights: Path,
    metadata: CheckpointMetadata,
    fraction: float,
    items: Sequence[TokenizedItem],
    into: Path,
) -> str:
    """Write the pruned checkpoint of `weights` to `into`. Return what compaction can remove.

    Pruned parts are zero. The shapes are unchanged, so any tool can load the result. Raises
    UnsupportedModel if the model cannot be loaded or pruned.
    """
    model = load_model(weights, head=metadata.head, dtype="float32")
    prune(model, fraction, metadata, items)
    model.save_pretrained(into)
    # Copy last, to replace the saved config.json, which may name another class.
    copy_without_weights(weights, into, weights=weights)
    return find(model).describe()
