"""What a family makes of a checkpoint: its graphs, not yet saved, and their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_artifacts.decoders.written.graph import GraphWriter
from build_artifacts.decoders.written.memory import HeadShape

Config = Any  # a transformers config


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """The graphs of one model."""

    decoder: GraphWriter
    encoder: GraphWriter | None = None  # of a model that reads a source first
    layers: int  # of the decoder
    shape: HeadShape  # of the decoder
    vocabulary: int


# Reads config.json and the weights. Raises UnsupportedModel.
Family = Callable[[Config, Path], Drafts]
