"""The model families that the compiler builds: one file and one line of `FAMILIES` each."""

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.families.base import ModelFamily
from build_artifacts.families.decoder import DecoderFamily
from build_artifacts.families.encoder import EncoderFamily
from build_artifacts.families.encoder_decoder import EncoderDecoderFamily

# The first family that matches builds the model.
FAMILIES: list[ModelFamily] = [EncoderDecoderFamily(), DecoderFamily(), EncoderFamily()]


def find_family(metadata: CheckpointMetadata) -> ModelFamily:
    for family in FAMILIES:
        if family.matches(metadata):
            return family
    raise AssertionError(f"bug: no model family matches head {metadata.head}")
