"""What the manifest says of a model, read from its own files and never guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from build_artifacts.adapter import Adapter
from build_artifacts.checkpoint import (
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    Json,
    read_json,
    read_object,
)
from build_artifacts.errors import UnsupportedModel
from deployments.manifest import TOKENIZER_NAME, TaskName

EMBEDDING_TASKS = (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY)

Pooling = Literal["mean", "cls"]
Problem = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The part of a manifest that describes the model rather than the build."""

    tasks: tuple[TaskName, ...]
    architecture: str
    max_tokens: int
    width: int
    labels: tuple[str, ...] = ()
    problem: Problem | None = None
    pooling: Pooling | None = None
    normalize: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None

    @property
    def is_embedding(self) -> bool:
        """Whether rows are embeddings rather than scores of labels."""
        return self.tasks == EMBEDDING_TASKS


def tasks_of(
    checkpoint: Checkpoint, adapter: Adapter | None, asked: TaskName | None
) -> tuple[TaskName, ...]:
    """The tasks to build for: those asked for, else what the files say. Raises UnsupportedModel."""
    task = asked or (adapter.task if adapter else None) or _own_task(checkpoint)
    if adapter is not None and task not in _tasks_with(adapter.task):
        raise UnsupportedModel(
            f"the adapter was trained for {adapter.task}, not for {task}", hint="leave out `--task`"
        )
    return _tasks_with(task)


def _tasks_with(task: TaskName) -> tuple[TaskName, ...]:
    return EMBEDDING_TASKS if task in EMBEDDING_TASKS else (task,)


def _own_task(checkpoint: Checkpoint) -> TaskName:
    if (checkpoint.directory / MODULES_NAME).is_file():
        return TaskName.FEATURE_EXTRACTION
    config = read_object(checkpoint.weights / CONFIG_NAME)
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        return TaskName.TEXT_CLASSIFICATION
    if architecture.endswith("Model"):
        return TaskName.FEATURE_EXTRACTION
    raise UnsupportedModel(
        f"cannot tell a task from the architecture `{architecture or 'none'}`",
        hint=f"pass `--task`, one of: {', '.join(TaskName)}",
    )


def read_facts(checkpoint: Checkpoint, tasks: tuple[TaskName, ...]) -> ModelFacts:
    """What a merged checkpoint says of itself. Raises UnsupportedModel."""
    config = _load_config(checkpoint.weights)
    if not _is_encoder(config):
        raise UnsupportedModel(
            f"`{config.model_type}` is not an encoder", hint="this release builds encoders only"
        )
    read = _embedding_facts if tasks == EMBEDDING_TASKS else _classifier_facts
    return read(checkpoint, config, tasks)


def _is_encoder(config: Any) -> bool:
    from transformers.models.auto import modeling_auto as known

    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        return False
    # BERT and its kin are in both tables: they can be used as decoders.
    masked = config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return masked or config.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _load_config(weights: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(weights, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as exc:
        raise UnsupportedModel(
            f"`{CONFIG_NAME}` is of a kind transformers does not know: {str(exc).splitlines()[0]}",
            hint="only architectures that are part of transformers can be built",
        ) from exc


def _classifier_facts(
    checkpoint: Checkpoint, config: Any, tasks: tuple[TaskName, ...]
) -> ModelFacts:
    problem: Problem = "single_label"
    if config.num_labels == 1 or config.problem_type == "regression":
        problem = "regression"
    elif config.problem_type == "multi_label_classification":
        problem = "multi_label"
    return ModelFacts(
        tasks=tasks,
        architecture=_architecture(config),
        max_tokens=_max_tokens(checkpoint, config, sentence_limit=False),
        width=config.num_labels,
        labels=tuple(str(config.id2label[i]) for i in range(config.num_labels)),
        problem=problem,
    )


def _embedding_facts(
    checkpoint: Checkpoint, config: Any, tasks: tuple[TaskName, ...]
) -> ModelFacts:
    modules = _modules(checkpoint)
    spoken = read_object(checkpoint.directory / "config_sentence_transformers.json")
    prompts = dict(spoken.get("prompts") or {})
    pooling: Pooling = "mean"
    if "Pooling" in modules:
        pooling = _pooling(checkpoint.module(modules["Pooling"]) / CONFIG_NAME, bool(prompts))
    return ModelFacts(
        tasks=tasks,
        architecture=_architecture(config),
        max_tokens=_max_tokens(checkpoint, config, sentence_limit=True),
        width=config.hidden_size,
        pooling=pooling,
        normalize="Normalize" in modules,
        prompts=tuple((str(name), str(text)) for name, text in prompts.items()),
        default_prompt=spoken.get("default_prompt_name"),
    )


def _architecture(config: Any) -> str:
    return str((config.architectures or [config.model_type])[0])


def _modules(checkpoint: Checkpoint) -> dict[str, str]:
    """Directory of each sentence-transformers module by its kind."""
    kinds: dict[str, str] = {}
    for module in read_json(checkpoint.directory / MODULES_NAME, default=[]):
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UnsupportedModel(
                f"`{MODULES_NAME}` has a module `{kind}`",
                hint="supported: Transformer, Pooling, Normalize",
            )
        kinds[kind] = str(module["path"])
    return kinds


def _pooling(path: Path, has_prompts: bool) -> Pooling:
    config = read_object(path)
    if has_prompts and config.get("include_prompt") is False:
        raise UnsupportedModel(
            "pooling leaves out the prompt's tokens (`include_prompt`)",
            hint="this release pools over all tokens",
        )
    named = {str(config["pooling_mode"])} if "pooling_mode" in config else set()
    flags = {k.removeprefix("pooling_mode_") for k, v in config.items() if v is True}
    chosen = (named | flags) - {"include_prompt"}
    if chosen in ({"mean_tokens"}, {"mean"}):
        return "mean"
    if chosen in ({"cls_token"}, {"cls"}):
        return "cls"
    raise UnsupportedModel(
        f"pooling by {' and '.join(sorted(chosen)) or 'nothing'}", hint="supported: mean, cls"
    )


def _max_tokens(checkpoint: Checkpoint, config: Any, *, sentence_limit: bool) -> int:
    """The longest input in tokens, special tokens included: the tightest of the stated limits."""
    tokenizer = read_object(checkpoint.weights / "tokenizer_config.json")
    limits = [tokenizer.get("model_max_length"), _positions(config)]
    if sentence_limit:
        sentence = read_object(checkpoint.weights / "sentence_bert_config.json")
        limits.append(sentence.get("max_seq_length"))
        if sentence.get("do_lower_case"):
            _check_lowercases(checkpoint.weights)
    stated = [int(limit) for limit in limits if limit is not None and _is_limit(limit)]
    if not stated:
        raise UnsupportedModel(
            "the checkpoint does not say how many tokens it reads",
            hint="set `model_max_length` in tokenizer_config.json",
        )
    return min(stated)


def _is_limit(value: Json) -> bool:
    # Tokenizers without a limit of their own write 10**30.
    return isinstance(value, int | float) and 0 < value < 10**9


# Models whose positions start after the padding id, as RoBERTa's do.
_POSITIONS_AFTER_PADDING: dict[str, Callable[[Any], int]] = {
    "mpnet": lambda _: 2,  # fixed in its code, whatever the file says
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm",
         "data2vec-text", "longformer", "xmod", "esm", "ibert", "luke", "markuplm"),
        lambda config: int(config.pad_token_id) + 1,
    ),
}  # fmt: skip


def _positions(config: Any) -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    skipped = _POSITIONS_AFTER_PADDING.get(config.model_type)
    return positions - skipped(config) if positions and skipped else positions


def _check_lowercases(weights: Path) -> None:
    from tokenizers import Tokenizer

    normalizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME)).normalizer
    if normalizer is None or normalizer.normalize_str("A") != "a":
        raise UnsupportedModel(
            "sentence-transformers lowercases the text before this tokenizer sees it",
            hint=f"put a Lowercase normalizer into `{TOKENIZER_NAME}`",
        )
