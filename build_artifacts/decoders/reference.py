"""Outputs of the fp32 torch model on the gate inputs: the reference for all candidates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.architectures import MODEL_ERRORS
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import (
    TorchModel,
    check_special_ids,
    check_token_ids,
    load_model,
)
from build_artifacts.decoders.gate_inputs import GateInputs, load_gate_inputs, max_answer_tokens
from build_artifacts.errors import UnsupportedModel, first_line
from build_artifacts.types import FloatArray, Tokens
from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.types import ModelHead

_LOGITS_NAME = "logits.npy"
_INPUTS_NAME = "gate_inputs.npz"
_PARTS = ("passages", "prompts", "answers")
_SUMMARY_ROWS = 128


@dataclass(frozen=True)
class DecoderReference:
    """Logits and answers of the reference model.

    The model reads `texts`: the passages, and each prompt followed by its answer. For an
    encoder-decoder model, a text is the decoder input: the start token and the answer without its
    last token. `logits` is a memory map [N, V]: N tokens of all texts, V vocabulary entries.
    """

    gate_inputs: GateInputs
    answers: tuple[Tokens, ...]  # one per prompt, with the end token if the model generated one
    logits: FloatArray
    decoder_start_token_id: int | None = None  # encoder-decoder models only

    @classmethod
    def read(cls, directory: Path, generation_config: GenerationConfig) -> DecoderReference:
        """Read the files that `write_reference` has written."""
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
        return _join_texts(self.gate_inputs, self.answers, self.decoder_start_token_id)

    @cached_property
    def sources(self) -> tuple[Tokens, ...]:
        """Encoder inputs, one per text; empty for decoder-only models."""
        return () if self.decoder_start_token_id is None else self.gate_inputs.prompts

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of the first token of each text among all tokens."""
        return (0, *accumulate(map(len, self.texts)))[:-1]

    @cached_property
    def next_token_ids(self) -> NDArray[np.int64]:
        """Target token per position, [N]; -1 for a position without a target.

        Passages have targets, except at their last token. Prompts and their answers have none. The
        targets of an encoder-decoder model are the tokens of the answers.
        """
        if self.decoder_start_token_id is not None:
            return np.array([token for answer in self.answers for token in answer])
        parts = [[*text[1:], -1] for text in self.gate_inputs.passages]
        known = [token for part in parts for token in part]
        return np.array(known + [-1] * (len(self.logits) - len(known)), dtype=np.int64)

    @cached_property
    def summary(self) -> LogitSummary:
        rows = range(0, len(self.logits), _SUMMARY_ROWS)
        parts = [summarize_logits(self.logits[row : row + _SUMMARY_ROWS]) for row in rows]
        return LogitSummary(*map(np.concatenate, zip(*parts, strict=True)))

    def perplexity(self) -> float:
        """Return the perplexity of the reference over the positions with a target token."""
        positions = np.flatnonzero(self.next_token_ids >= 0)
        targets = self.logits[positions, self.next_token_ids[positions]]
        return perplexity(self.summary.log_totals[positions] - targets)


class LogitSummary(NamedTuple):
    """Statistics of n rows of logits, [n] each."""

    choices: NDArray[np.int64]  # most likely token
    gaps: NDArray[np.float64]  # probability margin of the most likely token over the second
    log_totals: NDArray[np.float64]  # log of the sum of exponentials
    squares: NDArray[np.float64]  # sum of squared logits


def summarize_logits(logits: FloatArray) -> LogitSummary:
    best = np.partition(logits, -2, axis=1)[:, -2:].astype(np.float64)
    shares = np.exp(logits - best[:, 1:].astype(np.float32)).sum(axis=1, dtype=np.float64)
    return LogitSummary(
        choices=logits.argmax(axis=1),
        gaps=(1 - np.exp(best[:, 0] - best[:, 1])) / shares,
        log_totals=best[:, 1] + np.log(shares),
        squares=np.einsum("nv,nv->n", logits, logits).astype(np.float64),
    )


def perplexity(negative_log_likelihoods: NDArray[np.float64]) -> float:
    """Return the perplexity, capped at exp(700) to avoid overflow; 1 for an empty array."""
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
    """Run the checkpoint in `weights` on the gate inputs and write the outputs to `into`.

    Raises UnsupportedModel if the checkpoint cannot be loaded, if a token id has no vector in the
    model, if the chat template fails, if a forward pass fails, or if a logit is not finite. Raises
    OSError if there is no space for the outputs.
    """
    generation_config = metadata.required_generation_config
    decoder_start_token_id = _decoder_start_token_id(generation_config)
    has_encoder = decoder_start_token_id is not None
    gate_inputs = load_gate_inputs(weights, metadata.max_tokens, has_encoder=has_encoder)
    model = load_model(weights, head=ModelHead.NEXT_TOKEN, dtype="float32", has_encoder=has_encoder)
    check_token_ids(model, max(max(text) for text in (*gate_inputs.prompts, *gate_inputs.passages)))
    check_special_ids(model, (*generation_config.eos_token_ids, decoder_start_token_id or 0))
    max_new_tokens = max_answer_tokens(metadata.max_tokens)
    with _forward_errors(metadata.architecture):
        answers = _generate_answers(model, gate_inputs.prompts, generation_config, max_new_tokens)
    texts = _join_texts(gate_inputs, answers, decoder_start_token_id)
    logits = np.lib.format.open_memmap(
        into / _LOGITS_NAME,
        mode="w+",
        dtype=np.float32,
        shape=(sum(map(len, texts)), metadata.output_width),
    )
    with (into / _LOGITS_NAME).open("r+b") as file:  # a full disk is an error here, not a signal
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    with _forward_errors(metadata.architecture):
        _write_logits(model, gate_inputs.prompts if has_encoder else None, texts, logits)
    if not np.isfinite(logits).all():
        raise UnsupportedModel(
            f"`{metadata.architecture}` returns NaN or infinity in fp32 torch",
            hint="the checkpoint is damaged: download or save it again",
        )
    logits.flush()
    arrays: dict[str, Any] = {}  # Any: mypy would match typed values with other parameters of savez
    for name, parts in zip(_PARTS, (*gate_inputs, answers), strict=True):
        arrays[name] = np.array([token for part in parts for token in part], dtype=np.int64)
        arrays[f"{name}_ends"] = np.cumsum([len(part) for part in parts], dtype=np.int64)
    np.savez(into / _INPUTS_NAME, **arrays)


@contextmanager
def _forward_errors(architecture: str) -> Iterator[None]:
    """Convert errors of a forward pass to UnsupportedModel."""
    try:
        yield
    except MODEL_ERRORS as exc:
        raise UnsupportedModel(
            f"`{architecture}` does not run in fp32 torch: {first_line(exc)}",
            hint="run it with transformers on a CPU for details; torch may not support its sizes",
        ) from exc


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
    model: TorchModel,
    prompts: Sequence[Tokens],
    generation_config: GenerationConfig,
    max_new_tokens: int,
) -> tuple[Tokens, ...]:
    """Generate at most `max_new_tokens` per prompt, greedily, up to and including an end token."""
    import torch
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    filling = generation_config.eos_token_ids[0]
    ids = torch.full((len(prompts), longest), filling)
    mask = torch.zeros_like(ids)
    decoder_start_token_id = _decoder_start_token_id(generation_config)
    for row, prompt in enumerate(prompts):
        # Encoders take padding on the right. Decoders take padding on the left, because the answer
        # follows the prompt.
        index = (
            slice(len(prompt)) if decoder_start_token_id is not None else slice(-len(prompt), None)
        )
        ids[row, index] = torch.tensor(prompt)
        mask[row, index] = 1
    # Replace the checkpoint's settings, which may enable sampling or penalties.
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
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
    """Return the tokens up to and including the first end token."""
    ends = (index for index, token in enumerate(tokens) if token in eos_token_ids)
    return tuple(tokens[: next(ends, len(tokens)) + 1])
