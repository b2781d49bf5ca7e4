"""Configuration files of sparse encoders: SPLADE models of sentence-transformers.

Formal et al., "SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval" (2021). The
activation log1p_relu is that of Shen et al., "Exploring l0 Sparsification for Inference-free Sparse
Retrievers" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    Json,
    SentenceModule,
    read_modules,
    read_object,
)
from build_artifacts.checkpoints.sentences import (
    read_max_seq_length,
    read_prompts,
    read_transformer_config,
)
from build_artifacts.errors import UnsupportedModel

T = TypeVar("T", bound=str)

PoolingStrategy = Literal["max", "sum"]
ScoreActivation = Literal["relu", "log1p_relu"]


@dataclass(frozen=True, slots=True)
class SpladePooling:
    """How the scores of the vocabulary at the tokens of a text become one weight per entry.

    Each score x becomes log(1 + relu(x)), with log1p_relu the log(1 + ...) of this again. The
    weight is the maximum or the sum over the tokens. The defaults are those of SPLADE v2.
    """

    strategy: PoolingStrategy = "max"
    activation: ScoreActivation = "relu"


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Pooling, maximum length and prompts of a sparse encoder."""

    pooling: SpladePooling = field(default_factory=SpladePooling)
    max_seq_length: Json = None  # in tokens; None: that of the tokenizer
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None


def read_sparse_config(checkpoint: Checkpoint) -> SparseConfig:
    """Read the config of modules that passed `check_modules`.

    A checkpoint without modules is a masked language model, which gets the pooling of SPLADE v2.
    Raises UnsupportedModel for another pooling, a Transformer that returns no scores, and as
    `read_max_seq_length` and `read_prompts` do.
    """
    modules = read_modules(checkpoint.directory)
    if not modules:
        return SparseConfig()
    transformer, pooling = modules
    _check_returns_scores(transformer, checkpoint.weights)
    prompts, default_prompt = read_prompts(checkpoint)
    return SparseConfig(
        pooling=_read_pooling(checkpoint.module(pooling.path) / CONFIG_NAME),
        max_seq_length=read_max_seq_length(checkpoint.weights, masked_lm=True),
        prompts=tuple(prompts.items()),
        default_prompt=default_prompt,
    )


def _check_returns_scores(module: SentenceModule, weights: Path) -> None:
    is_general = module.class_name == "Transformer"
    if is_general and read_transformer_config(weights).get("transformer_task") is None:
        raise UnsupportedModel(
            "the Transformer module states no `transformer_task`, so that it returns hidden states "
            "instead of the scores that SpladePooling reads",
            hint='set `transformer_task` in sentence_bert_config.json to "fill-mask"',
        )


def _read_pooling(path: Path) -> SpladePooling:
    config = read_object(path)
    default = SpladePooling()
    return SpladePooling(
        strategy=_choose(config, "pooling_strategy", get_args(PoolingStrategy), default.strategy),
        activation=_choose(
            config, "activation_function", get_args(ScoreActivation), default.activation
        ),
    )


def _choose(config: dict[str, Json], name: str, known: Sequence[T], default: T) -> T:
    value = config.get(name, default)
    for choice in known:
        if choice == value:
            return choice
    raise UnsupportedModel(
        f"`{name}` of the SpladePooling module is `{value}`",
        hint=f"use one of: {', '.join(known)}",
    )
