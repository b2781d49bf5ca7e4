from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.tasks import EMBEDDING_TASKS
from build_artifacts.encoders import probes
from build_artifacts.encoders.probes import MASKED_PROBE_TOKENS, PAIRS, PROBES, tokenize_probes
from deployments.artifacts.types import TaskName
from tests.support.tiny_encoders import SPECIAL_TOKENS, tiny_tokenizer

MAX_TOKENS = 200
MASK = SPECIAL_TOKENS.index("[MASK]")


def metadata(*tasks: TaskName, width: int = 8, mask_token: int | None = None) -> CheckpointMetadata:
    return CheckpointMetadata(
        tasks=tasks,
        architecture="B",
        max_tokens=MAX_TOKENS,
        output_width=width,
        mask_token=mask_token,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


def test_probes_cover_all_lengths() -> None:
    words = sorted(len(text.split()) for text in PROBES)
    assert len(set(PROBES)) == len(PROBES) >= 64
    assert words[0] == 1
    assert words[-1] > 300
    assert sum(not text.isascii() for text in PROBES) >= 8


def test_probe_pairs_are_distinct_and_cover_all_lengths() -> None:
    words = sorted(len(first.split()) + len(second.split()) for first, second in PAIRS)
    assert len(set(PAIRS)) == len(PAIRS) >= 48
    assert words[0] <= 10
    assert words[-1] > 300
    assert sum(first.endswith("?") for first, _ in PAIRS) >= 16


def test_probes_are_truncated_to_max_tokens(directory: Path) -> None:
    items = tokenize_probes(directory, metadata(*EMBEDDING_TASKS))
    assert len(items) == len(PROBES)
    assert max(len(item.ids) for item in items) == MAX_TOKENS
    assert all(item.second_segment_start == len(item.ids) for item in items)


@pytest.mark.parametrize(
    "model",
    [
        metadata(TaskName.QUESTION_ANSWERING),
        metadata(TaskName.TEXT_RANKING, TaskName.TEXT_CLASSIFICATION),
        metadata(TaskName.TEXT_CLASSIFICATION, TaskName.TEXT_RANKING),
        replace(metadata(TaskName.TEXT_CLASSIFICATION), labels=("no", "Entailment")),
    ],
)
def test_pair_models_have_pair_probes(directory: Path, model: CheckpointMetadata) -> None:
    items = tokenize_probes(directory, model)
    assert len(items) == len(PAIRS)
    assert all(0 < item.second_segment_start < len(item.ids) for item in items)


def test_masks_replace_only_words(directory: Path) -> None:
    filled = tokenize_probes(directory, metadata(TaskName.FILL_MASK, mask_token=MASK))
    whole = tokenize_probes(directory, metadata(*EMBEDDING_TASKS))
    known = [item for item in whole if (item.ids >= len(SPECIAL_TOKENS)).any()]
    assert len(PROBES) > len(known) > len(PROBES) * 0.9  # some probes have unknown tokens only
    for probe, before in zip(filled, known, strict=True):
        assert len(probe.ids) == min(len(before.ids), MASKED_PROBE_TOKENS)
        changed = np.flatnonzero(probe.ids[:-1] != before.ids[: len(probe.ids) - 1])
        assert set(probe.ids[changed]) == {MASK}
        assert not set(before.ids[changed]) & set(range(len(SPECIAL_TOKENS)))


def test_masked_probes_are_deterministic(directory: Path) -> None:
    first, second = (
        tokenize_probes(directory, metadata(TaskName.FILL_MASK, mask_token=MASK)) for _ in range(2)
    )
    assert [a.ids.tolist() for a in first] == [b.ids.tolist() for b in second]


@pytest.mark.parametrize(("width", "masks"), [(30_000, 4), (250_000, 1), (10**7, 1)])
def test_large_vocabulary_reduces_masks(directory: Path, width: int, masks: int) -> None:
    checkpoint = metadata(TaskName.FILL_MASK, width=width, mask_token=MASK)
    items = tokenize_probes(directory, checkpoint)
    counts = [int((item.ids == MASK).sum()) for item in items]
    assert (min(counts), max(counts)) == (1, masks)
    floats = sum(counts) * width
    assert 4 * floats <= max(probes.MASKED_REFERENCE_BYTES, 4 * len(items) * width)
