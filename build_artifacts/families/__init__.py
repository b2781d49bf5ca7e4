"""Model families that the compiler builds. Each family has one module and one entry here."""

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.families.base import ModelFamily
from build_artifacts.families.decoder import DecoderFamily
from build_artifacts.families.encoder import EncoderFamily
from build_artifacts.families.encoder_decoder import EncoderDecoderFamily

# The first family that matches builds the model.
FAMILIES: list[ModelFamily] = [EncoderDecoderFamily(), DecoderFamily(), EncoderFamily()]


def find_family(checkpoint: Checkpoint, tasks: tuple[str, ...]) -> ModelFamily:
    """Return the family that builds the checkpoint. `tasks[0]` is the model's main task."""
    for family in FAMILIES:
        if family.matches(checkpoint, tasks):
            return family
    raise AssertionError(f"bug: no model family matches the task {tasks[0]}")


def read_metadata(checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
    """Read the metadata of a checkpoint, in which any adapter is already merged.

    Raises UnsupportedModel if the checkpoint lacks a setting or cannot be built.
    """
    return find_family(checkpoint, tasks).read_metadata(checkpoint, tasks)
