"""How near to the original a graph reads its texts, in every way it is going to be run.

A prompt is read at once, and what follows token by token in company: ONNX Runtime has kernels of
their own for single tokens, whose logits of an int4 graph differ by as much as a unit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from build_artifacts.decoders.float_graph import FloatArray
from build_artifacts.decoders.gate_inputs import Tokens
from build_artifacts.decoders.reference import (
    DecoderReference,
    perplexity,
    summarize_logits,
    truncate_at_eos,
)
from deployments.artifacts.manifest import Gate, Parity
from deployments.engines.decoder import DecoderEngine, TokenColumn

_PROMPT_TOKENS = 256
_BEFORE = 128  # tokens that are in the memory of each row while it is timed


class DecoderThroughput(BaseModel):
    """Tokens per second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alone: float  # one row
    company: float  # ROWS rows together
    prompt: float

    def __str__(self) -> str:
        return (
            f"{self.alone:.0f} tokens/s for one row, {self.company:.0f} for {ROWS}, "
            f"{self.prompt:.0f} read"
        )


def throughput_context(most_tokens: int) -> int:
    """The tokens of a row that `measure_throughput` writes to."""
    return min(_PROMPT_TOKENS, most_tokens)


def measure_throughput(engine: DecoderEngine, seconds: float) -> DecoderThroughput:
    """Time each of the three for a third of `seconds`. Raises EngineFailed."""
    context = engine.info.context
    before = min(_BEFORE, context - 1)
    most = engine.info.max_source_tokens or context
    prompt = np.arange(min(_PROMPT_TOKENS, most)) % engine.info.vocabulary
    if engine.info.max_source_tokens is not None:  # without a source a row has little to do
        for row in range(ROWS):
            engine.prefill(row, prompt[:before].tolist(), 0)

    def generation_config(rows: int) -> Callable[[], int]:
        ids = np.zeros(rows, np.int64)
        lengths = np.full(rows, before)

        def step() -> int:
            engine.decode(ids, lengths)
            return rows

        return step

    def reading() -> int:
        engine.prefill(0, prompt.tolist(), 0)
        return len(prompt)

    alone, company, read = (
        _tokens_per_second(work, seconds / 3)
        for work in (generation_config(1), generation_config(ROWS), reading)
    )
    return DecoderThroughput(alone=alone, company=company, prompt=read)


def _tokens_per_second(work: Callable[[], int], seconds: float) -> float:
    work()  # what the first call allocates is not counted
    tokens, started_s = 0, time.perf_counter()
    while True:
        tokens += work()
        took_s = time.perf_counter() - started_s
        if took_s >= seconds:
            return tokens / took_s


ROWS = 8  # passages, and answers, at once
# Of a Gate, what is read here.
LIMITS = ("next_token_agreement", "perplexity_increase", "cosine_worst", "near_tie_margin")


class ParityMetrics(NamedTuple):
    """What came of reading all texts in one way."""

    cosines: NDArray[np.float64]  # of each text's logits with the original's
    agreement: float  # share of the tokens the original is decided about that it expects too
    perplexity: float  # of the passages
    is_finite: bool


class LogitAccumulator:
    """Sums up logits as they come, because all of them would fill the memory."""

    def __init__(self, original: DecoderReference) -> None:
        self._original = original
        count = len(original.logits)
        self._choices = np.full(count, -1)
        self._products, self._squares, self._surprises = np.zeros((3, count))

    def add(self, places: NDArray[np.int64], logits: FloatArray) -> None:
        """Take the logits [n, V] after the tokens at `places` among all."""
        found = summarize_logits(logits)
        self._choices[places] = found.choices
        self._squares[places] = found.squares
        self._products[places] = np.einsum("nv,nv->n", logits, self._original.logits[places])
        taken = logits[np.arange(len(places)), self._original.next_token_ids[places]]
        self._surprises[places] = found.log_totals - taken

    def reading(self, near_tie_margin: float) -> ParityMetrics:
        """What came of it."""
        summary, starts = self._original.summary, self._original.starts
        sums = (
            np.add.reduceat(x, starts) for x in (self._products, self._squares, summary.squares)
        )
        products, mine, theirs = sums
        decided = summary.gaps >= near_tie_margin
        same = (self._choices == summary.choices)[decided]
        return ParityMetrics(
            cosines=products / np.maximum(np.sqrt(mine * theirs), 1e-12),
            agreement=float(same.mean()) if len(same) else 1.0,
            perplexity=perplexity(self._surprises[self._original.next_token_ids >= 0]),
            is_finite=bool(np.isfinite(self._squares).all()),
        )


class DecoderParity(NamedTuple):
    """A graph beside the original; None where its numbers cannot be used at all."""

    parity: Parity | None
    perplexity: float | None
    reasons: tuple[str, ...]  # why it may not be sealed


def compare_decoder(engine: DecoderEngine, original: DecoderReference, gate: Gate) -> DecoderParity:
    """Read the texts at once and token by token, and hold the worse against the gate.

    `engine` has ROWS rows or more, each with room for every text. Raises EngineFailed.
    """
    texts, starts = original.texts, np.array(original.starts)
    whole, stepwise = LogitAccumulator(original), LogitAccumulator(original)
    # A decoder behind an encoder only ever reads token by token.
    for text, ids in enumerate(() if original.sources else texts):
        logits = engine.prefill(0, ids, 0, all_logits=True)
        whole.add(starts[text] + np.arange(len(ids)), logits)
    watched = max(range(len(texts)), key=lambda text: len(texts[text]))
    batched_answers = []
    for left, place, logits in steps(engine, texts, original.sources):
        stepwise.add(starts[left] + place, logits)
        batched_answers += [logits[row].copy() for row, text in enumerate(left) if text == watched]
    source = original.sources[watched : watched + 1]
    alone = [logits[0].copy() for _, _, logits in steps(engine, [texts[watched]], source)]
    tallies = (stepwise,) if original.sources else (whole, stepwise)
    return _judged(
        [tally.reading(gate.near_tie_margin) for tally in tallies],
        _cosine(np.stack(alone), np.stack(batched_answers)),
        original.perplexity(),
        gate,
    )


def _judged(
    readings: Sequence[ParityMetrics], company: float, due_perplexity: float, gate: Gate
) -> DecoderParity:
    # Of what is read alone there is nothing but the cosine; NaN is below no limit, and would pass.
    if not (math.isfinite(company) and all(reading.is_finite for reading in readings)):
        return DecoderParity(None, None, ("an output is not a finite number",))
    cosines = np.concatenate([reading.cosines for reading in readings])
    agreement = min(reading.agreement for reading in readings)
    worst = max(reading.perplexity for reading in readings)
    parity = Parity(
        cosine_mean=float(cosines.mean()),
        cosine_worst=float(cosines.min()),
        batched_cosine_worst=company,
        top1_agreement=agreement,
    )
    limit = due_perplexity * (1 + gate.perplexity_increase)
    reasons = []
    if agreement < gate.next_token_agreement:
        reasons.append(f"next-token agreement {agreement:.4f} < {gate.next_token_agreement}")
    if worst > limit:
        reasons.append(f"perplexity {worst:.2f} > {limit:.2f}")
    if company < gate.cosine_worst:
        reasons.append(f"worst cosine alone to company {company:.4f} < {gate.cosine_worst}")
    return DecoderParity(parity, worst, tuple(reasons))


def _cosine(a: FloatArray, b: FloatArray) -> float:
    """Of all numbers at once; NaN where one of them is not finite."""
    x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(x @ y) / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-12)


def steps(
    engine: DecoderEngine, texts: Sequence[Tokens], sources: Sequence[Tokens] = ()
) -> Iterator[tuple[list[int], int, FloatArray]]:
    """Read texts token by token, ROWS at a time: which n are left, place of the token, [n, V].

    With `sources` an encoder reads them first, and the first token of each text with them. Logits
    are valid until the next ones.
    """
    order = sorted(range(len(texts)), key=lambda text: -len(texts[text]))
    for first in range(0, len(order), ROWS):
        group = order[first : first + ROWS]  # the longest first, so that those left are the first
        if sources:
            begun = [engine.prefill(row, sources[t], 0).copy() for row, t in enumerate(group)]
            yield group, 0, np.stack(begun)
        for place in range(1 if sources else 0, len(texts[group[0]])):
            left = [text for text in group if len(texts[text]) > place]
            ids = np.array([texts[text][place] for text in left])
            yield left, place, engine.decode(ids, np.full(len(left), place))


def generate_answers(
    engine: DecoderEngine, prompts: Sequence[Tokens], eos_token_ids: Sequence[int], most: int
) -> tuple[Tokens, ...]:
    """The likeliest token each time, at most `most`, all prompts in company. Raises EngineFailed.

    There are no more prompts than the engine has rows.
    """
    found = [[int(engine.prefill(row, ids, 0).argmax())] for row, ids in enumerate(prompts)]
    # Behind an encoder a row holds the start token only.
    is_apart = engine.info.max_source_tokens is not None
    prompt_lengths: TokenColumn = np.array([1 if is_apart else len(ids) for ids in prompts])
    for count in range(most - 1):
        last = np.array([tokens[-1] for tokens in found])
        chosen = engine.decode(last, prompt_lengths + count).argmax(axis=1)
        for tokens, token in zip(found, chosen.tolist(), strict=True):
            tokens.append(token)
    return tuple(truncate_at_eos(tokens, eos_token_ids) for tokens in found)
