"""Prompts that are longer than the context: truncation, and rejection without truncation."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.errors import InputTooLong
from deployments.messages import Chat, Truncation
from tests.integration.serving.generation.conftest import (
    CONTEXT,
    END_ID,
    LONG,
    LONG_IDS,
    SOURCE,
    TOKENIZER,
    prepared,
)


@pytest.mark.parametrize(
    ("encoder", "most"), [(True, SOURCE), (False, CONTEXT - 1)], ids=["encoder", "decoder"]
)
def test_truncated_text_keeps_special_tokens(encoder: bool, most: int, directory: Path) -> None:
    start = prepared(directory, LONG, encoder=encoder, truncation=Truncation.KEEP_START)
    assert start == [*LONG_IDS[: most - 1], END_ID]
    end = prepared(directory, LONG, encoder=encoder, truncation=Truncation.KEEP_END)
    assert end == [*LONG_IDS[1 - most :], END_ID]


@pytest.mark.parametrize("truncation", Truncation)
def test_fitting_text_is_not_truncated(truncation: Truncation, directory: Path) -> None:
    fitting = LONG[: SOURCE - 1]
    ids = prepared(directory, fitting, encoder=True, truncation=truncation)
    assert ids == [*LONG_IDS[: SOURCE - 1], END_ID]


def test_token_ids_are_truncated_without_special_tokens(directory: Path) -> None:
    tokens = tuple(range(20))
    for keep, kept in ((Truncation.KEEP_START, range(8)), (Truncation.KEEP_END, range(12, 20))):
        assert prepared(directory, tokens, encoder=True, truncation=keep) == list(kept)


def test_chat_is_truncated(directory: Path) -> None:
    chat = Chat(({"role": "user", "content": LONG},))
    kept = prepared(directory, chat, truncation=Truncation.KEEP_END)
    assert len(kept) == CONTEXT - 1
    assert TOKENIZER.decode(kept).endswith("assistant\n")


def test_too_long_prompt_without_truncation_is_rejected(directory: Path) -> None:
    with pytest.raises(
        InputTooLong, match=f"has {len(LONG_IDS) + 1} tokens; the maximum is 8"
    ) as refused:
        prepared(directory, LONG, encoder=True)
    assert refused.value.field == "prompt"


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(directory: Path) -> None:
    assert prepared(directory, LONG, encoder=True, truncate_prompt_tokens=3) == [
        *LONG_IDS[-2:],
        END_ID,
    ]
