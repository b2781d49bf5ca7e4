"""Encoder-decoder models: T5, BART and their relatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.encoder_decoders import find_unsupported_settings
from build_artifacts.checkpoints.metadata import CheckpointMetadata, read_encoder_decoder_metadata
from build_artifacts.families.base import Attempt, BuildContext
from build_artifacts.families.decoder import (
    DecoderBuild,
    cached_reference,
    check_options,
    report_ineffective,
)
from build_artifacts.recipes import DecoderRecipe
from deployments.artifacts.types import TEXT2TEXT_TASKS


class EncoderDecoderFamily:
    def matches(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> bool:
        return tasks[0] in TEXT2TEXT_TASKS

    def read_metadata(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
        return read_encoder_decoder_metadata(checkpoint, tasks)

    def start(self, context: BuildContext) -> EncoderDecoderBuild:
        check_options(context)
        config = load_config(context.weights)
        report_ineffective(context, find_unsupported_settings(context.weights, config))
        return EncoderDecoderBuild(context, cached_reference(context))


class EncoderDecoderBuild(DecoderBuild):
    def attempts(self, recipe: DecoderRecipe) -> Iterator[Attempt[DecoderRecipe]]:
        """Yield the attempts of a decoder, with a float KV cache.

        The int8 KV cache does not support cross-attention.
        """
        return super().attempts(replace(recipe, kv_cache_dtype=None))
