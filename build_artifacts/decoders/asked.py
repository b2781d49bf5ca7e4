"""What a checkpoint and the graphs of it are asked, as the tokens of its own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from build_artifacts.checkpoints.decoders import chat_template
from build_artifacts.checkpoints.models import first_line
from build_artifacts.decoders.texts import (
    OTHER_PASSAGES,
    OTHER_PROMPTS,
    PASSAGES,
    PROMPTS,
)
from build_artifacts.errors import UnsupportedModel
from deployments.manifest import TOKENIZER_NAME

_NEW_TOKENS = 32

Tokens = tuple[int, ...]


class Asked(NamedTuple):
    """What the original and every graph of it read."""

    passages: tuple[Tokens, ...]
    prompts: tuple[Tokens, ...]


def answer_tokens(max_tokens: int) -> int:
    """How long answers may get, of a model that reads `max_tokens`."""
    return min(_NEW_TOKENS, max_tokens // 2)


def asked_of(weights: Path, max_tokens: int, *, has_encoder: bool) -> Asked:
    """Passages and prompts as tokens, cut to what the model reads; prompts leave room to answer.

    An encoder reads them apart from the answer, and all alike: they are prompts then. Raises
    UnsupportedModel where the checkpoint's chat template cannot be used.
    """
    if not has_encoder:
        return _asked(weights, max_tokens, PASSAGES, PROMPTS)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME))
    sources = (tokenizer.encode(text).ids for text in (*PASSAGES, *PROMPTS))
    return Asked((), tuple(cut_source(ids, max_tokens) for ids in sources))


def calibration_of(weights: Path, max_tokens: int) -> tuple[Tokens, ...]:
    """Other texts, which are only read: the gate must not judge by those that a graph was made for.

    Raises UnsupportedModel.
    """
    asked = _asked(weights, max_tokens, OTHER_PASSAGES, OTHER_PROMPTS)
    return (*asked.passages, *asked.prompts)


def _asked(
    weights: Path, max_tokens: int, passages: Sequence[str], prompts: Sequence[str]
) -> Asked:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME))
    written, is_chat = _written(weights, prompts)
    room = max_tokens - answer_tokens(max_tokens)
    return Asked(
        tuple(tuple(tokenizer.encode(text).ids[:max_tokens]) for text in passages),
        tuple(
            tuple(tokenizer.encode(text, add_special_tokens=not is_chat).ids[-room:])
            for text in written
        ),
    )


def cut_source(ids: Sequence[int], most: int) -> Tokens:
    """The first tokens, and the last: it is what a source ends with."""
    return tuple(ids) if len(ids) <= most else (*ids[: most - 1], ids[-1])


def _written(weights: Path, prompts: Sequence[str]) -> tuple[Sequence[str], bool]:
    """The prompts as the model is to read them, and whether its chat template wrote them."""
    template = chat_template(weights)
    if template is None:
        return prompts, False
    from transformers import AutoTokenizer

    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            weights, trust_remote_code=False, local_files_only=True
        )
        return tokenizer.apply_chat_template(
            chats, chat_template=template, tokenize=False, add_generation_prompt=True
        ), True
    except Exception as exc:  # a template is a program, and raises what it likes
        raise UnsupportedModel(
            f"the chat template cannot be used: {first_line(exc)}",
            hint="mend it, or remove it from the checkpoint",
        ) from exc
