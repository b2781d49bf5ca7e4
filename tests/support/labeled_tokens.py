"""A token classification model with given logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.tasks.base import DecodeContext
from deployments.tasks.token_classification import TokenClassification
from deployments.tokenization.vocabulary import TokenVocabulary
from deployments.tokenization.windows import WindowTokenizer
from tests.support.artifacts import MAX_TOKENS, tiny_manifest

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
MANIFEST = tiny_manifest(labels=LABELS)
TASK = TokenClassification()

Scores = Mapping[str, float] | str  # scores of a token by label, or the label with score 0.9


def ask(
    directory: Path,
    inputs: str | list[str],
    tokens: list[list[Scores]] | None = None,
    *,
    most: int = MAX_TOKENS,
    **parameters: Any,
) -> Any:
    """Return the output of the task. `tokens` holds the scores of the tokens of each text.

    Without `tokens`, scores of a token depend on its id only.
    """
    manifest = MANIFEST.model_copy(update={"max_tokens": most})
    parsed = TASK.parse(inputs, parameters, manifest)
    assert parsed.windowing is not None
    windows = [
        window
        for i, text in enumerate(parsed.texts)
        for window in WindowTokenizer(directory, most).windows(
            text, i, parsed.windowing, parsed.truncation
        )[0]
    ]
    rows = [
        _by_token(item.ids) if tokens is None else _logits(tokens[layout.text])
        for item, layout in windows
    ]
    computed = DecodeContext(
        rows=rows,
        items=[item for item, _ in windows],
        token_offsets=[layout for _, layout in windows],
        manifest=manifest,
        vocabulary=TokenVocabulary(directory),
    )
    return TASK.decode(computed, parsed.options)


def _logits(tokens: list[Scores]) -> NDArray[np.float32]:
    """Return logits [T, labels]. Special tokens get B-PER, which must not reach the output."""
    return np.log(np.array([_row("B-PER"), *map(_row, tokens), _row("B-PER")], dtype=np.float32))


def _row(scores: Scores) -> list[float]:
    given = {scores: 0.9} if isinstance(scores, str) else scores
    rest = (1 - sum(given.values())) / (len(LABELS) - len(given))
    return [given.get(label, rest) for label in LABELS]


def _by_token(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    table = np.random.default_rng(3).standard_normal((1000, len(LABELS)), dtype=np.float32)
    return table[ids]


def spans(groups: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(group["entity_group"], group["word"]) for group in groups]
