"""Decoders that rank texts: the score of a text is how likely the decoder answers "yes".

sentence-transformers 5.4 describes such a model by the modules Transformer and LogitScore, and by a
chat template that renders the roles `query` and `document`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from build_artifacts.checkpoints.architectures import parse_task_class, read_model_class
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    corrupt_file_error,
    read_field,
    read_modules,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.types import ModelHead, TaskName
from deployments.tasks import find_head

LOGIT_SCORE = "LogitScore"
# Answers of a checkpoint without the module LogitScore, as in sentence-transformers.
_TRUE_ANSWER, _FALSE_ANSWER = "yes", "no"


@dataclass(frozen=True, slots=True)
class LogitScore:
    """Ids of the tokens whose logits after the last token of a text make its score."""

    true_token: int
    false_token: int | None  # the score is the difference of both logits; None: the first alone

    @property
    def tokens(self) -> tuple[int, ...]:
        return (
            (self.true_token,) if self.false_token is None else (self.true_token, self.false_token)
        )


def is_logit_reranker(checkpoint: Checkpoint, task: str) -> bool:
    """Return whether `task` is ranking, and the checkpoint a decoder that generates text."""
    return task == TaskName.TEXT_RANKING and (
        parse_task_class(read_model_class(checkpoint.weights)) is TaskName.TEXT_GENERATION
    )


def states_use_of_output(checkpoint: Checkpoint, task: str) -> bool:
    """Return whether the checkpoint states how `task` uses the output of a decoder.

    This is a pooling of its token vectors, or a score from its logits.
    """
    is_pooled = (checkpoint.directory / MODULES_NAME).is_file()
    is_vector = find_head(task) is ModelHead.VECTOR
    return (is_pooled and is_vector) or is_logit_reranker(checkpoint, task)


def check_score_modules(checkpoint: Checkpoint, task: str) -> None:
    """Raise UnsupportedModel for a module that changes the labels or the score of `task`.

    The build computes labels and scores with the model class, or from the logits of a decoder. It
    would skip further modules, such as a Dense layer or a head.
    """
    supported = ["Transformer"]
    if is_logit_reranker(checkpoint, task):
        supported.append(LOGIT_SCORE)
    names = [module.class_name for module in read_modules(checkpoint.directory)]
    for name, expected in zip_longest(names, supported):
        if name not in (None, expected):
            raise UnsupportedModel(
                f"`{MODULES_NAME}` has the module `{name}`, which no build for {task} applies",
                hint=f"supported: {', '.join(supported)}",
            )


def read_logit_score(checkpoint: Checkpoint) -> LogitScore:
    """Read the module LogitScore or, without modules, find the tokens `yes` and `no`.

    Raises UnsupportedModel for other modules, for a damaged config, or a tokenizer without the
    tokens.
    """
    check_score_modules(checkpoint, TaskName.TEXT_RANKING)
    modules = read_modules(checkpoint.directory)
    if len(modules) < 2:
        return _find_answers(checkpoint)
    config = checkpoint.module(modules[1].path) / CONFIG_NAME
    source = read_field(config, "module_input_name", str)
    if source not in (None, "causal_logits"):
        raise UnsupportedModel(
            f"the module {LOGIT_SCORE} reads `{source}`",
            hint="use a model whose score is that of its logits, `causal_logits`",
        )
    true_token = _read_token(config, "true_token_id")
    if true_token is None:
        raise corrupt_file_error(config, "no `true_token_id`")
    return LogitScore(true_token, _read_token(config, "false_token_id"))


def _read_token(config: Path, name: str) -> int | None:
    value = read_field(config, name, int)
    if value is not None and (isinstance(value, bool) or value < 0):
        raise corrupt_file_error(config, f"`{name}` is {value}")
    return value


def _find_answers(checkpoint: Checkpoint) -> LogitScore:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint.weights / TOKENIZER_NAME))
    true_token, false_token = map(tokenizer.token_to_id, (_TRUE_ANSWER, _FALSE_ANSWER))
    if true_token is None or false_token is None:
        raise UnsupportedModel(
            f"the tokenizer has no tokens `{_TRUE_ANSWER}` and `{_FALSE_ANSWER}`, whose logits "
            "would make the score of a text",
            hint=f"add the module {LOGIT_SCORE} of sentence-transformers with the ids of the "
            "tokens that the model answers",
        )
    return LogitScore(true_token, false_token)
