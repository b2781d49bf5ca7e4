"""Encoder-decoder models: T5, BART and their relatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.families.base import Attempt, BuildContext
from build_artifacts.families.decoder import DecoderBuild, cached_reference, check_options
from build_artifacts.recipes import DecoderRecipe


class EncoderDecoderFamily:
    def matches(self, metadata: CheckpointMetadata) -> bool:
        config = metadata.generation_config
        return config is not None and config.encoder_decoder is not None

    def start(self, context: BuildContext) -> EncoderDecoderBuild:
        check_options(context)
        return EncoderDecoderBuild(context, cached_reference(context))


class EncoderDecoderBuild(DecoderBuild):
    def attempts(self, recipe: DecoderRecipe) -> Iterator[Attempt[DecoderRecipe]]:
        """The attempts of a decoder with a float KV cache: int8 does not cover cross-attention."""
        return super().attempts(replace(recipe, kv_cache_dtype=None))
