"""Note on weights of layers that a model does not use, which a build would drop silently."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import find_unused_layers
from build_artifacts.workspaces.step_runner import StepRunner


def report_unused_layers(steps: StepRunner, weights: Path, metadata: CheckpointMetadata) -> None:
    """Name the first weight of a layer that the model does not use, if there is one."""
    config = metadata.generation_config
    has_encoder = config is not None and config.encoder_decoder is not None
    unused = find_unused_layers(weights, head=metadata.loaded_head, has_encoder=has_encoder)
    if unused:
        others = f" and {len(unused) - 1} others" if unused[1:] else ""
        steps.report(
            f"weights of the checkpoint without effect, in layers that its model does not have: "
            f"`{unused[0]}`{others}"
        )
