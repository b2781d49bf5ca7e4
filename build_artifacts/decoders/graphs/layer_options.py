"""Options of `DecoderVariant`: norms, positions, factors and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.decoders.graphs.config_flags import ConfigFactor, LayerFactor
from build_artifacts.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Norms of a layer: modules before and after its attention and its MLP, None without a norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    # Whether the norms "after" apply to the sum with the input, instead of what is added to it.
    after_sums: bool = False


PRE_NORMS = LayerNorms()
POST_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
SHARED_NORM = LayerNorms(before_mlp="input_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPositions:
    """Table of positions, whose rows are added to the embeddings of the tokens."""

    first: int = 0  # row of the first token
    # Computes the table, [rows, D]. None: the checkpoint has it.
    compute: Callable[[TransformersConfig], FloatArray] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors that the config of a variant has, None without a factor."""

    embeddings: ConfigFactor | None = None
    scores: LayerFactor | None = None  # of the attention; None: 1 / sqrt(head size)
    layers: ConfigFactor | None = None  # of what attention and MLP add to their input
    logits: ConfigFactor | None = None
    # Of queries, by their positions [P]: [P]. Raises UnsupportedModel.
    queries: Callable[[TransformersConfig, NDArray[np.int64]], FloatArray] | None = None


NO_FACTORS = Factors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Config fields with limits, None without one. The value of a field may be None, too."""

    projections: str | None = None  # of queries, keys and values, which are clipped
    scores: str | None = None  # of the attention; it and the next one are soft caps
    logits: str | None = None


NO_LIMITS = Limits()
