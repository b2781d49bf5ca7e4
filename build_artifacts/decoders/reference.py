"""The original: what the checkpoint in fp32 torch says to the passages and the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.decoders import chat_template
from build_artifacts.checkpoints.facts import ModelFacts
from build_artifacts.checkpoints.models import TorchModel, first_line, load_model
from build_artifacts.decoders.texts import PASSAGES, PROMPTS
from build_artifacts.errors import UnsupportedModel
from deployments.decoding import Decoding
from deployments.manifest import TOKENIZER_NAME, Head

_NEW_TOKENS = 32
_LOGITS_NAME = "logits.npy"
_ASKED_NAME = "asked.npz"

Floats = NDArray[np.float32]
Tokens = tuple[int, ...]


class Asked(NamedTuple):
    """What the original and every graph of it read."""

    passages: tuple[Tokens, ...]
    prompts: tuple[Tokens, ...]


@dataclass(frozen=True)
class Original:
    """What the original answered; kept in `directory`, for logits are as large as the vocabulary.

    It read `texts`: the passages, and each prompt with its own answer. `logits` is [N, V] over the
    N tokens of all texts, end to end.
    """

    asked: Asked
    answers: tuple[Tokens, ...]  # to the prompts, with the end token where one came
    logits: Floats

    @classmethod
    def read(cls, directory: Path) -> Original:
        """What `write_original` wrote."""
        with np.load(directory / _ASKED_NAME, allow_pickle=False) as file:
            passages, prompts, answers = (_parts(file, name) for name in _PARTS)
        logits = np.load(directory / _LOGITS_NAME, mmap_mode="r", allow_pickle=False)
        return cls(Asked(passages, prompts), answers, logits)

    @cached_property
    def texts(self) -> tuple[Tokens, ...]:
        """What was read."""
        return _texts(self.asked, self.answers)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the tokens of each text begin among all."""
        return (0, *accumulate(map(len, self.texts)))[:-1]

    @cached_property
    def following(self) -> NDArray[np.int64]:
        """[N], the token that comes next; -1 after the last of a text, and outside of passages."""
        parts = [[*text[1:], -1] for text in self.asked.passages]
        known = [token for part in parts for token in part]
        return np.array(known + [-1] * (len(self.logits) - len(known)), dtype=np.int64)

    @cached_property
    def own(self) -> Seen:
        """Its own logits, summed up."""
        rows = range(0, len(self.logits), _ROWS_AT_ONCE)
        parts = [seen(self.logits[row : row + _ROWS_AT_ONCE]) for row in rows]
        return Seen(*map(np.concatenate, zip(*parts, strict=True)))

    def perplexity(self) -> float:
        """Of the passages."""
        places = np.flatnonzero(self.following >= 0)
        taken = self.logits[places, self.following[places]]
        return perplexity(self.own.log_totals[places] - taken)


class Seen(NamedTuple):
    """Rows of logits [n, V] in a few numbers each, [n]."""

    choices: NDArray[np.int64]  # the likeliest token
    gaps: NDArray[np.float64]  # probability between the two likeliest
    log_totals: NDArray[np.float64]  # logarithm of the sum of the exponentials
    squares: NDArray[np.float64]  # of all logits, summed


def seen(logits: Floats) -> Seen:
    """What rows of logits come to."""
    best = np.partition(logits, -2, axis=1)[:, -2:].astype(np.float64)
    shares = np.exp(logits - best[:, 1:].astype(np.float32)).sum(axis=1, dtype=np.float64)
    return Seen(
        choices=logits.argmax(axis=1),
        gaps=(1 - np.exp(best[:, 0] - best[:, 1])) / shares,
        log_totals=best[:, 1] + np.log(shares),
        squares=np.einsum("nv,nv->n", logits, logits).astype(np.float64),
    )


def perplexity(surprises: NDArray[np.float64]) -> float:
    """From negative log-likelihoods; of nothing at all it is 1."""
    return float(np.exp(min(surprises.mean(), 700.0))) if len(surprises) else 1.0


_PARTS = ("passages", "prompts", "answers")
_ROWS_AT_ONCE = 128


def _parts(file: np.lib.npyio.NpzFile, name: str) -> tuple[Tokens, ...]:
    ends = file[f"{name}_ends"].tolist()
    return tuple(tuple(part.tolist()) for part in np.split(file[name], ends[:-1]))


def _texts(asked: Asked, answers: Sequence[Tokens]) -> tuple[Tokens, ...]:
    pairs = zip(asked.prompts, answers, strict=True)
    return (*asked.passages, *((*prompt, *answer) for prompt, answer in pairs))


def write_original(weights: Path, facts: ModelFacts, into: Path) -> None:
    """Ask the checkpoint in `weights`, and keep what it answers in `into`.

    Raises UnsupportedModel.
    """
    assert facts.decoding is not None, "facts of a head NEXT_TOKEN have a decoding; this is a bug"
    asked = asked_of(weights, facts.max_tokens)
    model = load_model(weights, head=Head.NEXT_TOKEN, dtype="float32")
    answers = _answers(model, asked.prompts, facts.decoding, answer_tokens(facts.max_tokens))
    texts = _texts(asked, answers)
    logits = np.lib.format.open_memmap(
        into / _LOGITS_NAME,
        mode="w+",
        dtype=np.float32,
        shape=(sum(map(len, texts)), facts.width),
    )
    _read(model, texts, logits)
    if not np.isfinite(logits).all():
        raise UnsupportedModel(
            f"`{facts.architecture}` answers NaN or Inf in fp32 torch already",
            hint="the checkpoint is damaged: download or save it again",
        )
    logits.flush()
    kept: dict[str, Any] = {}  # untyped, or it would be taken for the other arguments of savez
    for name, parts in zip(_PARTS, (*asked, answers), strict=True):
        kept[name] = np.array([token for part in parts for token in part], dtype=np.int64)
        kept[f"{name}_ends"] = np.cumsum([len(part) for part in parts], dtype=np.int64)
    np.savez(into / _ASKED_NAME, **kept)


def answer_tokens(max_tokens: int) -> int:
    """How long answers may get, of a model that reads `max_tokens`."""
    return min(_NEW_TOKENS, max_tokens // 2)


def asked_of(weights: Path, max_tokens: int) -> Asked:
    """Passages and prompts as tokens, cut to what the model reads; prompts leave room to answer.

    Raises UnsupportedModel where the checkpoint's chat template cannot be used.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME))
    prompts, is_chat = _written(weights)
    room = max_tokens - answer_tokens(max_tokens)
    return Asked(
        tuple(tuple(tokenizer.encode(text).ids[:max_tokens]) for text in PASSAGES),
        tuple(
            tuple(tokenizer.encode(text, add_special_tokens=not is_chat).ids[-room:])
            for text in prompts
        ),
    )


def _written(weights: Path) -> tuple[Sequence[str], bool]:
    """The prompts as the model is to read them, and whether its chat template wrote them."""
    template = chat_template(weights)
    if template is None:
        return PROMPTS, False
    from transformers import AutoTokenizer

    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
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


def _read(model: TorchModel, texts: Sequence[Tokens], logits: Floats) -> None:
    import torch

    first = 0
    with torch.inference_mode():
        for text in texts:
            given = model(torch.tensor([text]), use_cache=False).logits[0].numpy()
            logits[first : first + len(text)] = given
            first += len(text)


def _answers(
    model: TorchModel, prompts: Sequence[Tokens], decoding: Decoding, most: int
) -> tuple[Tokens, ...]:
    """The likeliest token each time, up to an end token, which is part of the answer."""
    import torch
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    filling = decoding.end_tokens[0]
    ids = torch.full((len(prompts), longest), filling)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    # The checkpoint's own settings may draw at random or punish repetition.
    model.generation_config = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=list(decoding.end_tokens),
        pad_token_id=filling,
    )
    with torch.inference_mode():
        rows = model.generate(input_ids=ids, attention_mask=mask)[:, longest:].tolist()
    return tuple(up_to_end(row, decoding.end_tokens) for row in rows)


def up_to_end(tokens: Sequence[int], end_tokens: Sequence[int]) -> Tokens:
    """The tokens up to the first end token, and with it."""
    ends = (place for place, token in enumerate(tokens) if token in end_tokens)
    return tuple(tokens[: next(ends, len(tokens)) + 1])
