"""Parity and throughput of a decoder graph, in prefill and in batched decode steps.

The gate compares both modes, because ONNX Runtime has separate kernels for single tokens. The
logits of an int4 graph differ by up to 1.0 between prefill and decode steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from build_artifacts.decoders.reference import (
    DecoderReference,
    perplexity,
    summarize_logits,
    truncate_at_eos,
)
from build_artifacts.types import FloatArray, Tokens
from deployments.artifacts.manifest import Gate, Parity
from deployments.engines.decoder import DecoderEngine, TokenColumn

BATCH_SLOTS = 8  # texts or answers per batch
# Limits of the gate that apply to decoders.
LIMITS = (
    "next_token_agreement",
    "perplexity_increase",
    "batched_cosine_worst",
    "near_tie_margin",
)
_PROMPT_TOKENS = 256
_CACHED_TOKENS = 128  # tokens in each slot's cache during the measured decode steps


class DecoderThroughput(BaseModel):
    """Throughput of a decoder in tokens per second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    single: float  # decode steps with one slot
    batched: float  # decode steps with BATCH_SLOTS slots
    prefill: float

    def __str__(self) -> str:
        return (
            f"{self.single:.0f} tokens/s with one slot, {self.batched:.0f} with {BATCH_SLOTS}, "
            f"{self.prefill:.0f} in prefill"
        )


def throughput_context(max_tokens: int) -> int:
    """Return the context that `measure_throughput` needs, in tokens."""
    return min(_PROMPT_TOKENS, max_tokens)


def measure_throughput(engine: DecoderEngine, seconds: float) -> DecoderThroughput:
    """Measure the tokens per second of decode steps and of prefill.

    The three measurements are decode steps with one slot, decode steps with BATCH_SLOTS slots, and
    prefill. Each takes a third of `seconds`. Raises EngineFailed if a call fails.
    """
    context = engine.info.context
    cached = min(_CACHED_TOKENS, context - 1)
    max_prompt = engine.info.max_source_tokens or context
    prompt = np.arange(min(_PROMPT_TOKENS, max_prompt)) % engine.info.vocabulary
    if engine.info.max_source_tokens is not None:  # fill the cross-attention caches
        for slot in range(BATCH_SLOTS):
            engine.prefill(slot, prompt[:cached].tolist(), 0)

    def build_step(slots: int) -> Callable[[], int]:
        ids = np.zeros(slots, np.int64)
        lengths = np.full(slots, cached)

        def step() -> int:
            engine.decode(ids, lengths)
            return slots

        return step

    def prefill() -> int:
        engine.prefill(0, prompt.tolist(), 0)
        return len(prompt)

    single, batched, prefilled = (
        _measure_tokens_per_second(work, seconds / 3)
        for work in (build_step(1), build_step(BATCH_SLOTS), prefill)
    )
    return DecoderThroughput(single=single, batched=batched, prefill=prefilled)


def _measure_tokens_per_second(work: Callable[[], int], seconds: float) -> float:
    work()  # the first call allocates memory
    tokens, started_s = 0, time.perf_counter()
    while True:
        tokens += work()
        elapsed_s = time.perf_counter() - started_s
        if elapsed_s >= seconds:
            return tokens / elapsed_s


class ParityMetrics(NamedTuple):
    """Comparison of all texts in one mode, prefill or decode steps."""

    cosines: NDArray[np.float64]  # cosine per text, of the logits of graph and reference
    # Share of equal next tokens at positions without a near tie in the reference; at all positions,
    # if each is a near tie.
    agreement: float
    perplexity: float  # perplexity of the positions that have a target token
    is_finite: bool


class LogitAccumulator:
    """Statistics of logits, accumulated per batch because all logits would exceed the memory."""

    def __init__(self, reference: DecoderReference) -> None:
        self._reference = reference
        count = len(reference.logits)
        self._choices = np.full(count, -1)
        self._products, self._squares, self._losses = np.zeros((3, count))

    def add(self, positions: NDArray[np.int64], logits: FloatArray) -> None:
        """Add logits [n, V]. `positions` are indices into the concatenated tokens of all texts."""
        summary = summarize_logits(logits)
        self._choices[positions] = summary.choices
        self._squares[positions] = summary.squares
        expected = self._reference.logits[positions]
        self._products[positions] = np.einsum("nv,nv->n", logits, expected)
        targets = logits[np.arange(len(positions)), self._reference.next_token_ids[positions]]
        self._losses[positions] = summary.log_totals - targets

    def compute_metrics(self, near_tie_margin: float) -> ParityMetrics:
        reference, starts = self._reference.summary, self._reference.starts
        sums = (
            np.add.reduceat(x, starts) for x in (self._products, self._squares, reference.squares)
        )
        products, actual, expected = sums
        is_clear = reference.gaps >= near_tie_margin
        if not is_clear.any():  # as in a hardly trained model: any graph would pass
            is_clear[:] = True
        is_equal = (self._choices == reference.choices)[is_clear]
        return ParityMetrics(
            cosines=products / np.maximum(np.sqrt(actual * expected), 1e-12),
            agreement=float(is_equal.mean()),
            perplexity=perplexity(self._losses[self._reference.next_token_ids >= 0]),
            is_finite=bool(np.isfinite(self._squares).all()),
        )


class DecoderParity(NamedTuple):
    """Parity of a graph with the reference. Values are None if an output is not finite."""

    parity: Parity | None
    perplexity: float | None
    reasons: tuple[str, ...]  # violated limits


def compare_decoder(
    engine: DecoderEngine, reference: DecoderReference, gate: Gate
) -> DecoderParity:
    """Run the texts in prefill and in decode steps. Each limit applies to the worse of the two.

    An encoder-decoder model runs decode steps only. Also compare the decode steps of the longest
    text alone with those in a batch. `engine` needs BATCH_SLOTS slots, each with space for the
    longest text. Raises EngineFailed if a call fails.
    """
    texts, starts = reference.texts, np.array(reference.starts)
    prefilled, stepwise = LogitAccumulator(reference), LogitAccumulator(reference)
    for text, ids in enumerate(() if reference.sources else texts):
        logits = engine.prefill(0, ids, 0, all_logits=True)
        prefilled.add(starts[text] + np.arange(len(ids)), logits)
    longest = max(range(len(texts)), key=lambda text: len(texts[text]))
    batched = []
    for running, position, logits in decode_texts(engine, texts, reference.sources):
        stepwise.add(starts[running] + position, logits)
        batched += [logits[slot].copy() for slot, text in enumerate(running) if text == longest]
    source = reference.sources[longest : longest + 1]
    single = [logits[0].copy() for _, _, logits in decode_texts(engine, [texts[longest]], source)]
    accumulators = (stepwise,) if reference.sources else (prefilled, stepwise)
    return _build_parity(
        [each.compute_metrics(gate.near_tie_margin) for each in accumulators],
        _compute_cosine(np.stack(single), np.stack(batched)),
        reference.perplexity(),
        gate,
    )


def _build_parity(
    metrics: Sequence[ParityMetrics], batched_cosine: float, reference_perplexity: float, gate: Gate
) -> DecoderParity:
    # Check for NaN first: comparisons with NaN are false, so NaN would violate no limit.
    if not (math.isfinite(batched_cosine) and all(each.is_finite for each in metrics)):
        return DecoderParity(None, None, ("an output is not a finite number",))
    cosines = np.concatenate([each.cosines for each in metrics])
    agreement = min(each.agreement for each in metrics)
    worst_perplexity = max(each.perplexity for each in metrics)
    parity = Parity(
        cosine_mean=float(cosines.mean()),
        cosine_worst=float(cosines.min()),
        batched_cosine_worst=batched_cosine,
        top1_agreement=agreement,
    )
    max_perplexity = reference_perplexity * (1 + gate.perplexity_increase)
    reasons = []
    if agreement < gate.next_token_agreement:
        reasons.append(f"next-token agreement {agreement:.4f} < {gate.next_token_agreement}")
    if worst_perplexity > max_perplexity:
        reasons.append(f"perplexity {worst_perplexity:.2f} > {max_perplexity:.2f}")
    if batched_cosine < gate.batched_cosine_worst:
        reasons.append(f"worst batched cosine {batched_cosine:.4f} < {gate.batched_cosine_worst}")
    return DecoderParity(parity, worst_perplexity, tuple(reasons))


def _compute_cosine(a: FloatArray, b: FloatArray) -> float:
    """Return the cosine of the flattened arrays; NaN when a number is not finite."""
    x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(x @ y) / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-12)


def decode_texts(
    engine: DecoderEngine, texts: Sequence[Tokens], sources: Sequence[Tokens] = ()
) -> Iterator[tuple[list[int], int, FloatArray]]:
    """Run texts in decode steps of up to BATCH_SLOTS slots.

    Yields per step: the indices of the n running texts, the position of the current token, and the
    logits [n, V] of this token. All texts are at the same position. The logits are valid until the
    next step. With `sources`, a prefill encodes each source and returns the logits of position 0.
    """
    order = sorted(range(len(texts)), key=lambda text: -len(texts[text]))
    for first in range(0, len(order), BATCH_SLOTS):
        group = order[first : first + BATCH_SLOTS]  # longest first: finished slots are the last
        if sources:
            encoded = [engine.prefill(slot, sources[t], 0).copy() for slot, t in enumerate(group)]
            yield group, 0, np.stack(encoded)
        for position in range(1 if sources else 0, len(texts[group[0]])):
            running = [text for text in group if len(texts[text]) > position]
            ids = np.array([texts[text][position] for text in running])
            yield running, position, engine.decode(ids, np.full(len(running), position))


def generate_answers(
    engine: DecoderEngine,
    prompts: Sequence[Tokens],
    eos_token_ids: Sequence[int],
    max_new_tokens: int,
) -> tuple[Tokens, ...]:
    """Generate greedily for all prompts in one batch.

    `engine` needs a slot per prompt. Raises EngineFailed if a call fails.
    """
    answers = [[int(engine.prefill(slot, ids, 0).argmax())] for slot, ids in enumerate(prompts)]
    # After the prefill of an encoder-decoder model, a slot holds only the start token.
    has_encoder = engine.info.max_source_tokens is not None
    prompt_lengths: TokenColumn = np.array([1 if has_encoder else len(ids) for ids in prompts])
    for count in range(max_new_tokens - 1):
        last = np.array([tokens[-1] for tokens in answers])
        chosen = engine.decode(last, prompt_lengths + count).argmax(axis=1)
        for tokens, token in zip(answers, chosen.tolist(), strict=True):
            tokens.append(token)
    return tuple(truncate_at_eos(tokens, eos_token_ids) for tokens in answers)
