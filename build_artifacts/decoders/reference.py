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

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.decoders.gate_inputs import (
    GateInputs,
    Tokens,
    load_gate_inputs,
    max_answer_tokens,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.types import ModelHead

_LOGITS_NAME = "logits.npy"
_INPUTS_NAME = "asked.npz"
_PARTS = ("passages", "prompts", "answers")
_SUMMARY_ROWS = 128

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class DecoderReference:
    """What the original answered; kept in `directory`, for logits are as large as the vocabulary.

    It read `texts`: the passages, and each prompt with its own answer. `logits` is [N, V] over the
    N tokens of all texts, end to end. With an encoder passages are prompts too, and a text is what
    the decoder reads: the start token, and the answer without its last.
    """

    gate_inputs: GateInputs
    answers: tuple[Tokens, ...]  # to the prompts, with the end token where one came
    logits: FloatArray
    decoder_start_token_id: int | None = None  # of a model with an encoder

    @classmethod
    def read(cls, directory: Path, generation_config: GenerationConfig) -> DecoderReference:
        """What `write_reference` wrote."""
        with np.load(directory / _INPUTS_NAME, allow_pickle=False) as file:
            passages, prompts, answers = (_split_texts(file, name) for name in _PARTS)
        logits = np.load(directory / _LOGITS_NAME, mmap_mode="r", allow_pickle=False)
        return cls(
            GateInputs(passages, prompts),
            answers,
            logits,
            _decoder_start_token_id(generation_config),
        )

    @cached_property
    def texts(self) -> tuple[Tokens, ...]:
        """What was read."""
        return _join_texts(self.gate_inputs, self.answers, self.decoder_start_token_id)

    @cached_property
    def sources(self) -> tuple[Tokens, ...]:
        """What an encoder reads for each text; empty without one."""
        return () if self.decoder_start_token_id is None else self.gate_inputs.prompts

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the tokens of each text begin among all."""
        return (0, *accumulate(map(len, self.texts)))[:-1]

    @cached_property
    def next_token_ids(self) -> NDArray[np.int64]:
        """[N], the token that comes next; -1 after the last of a text, and outside of passages.

        With an encoder it is the answer's own, after every token.
        """
        if self.decoder_start_token_id is not None:
            return np.array([token for answer in self.answers for token in answer])
        parts = [[*text[1:], -1] for text in self.gate_inputs.passages]
        known = [token for part in parts for token in part]
        return np.array(known + [-1] * (len(self.logits) - len(known)), dtype=np.int64)

    @cached_property
    def summary(self) -> LogitSummary:
        """Its own logits, summed up."""
        rows = range(0, len(self.logits), _SUMMARY_ROWS)
        parts = [summarize_logits(self.logits[row : row + _SUMMARY_ROWS]) for row in rows]
        return LogitSummary(*map(np.concatenate, zip(*parts, strict=True)))

    def perplexity(self) -> float:
        """Of the passages."""
        places = np.flatnonzero(self.next_token_ids >= 0)
        taken = self.logits[places, self.next_token_ids[places]]
        return perplexity(self.summary.log_totals[places] - taken)


class LogitSummary(NamedTuple):
    """Rows of logits [n, V] in a few numbers each, [n]."""

    choices: NDArray[np.int64]  # the likeliest token
    gaps: NDArray[np.float64]  # probability between the two likeliest
    log_totals: NDArray[np.float64]  # logarithm of the sum of the exponentials
    squares: NDArray[np.float64]  # of all logits, summed


def summarize_logits(logits: FloatArray) -> LogitSummary:
    """What rows of logits come to."""
    best = np.partition(logits, -2, axis=1)[:, -2:].astype(np.float64)
    shares = np.exp(logits - best[:, 1:].astype(np.float32)).sum(axis=1, dtype=np.float64)
    return LogitSummary(
        choices=logits.argmax(axis=1),
        gaps=(1 - np.exp(best[:, 0] - best[:, 1])) / shares,
        log_totals=best[:, 1] + np.log(shares),
        squares=np.einsum("nv,nv->n", logits, logits).astype(np.float64),
    )


def perplexity(negative_log_likelihoods: NDArray[np.float64]) -> float:
    """From negative log-likelihoods; of nothing at all it is 1."""
    return (
        float(np.exp(min(negative_log_likelihoods.mean(), 700.0)))
        if len(negative_log_likelihoods)
        else 1.0
    )


def _split_texts(file: np.lib.npyio.NpzFile, name: str) -> tuple[Tokens, ...]:
    ends = file[f"{name}_ends"].tolist()
    return tuple(tuple(part.tolist()) for part in np.split(file[name], ends[:-1]))


def _decoder_start_token_id(generation_config: GenerationConfig) -> int | None:
    return (
        None
        if generation_config.encoder_decoder is None
        else generation_config.encoder_decoder.decoder_start_token_id
    )


def _join_texts(
    gate_inputs: GateInputs, answers: Sequence[Tokens], decoder_start_token_id: int | None
) -> tuple[Tokens, ...]:
    if decoder_start_token_id is not None:
        return tuple((decoder_start_token_id, *answer[:-1]) for answer in answers)
    pairs = zip(gate_inputs.prompts, answers, strict=True)
    return (*gate_inputs.passages, *((*prompt, *answer) for prompt, answer in pairs))


def write_reference(weights: Path, metadata: CheckpointMetadata, into: Path) -> None:
    """Ask the checkpoint in `weights`, and keep what it answers in `into`.

    Raises UnsupportedModel.
    """
    decoder_start_token_id = _decoder_start_token_id(metadata.required_generation_config)
    has_encoder = decoder_start_token_id is not None
    gate_inputs = load_gate_inputs(weights, metadata.max_tokens, has_encoder=has_encoder)
    model = load_model(weights, head=ModelHead.NEXT_TOKEN, dtype="float32", has_encoder=has_encoder)
    answers = _generate_answers(
        model,
        gate_inputs.prompts,
        metadata.required_generation_config,
        max_answer_tokens(metadata.max_tokens),
    )
    texts = _join_texts(gate_inputs, answers, decoder_start_token_id)
    logits = np.lib.format.open_memmap(
        into / _LOGITS_NAME,
        mode="w+",
        dtype=np.float32,
        shape=(sum(map(len, texts)), metadata.output_width),
    )
    _write_logits(model, gate_inputs.prompts if has_encoder else None, texts, logits)
    if not np.isfinite(logits).all():
        raise UnsupportedModel(
            f"`{metadata.architecture}` answers NaN or Inf in fp32 torch already",
            hint="the checkpoint is damaged: download or save it again",
        )
    logits.flush()
    kept: dict[str, Any] = {}  # untyped, or it would be taken for the other arguments of savez
    for name, parts in zip(_PARTS, (*gate_inputs, answers), strict=True):
        kept[name] = np.array([token for part in parts for token in part], dtype=np.int64)
        kept[f"{name}_ends"] = np.cumsum([len(part) for part in parts], dtype=np.int64)
    np.savez(into / _INPUTS_NAME, **kept)


def _write_logits(
    model: TorchModel,
    sources: Sequence[Tokens] | None,
    texts: Sequence[Tokens],
    logits: FloatArray,
) -> None:
    import torch

    first = 0
    with torch.inference_mode():
        for i, text in enumerate(texts):
            ids = torch.tensor([text])
            read = {"input_ids": ids}
            if sources is not None:
                read = {"input_ids": torch.tensor([sources[i]]), "decoder_input_ids": ids}
            given = model(**read, use_cache=False).logits[0].numpy()
            logits[first : first + len(text)] = given
            first += len(text)


def _generate_answers(
    model: TorchModel, prompts: Sequence[Tokens], generation_config: GenerationConfig, most: int
) -> tuple[Tokens, ...]:
    """The likeliest token each time, up to an end token, which is part of the answer."""
    import torch
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    filling = generation_config.eos_token_ids[0]
    ids = torch.full((len(prompts), longest), filling)
    mask = torch.zeros_like(ids)
    decoder_start_token_id = _decoder_start_token_id(generation_config)
    for row, prompt in enumerate(prompts):
        # An encoder's padding is behind; a decoder's before, because answers follow.
        place = (
            slice(len(prompt)) if decoder_start_token_id is not None else slice(-len(prompt), None)
        )
        ids[row, place] = torch.tensor(prompt)
        mask[row, place] = 1
    # The checkpoint's own settings may draw at random or punish repetition.
    model.generation_config = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=list(generation_config.eos_token_ids),
        pad_token_id=filling,
        decoder_start_token_id=decoder_start_token_id,
    )
    read = longest if decoder_start_token_id is None else 1
    with torch.inference_mode():
        rows = model.generate(input_ids=ids, attention_mask=mask)[:, read:].tolist()
    return tuple(truncate_at_eos(row, generation_config.eos_token_ids) for row in rows)


def truncate_at_eos(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> Tokens:
    """The tokens up to the first end token, and with it."""
    ends = (place for place, token in enumerate(tokens) if token in eos_token_ids)
    return tuple(tokens[: next(ends, len(tokens)) + 1])
