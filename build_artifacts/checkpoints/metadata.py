"""Model metadata of the manifest, read from the files of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    load_config,
    read_architecture,
    read_max_positions,
)
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    Json,
    check_modules,
    corrupt_file_error,
    read_field,
    read_object,
)
from build_artifacts.checkpoints.decoders import (
    TOKENIZER_CONFIG_NAME,
    check_decoder,
    read_generation_config,
    special_tokens,
)
from build_artifacts.checkpoints.encoder_decoders import (
    UNBOUNDED_TOKENS,
    check_encoder_decoder,
    read_encoder_decoder_config,
    read_vocabulary_size,
)
from build_artifacts.checkpoints.encoders import check_encoder
from build_artifacts.checkpoints.pair_templates import read_pair_template
from build_artifacts.checkpoints.projection import DenseLayer
from build_artifacts.checkpoints.rerankers import (
    LogitScore,
    is_logit_reranker,
    read_logit_score,
    states_use_of_output,
)
from build_artifacts.checkpoints.sentences import (
    Pooling,
    Similarity,
    check_arguments,
    check_lowercasing,
    check_no_default_prompt,
    is_cross_encoder,
    read_embedding_config,
    read_max_seq_length,
    read_transformer_config,
)
from build_artifacts.checkpoints.splade import SpladePooling, read_sparse_config
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.pair_template import PairTemplate
from deployments.artifacts.types import ModelHead, TaskName, TruncationSide
from deployments.tasks import find_head

# Default mask tokens of transformers' tokenizer classes. Old checkpoints, such as
# bert-base-uncased, do not state the token in their files.
_MASK_TOKENS = ("[MASK]", "<mask>")

# Limit of tokens x vocabulary of a text for a sparse encoder: 0.5 GB of scores in fp32.
MAX_TEXT_SCORES = 1 << 27

ProblemType = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """Fields of the manifest that the checkpoint determines."""

    tasks: tuple[str, ...]
    architecture: str
    max_tokens: int
    truncation_side: TruncationSide = "right"  # side of a long text that the tokenizer removes
    output_width: int  # values per output row: embedding size, labels, 2 span ends or vocabulary
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    pooling: Pooling | None = None
    splade: SpladePooling | None = None  # head SPARSE only
    logit_score: LogitScore | None = None  # of a decoder that ranks texts, head LABELS only
    projection: tuple[DenseLayer, ...] = ()  # layers to apply to the pooled vectors
    token_width: int | None = None  # values per token vector; None: `output_width`
    normalize: bool = False
    default_dimensions: int | None = None  # values that a vector keeps by default; None: all
    similarity: Similarity = "cosine"
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    pair_template: PairTemplate | None = None  # None: the tokenizer joins pairs
    mask_token: int | None = None  # token id, head MASKS only
    has_token_types: bool = True  # False: the model gets no `token_type_ids`
    generation_config: GenerationConfig | None = None  # head NEXT_TOKEN only

    @property
    def head(self) -> ModelHead:
        return find_head(self.tasks[0])

    @property
    def loaded_head(self) -> ModelHead:
        """The head of the class that loads the weights: a logit score reads those of a decoder."""
        return self.head if self.logit_score is None else ModelHead.NEXT_TOKEN

    @property
    def required_generation_config(self) -> GenerationConfig:
        """`generation_config`, which every model with the head NEXT_TOKEN has."""
        assert self.generation_config is not None, (
            "bug: NEXT_TOKEN metadata has no generation_config"
        )
        return self.generation_config


def read_encoder_metadata(checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
    """Read the metadata of an encoder checkpoint, in which any adapter is already merged.

    Raises UnsupportedModel if the checkpoint lacks a setting or cannot be built.
    """
    head = find_head(tasks[0])
    if head in (ModelHead.VECTOR, ModelHead.SPARSE):
        # Check before load_config, which may fail for unsupported modules without naming them.
        check_modules(checkpoint.directory, sparse=head is ModelHead.SPARSE)
    config = load_config(checkpoint.weights)
    logit_score = read_logit_score(checkpoint) if is_logit_reranker(checkpoint, tasks[0]) else None
    check_encoder(config, head, pooled=states_use_of_output(checkpoint, tasks[0]))
    if head is ModelHead.VECTOR:
        return _embedding_metadata(checkpoint, config, tasks)
    if head is ModelHead.SPARSE:
        return _sparse_metadata(checkpoint, config, tasks)
    if head is ModelHead.LABELS:
        return _label_metadata(checkpoint, config, tasks, logit_score)
    common = _common_metadata(checkpoint, config, tasks)
    if head is ModelHead.SPAN:
        return replace(common, output_width=2)
    if head is ModelHead.MASKS:
        mask_token = _read_mask_token(checkpoint.weights)
        return replace(common, output_width=config.vocab_size, mask_token=mask_token)
    return replace(common, labels=read_labels(checkpoint.weights, config))


def _common_metadata(
    checkpoint: Checkpoint,
    config: TransformersConfig,
    tasks: tuple[str, ...],
    *,
    limit: int | None = None,
    tokenizer_limit: Json = None,
) -> CheckpointMetadata:
    """Read what all encoders have. The limits are those of `_read_max_tokens`."""
    return CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=_read_max_tokens(checkpoint, config, limit, tokenizer_limit=tokenizer_limit),
        truncation_side=_read_truncation_side(checkpoint.weights),
        output_width=config.num_labels,
        has_token_types=has_token_types(checkpoint.weights),
    )


def _label_metadata(
    checkpoint: Checkpoint,
    config: TransformersConfig,
    tasks: tuple[str, ...],
    logit_score: LogitScore | None,
) -> CheckpointMetadata:
    weights, scores_logits = checkpoint.weights, logit_score is not None
    pair_template = stated_limit = None
    if is_cross_encoder(checkpoint) or tasks[0] == TaskName.TEXT_RANKING:
        check_arguments(weights)
        check_lowercasing(weights)
        stated_limit = read_transformer_config(weights).get("max_seq_length")
        pair_template = read_pair_template(checkpoint, config, required=scores_logits)
        if pair_template is None:
            check_no_default_prompt(checkpoint)
    common = _common_metadata(checkpoint, config, tasks, tokenizer_limit=stated_limit)
    if pair_template is not None and pair_template.end_tokens >= common.max_tokens:
        raise UnsupportedModel(
            f"the text of a pair ends with {pair_template.end_tokens} fixed tokens; the model "
            f"reads {common.max_tokens}",
            hint="correct `max_seq_length` of the module Transformer, or the chat template",
        )
    return replace(
        common,
        output_width=1 if scores_logits else config.num_labels,
        labels=("LABEL_0",) if scores_logits else read_labels(weights, config),
        problem_type="single_label" if scores_logits else _read_problem_type(config),
        logit_score=logit_score,
        pair_template=pair_template,
    )


def read_labels(weights: Path, config: TransformersConfig) -> tuple[str, ...]:
    """Return the labels in id order. Raises UnsupportedModel if an id has no label."""
    ids = range(config.num_labels)
    if not ids or set(ids) != set(config.id2label):
        raise corrupt_file_error(
            weights / CONFIG_NAME, "`id2label` does not name the labels 0, 1, …"
        )
    return tuple(str(config.id2label[i]) for i in ids)


def _read_problem_type(config: TransformersConfig) -> ProblemType:
    # A model with a single label is a regression model only if its config states so. Otherwise the
    # server applies a sigmoid to the logit, as the pipeline of transformers does.
    if config.problem_type == "regression":
        return "regression"
    several = config.problem_type == "multi_label_classification"
    return "multi_label" if several else "single_label"


def read_decoder_metadata(checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
    """Read the metadata of a decoder checkpoint, in which any adapter is already merged.

    Raises UnsupportedModel if the checkpoint lacks a setting or cannot be built.
    """
    config = load_config(checkpoint.weights)
    check_decoder(config)
    max_tokens = _read_max_tokens(checkpoint, config)
    _check_answer_fits(max_tokens)
    return CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=max_tokens,
        output_width=config.vocab_size,
        generation_config=read_generation_config(checkpoint.weights, config),
    )


def read_encoder_decoder_metadata(
    checkpoint: Checkpoint, tasks: tuple[str, ...]
) -> CheckpointMetadata:
    """Read the metadata of an encoder-decoder checkpoint.

    Raises UnsupportedModel if the checkpoint lacks a setting or cannot be built.
    """
    config = load_config(checkpoint.weights)
    check_encoder_decoder(config, tasks[0])
    positions = read_max_positions(config) or UNBOUNDED_TOKENS
    max_tokens = _read_max_tokens(checkpoint, config, positions)
    _check_answer_fits(max_tokens)
    return CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=max_tokens,
        truncation_side=_read_truncation_side(checkpoint.weights),
        output_width=read_vocabulary_size(config),
        generation_config=read_encoder_decoder_config(checkpoint.weights, config, max_tokens),
    )


def _check_answer_fits(max_tokens: int) -> None:
    if max_tokens < 2:
        raise UnsupportedModel(
            "the checkpoint states a maximum of one token, which leaves none for an answer",
            hint="correct `max_position_embeddings` in config.json or `model_max_length` in "
            "tokenizer_config.json",
        )


def _embedding_metadata(
    checkpoint: Checkpoint, config: TransformersConfig, tasks: tuple[str, ...]
) -> CheckpointMetadata:
    embedding = read_embedding_config(checkpoint, config.hidden_size)
    projection = embedding.projection
    max_seq_length = read_max_seq_length(checkpoint.weights)
    return replace(
        _common_metadata(checkpoint, config, tasks, tokenizer_limit=max_seq_length),
        output_width=projection[-1].width if projection else config.hidden_size,
        pooling=embedding.pooling,
        projection=projection,
        token_width=config.hidden_size if projection else None,
        normalize=embedding.normalize,
        default_dimensions=embedding.dimensions,
        similarity=embedding.similarity,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
    )


def _sparse_metadata(
    checkpoint: Checkpoint, config: TransformersConfig, tasks: tuple[str, ...]
) -> CheckpointMetadata:
    sparse = read_sparse_config(checkpoint)
    limit = MAX_TEXT_SCORES // config.vocab_size
    max_seq_length = sparse.max_seq_length
    return replace(
        _common_metadata(checkpoint, config, tasks, limit=limit, tokenizer_limit=max_seq_length),
        output_width=config.vocab_size,
        splade=sparse.pooling,
        similarity="dot",
        prompts=sparse.prompts,
        default_prompt=sparse.default_prompt,
    )


def _read_max_tokens(
    checkpoint: Checkpoint,
    config: TransformersConfig,
    further_limit: int | None = None,
    *,
    tokenizer_limit: Json = None,
) -> int:
    """Return the smallest of the checkpoint's token limits and `further_limit`.

    `tokenizer_limit` replaces the limit of the tokenizer, as in sentence-transformers. All limits
    include special tokens. Raises UnsupportedModel if there is no limit.
    """
    if not _is_limit(tokenizer_limit):
        tokenizer_file = checkpoint.weights / TOKENIZER_CONFIG_NAME
        tokenizer_limit = read_object(tokenizer_file).get("model_max_length")
    limits = (tokenizer_limit, read_max_positions(config), further_limit)
    stated = [int(limit) for limit in limits if limit is not None and _is_limit(limit)]
    if not stated:
        raise UnsupportedModel(
            "the checkpoint states no maximum number of tokens",
            hint="set `model_max_length` in tokenizer_config.json",
        )
    return min(stated)


def _read_truncation_side(weights: Path) -> TruncationSide:
    """Return the side of a long text that transformers removes.

    tokenizer_config.json overrides tokenizer.json. Raises UnsupportedModel for another value.
    """
    path = weights / TOKENIZER_CONFIG_NAME
    side = read_field(path, "truncation_side", str)
    if side is None:
        path = weights / TOKENIZER_NAME
        side = (read_field(path, "truncation", dict) or {}).get("direction", "Right").lower()
    if side not in ("left", "right"):
        raise corrupt_file_error(path, f"the side of the truncation is `{side}`")
    return "left" if side == "left" else "right"


def _is_limit(value: Json) -> bool:
    # Tokenizers without a limit store 10**30.
    return isinstance(value, int | float) and 0 < value < 10**9


def has_token_types(weights: Path) -> bool:
    """Return whether the tokenizer gives a model the type of each token: its segment of a pair.

    Without types, both segments of a pair have type 0, whatever tokenizer.json states.
    """
    path = weights / TOKENIZER_CONFIG_NAME
    if (names := read_field(path, "model_input_names", list)) is not None:
        return "token_type_ids" in names
    # transformers 5 gives general tokenizers this class, and returns no types. transformers 4, with
    # its class PreTrainedTokenizerFast, returned types, so models were trained with them.
    return read_field(path, "tokenizer_class", str) != "TokenizersBackend"


def _read_mask_token(weights: Path) -> int:
    """Return the id of the mask token. Raises UnsupportedModel if the tokenizer's files lack it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME))
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    defaults = [token for token in _MASK_TOKENS if token in special]
    for token in (special_tokens(weights).get("mask_token"), *defaults):
        if token is not None and (token_id := tokenizer.token_to_id(token)) is not None:
            return int(token_id)
    raise UnsupportedModel(
        "the tokenizer's files define no mask token",
        hint='set `mask_token` in tokenizer_config.json, such as "[MASK]"',
    )
