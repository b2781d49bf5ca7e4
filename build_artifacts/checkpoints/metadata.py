"""Model metadata of the manifest, read from the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from build_artifacts.checkpoints.adapter import Adapter
from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    load_config,
    parse_task_class,
    read_architecture,
    read_max_positions,
)
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    Json,
    check_modules,
    corrupt_file,
    is_splade_model,
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
from build_artifacts.checkpoints.projection import DenseLayer
from build_artifacts.checkpoints.sentences import (
    Pooling,
    Similarity,
    check_arguments,
    check_no_default_prompt,
    is_cross_encoder,
    read_embedding_config,
    read_max_seq_length,
)
from build_artifacts.checkpoints.splade import SpladePooling, read_sparse_config
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.types import TEXT2TEXT_TASKS, ModelHead, TaskName, TruncationSide
from deployments.tasks import find_head, list_task_names
from deployments.tasks.zero_shot import has_entailment_label

EMBEDDING_TASKS = (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY)
# Tasks of a model whose output is one score per text.
LABEL_TASKS = (TaskName.TEXT_CLASSIFICATION, TaskName.TEXT_RANKING)
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
    projection: tuple[DenseLayer, ...] = ()  # layers to apply to the pooled vectors
    token_width: int | None = None  # values per token vector; None: `output_width`
    normalize: bool = False
    default_dimensions: int | None = None  # values that a vector keeps by default; None: all
    similarity: Similarity = "cosine"
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    mask_token: int | None = None  # token id, head MASKS only
    has_token_types: bool = True  # False: the model gets no `token_type_ids`
    generation_config: GenerationConfig | None = None  # head NEXT_TOKEN only

    @property
    def head(self) -> ModelHead:
        return find_head(self.tasks[0])

    @property
    def required_generation_config(self) -> GenerationConfig:
        """`generation_config`, which every model with the head NEXT_TOKEN has."""
        assert self.generation_config is not None, (
            "bug: NEXT_TOKEN metadata has no generation_config"
        )
        return self.generation_config


def select_tasks(
    checkpoint: Checkpoint, adapter: Adapter | None, requested: str | None
) -> tuple[str, ...]:
    """Return the tasks to build: `requested` or the task that the files state, then related tasks.

    Zero-shot classification is built as text classification, because the graphs are equal. The
    server offers both tasks for every classifier with an entailment label. Raises UnsupportedModel
    if the files state no task, or if the adapter or the labels do not fit `requested`.
    """
    task = requested or (adapter.task if adapter else None) or _detect_task(checkpoint)
    if task == TaskName.ZERO_SHOT_CLASSIFICATION:
        _check_entailment(_read_label_names(checkpoint, adapter))
        task = TaskName.TEXT_CLASSIFICATION
    head = find_head(task)
    if adapter is not None and head is not find_head(adapter.task):
        raise UnsupportedModel(
            f"the adapter was trained for {adapter.task}, not for {task}", hint="omit `--task`"
        )
    if head is ModelHead.VECTOR:
        return EMBEDDING_TASKS if task in EMBEDDING_TASKS else (task, *EMBEDDING_TASKS)
    if task in TEXT2TEXT_TASKS:
        return (task, *(other for other in TEXT2TEXT_TASKS if other != task))
    if head is not ModelHead.LABELS:
        return (task,)
    return _select_label_tasks(task, len(_read_label_names(checkpoint, adapter)))


def _select_label_tasks(task: str, labels: int) -> tuple[str, ...]:
    """Return `task` and, for a model with a single score, the other tasks of LABEL_TASKS.

    Raises UnsupportedModel for ranking with several labels.
    """
    if labels == 1:
        return (task, *(other for other in LABEL_TASKS if other != task))
    if task == TaskName.TEXT_RANKING:
        raise UnsupportedModel(
            f"ranking requires a model with 1 score; this model has {labels} labels",
            hint="omit `--task`",
        )
    return (task,)


def _check_entailment(labels: Sequence[str]) -> None:
    if not has_entailment_label(labels):
        shown = ", ".join(f"`{label}`" for label in labels[:3]) + (", …" if len(labels) > 3 else "")
        raise UnsupportedModel(
            f"zero-shot classification requires an entailment label; the labels are {shown}",
            hint="omit `--task`, or rename the label that means entailment in `id2label` of "
            "config.json",
        )


def _read_label_names(checkpoint: Checkpoint, adapter: Adapter | None) -> tuple[str, ...]:
    if adapter is not None and adapter.labels:
        return adapter.labels
    config = checkpoint.weights / CONFIG_NAME
    if named := read_field(config, "id2label", dict):
        return tuple(str(label) for label in named.values())
    count = read_field(config, "num_labels", int) or 2  # transformers' default
    return tuple(f"LABEL_{i}" for i in range(count))


def _detect_task(checkpoint: Checkpoint) -> TaskName:
    if is_cross_encoder(checkpoint):
        ranks = len(_read_label_names(checkpoint, None)) == 1
        return TaskName.TEXT_RANKING if ranks else TaskName.TEXT_CLASSIFICATION
    if (checkpoint.directory / MODULES_NAME).is_file():
        is_sparse = is_splade_model(checkpoint.directory)
        return TaskName.SPARSE_EMBEDDINGS if is_sparse else TaskName.FEATURE_EXTRACTION
    architectures = read_field(checkpoint.weights / CONFIG_NAME, "architectures", list)
    architecture = str((architectures or [""])[0])
    if (task := parse_task_class(architecture)) is not None:
        return task
    raise UnsupportedModel(
        f"no task matches the architecture `{architecture or 'none'}`",
        hint=f"pass `--task`, one of: {', '.join(list_task_names())}",
    )


def read_encoder_metadata(checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
    """Read the metadata of an encoder checkpoint, in which any adapter is already merged.

    Raises UnsupportedModel if the checkpoint lacks a setting or cannot be built.
    """
    head = find_head(tasks[0])
    if head in (ModelHead.VECTOR, ModelHead.SPARSE):
        # Check before load_config, which may fail for unsupported modules without naming them.
        check_modules(checkpoint.directory, sparse=head is ModelHead.SPARSE)
    config = load_config(checkpoint.weights)
    pooled = (checkpoint.directory / MODULES_NAME).is_file() and head is ModelHead.VECTOR
    check_encoder(config, head, pooled=pooled)
    if head is ModelHead.VECTOR:
        return _embedding_metadata(checkpoint, config, tasks)
    if head is ModelHead.SPARSE:
        return _sparse_metadata(checkpoint, config, tasks)
    common = CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=_read_max_tokens(checkpoint, config),
        truncation_side=_read_truncation_side(checkpoint.weights),
        output_width=config.num_labels,
        has_token_types=has_token_types(checkpoint.weights),
    )
    if head is ModelHead.SPAN:
        return replace(common, output_width=2)
    if head is ModelHead.MASKS:
        mask_token = _read_mask_token(checkpoint.weights)
        return replace(common, output_width=config.vocab_size, mask_token=mask_token)
    if head is ModelHead.LABELS and is_cross_encoder(checkpoint):
        check_arguments(checkpoint.weights)
        check_no_default_prompt(checkpoint)
    return replace(
        common,
        labels=read_labels(checkpoint.weights, config),
        problem_type=_read_problem_type(config) if head is ModelHead.LABELS else None,
    )


def read_labels(weights: Path, config: TransformersConfig) -> tuple[str, ...]:
    """Return the labels in id order. Raises UnsupportedModel if an id has no label."""
    ids = range(config.num_labels)
    if not ids or set(ids) != set(config.id2label):
        raise corrupt_file(weights / CONFIG_NAME, "`id2label` does not name the labels 0, 1, …")
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
    return CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=_read_max_tokens(checkpoint, config),
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
    return CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=max_tokens,
        truncation_side=_read_truncation_side(checkpoint.weights),
        output_width=read_vocabulary_size(config),
        generation_config=read_encoder_decoder_config(checkpoint.weights, config, max_tokens),
    )


def _embedding_metadata(
    checkpoint: Checkpoint, config: TransformersConfig, tasks: tuple[str, ...]
) -> CheckpointMetadata:
    embedding = read_embedding_config(checkpoint, config.hidden_size)
    projection = embedding.projection
    max_seq_length = read_max_seq_length(checkpoint.weights)
    return CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=_read_max_tokens(checkpoint, config, tokenizer_limit=max_seq_length),
        truncation_side=_read_truncation_side(checkpoint.weights),
        output_width=projection[-1].width if projection else config.hidden_size,
        has_token_types=has_token_types(checkpoint.weights),
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
    return CheckpointMetadata(
        tasks=tasks,
        architecture=read_architecture(config),
        max_tokens=_read_max_tokens(
            checkpoint, config, limit, tokenizer_limit=sparse.max_seq_length
        ),
        truncation_side=_read_truncation_side(checkpoint.weights),
        output_width=config.vocab_size,
        has_token_types=has_token_types(checkpoint.weights),
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
        raise corrupt_file(path, f"the side of the truncation is `{side}`")
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
