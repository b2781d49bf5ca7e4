"""Evaluation of fill-mask: perplexity of the masked tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.evaluation.base import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    Output,
    ReducedOutput,
    open_truncating_tokenizer,
)
from build_artifacts.evaluation.files import FileLocation, read_lines
from deployments.messages import TokenIds, TokenizedItem
from deployments.tokenization.encodings import build_item

EXPECTED = "plain text, one sentence per line"
MASK_EVERY = 7  # one of 7 tokens is masked, close to the 15 % in BERT's training
# Maximum masks per sentence. The output of each mask has one logit per vocabulary entry, 1 MB for
# XLM-R.
MAX_MASKS = 16


def load_fill_mask(path: Path, model: EvaluatedModel, sampling: ExampleSampling) -> Evaluation:
    """Load one item per sentence with some tokens masked.

    In sentence i, every seventh token is masked, up to MAX_MASKS. The first masked token is i
    modulo 7, or i modulo the number of tokens in a shorter sentence, so that the masks of several
    sentences cover all positions. Special tokens do not count. Sentences that consist of special
    tokens are skipped. Equal samples of a file have equal masks in every build.

    Raises BadEvaluationData for an unusable file, and for a sentence with a mask token of its own.
    """
    location = FileLocation(path, EXPECTED)
    if model.mask_token is None:
        raise AssertionError("bug: a fill-mask model without a mask token")
    lines = sampling.sample(read_lines(location))
    encodings = open_truncating_tokenizer(model).encode_batch([line for _, line in lines])
    items: list[TokenizedItem] = []
    hidden: list[TokenIds] = []
    for i, ((number, _), encoding) in enumerate(zip(lines, encodings, strict=True)):
        item = build_item(encoding, pair=False)
        if model.mask_token in item.ids:
            raise location.at(f"line {number}").data_error("the sentence contains the mask token")
        positions = select_masked_positions(encoding.special_tokens_mask, offset=i)
        if len(positions):
            hidden.append(item.ids[positions])
            item.ids[positions] = model.mask_token
            items.append(item)
    if not items:
        raise location.data_error("no sentence has a token other than special tokens")
    return FillMaskEvaluation(items, hidden)


def select_masked_positions(special: Sequence[int], offset: int) -> NDArray[np.intp]:
    """Select the tokens to mask, if any; `special` is 1 for tokens that are not text.

    The first mask is at the text token `offset` modulo MASK_EVERY. If a sentence has fewer text
    tokens than MASK_EVERY, their number is the modulus.
    """
    text = np.flatnonzero(np.asarray(special) == 0)
    # A sentence with fewer than MASK_EVERY tokens still gets one mask.
    return text[offset % min(MASK_EVERY, max(len(text), 1)) :: MASK_EVERY][:MAX_MASKS]


class FillMaskEvaluation(Evaluation):
    """`perplexity` over all masked tokens: at least 1, lower is better."""

    def __init__(self, items: Sequence[TokenizedItem], hidden: Sequence[TokenIds]) -> None:
        super().__init__(items, "perplexity")
        self._hidden = hidden  # original tokens at the masks of each item

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Return `perplexity`, the exponential of the mean loss; infinite on overflow."""
        loss = float(np.concatenate(reduced).mean(dtype=np.float64))
        try:
            return {"perplexity": math.exp(loss)}
        except OverflowError:
            return {"perplexity": math.inf}

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        """Return the negative log-likelihood of the original token at each mask, [M]."""
        target = output[np.arange(len(output)), self._hidden[index]]
        peak = output.max(axis=1)
        total = np.exp(output - peak[:, None]).sum(axis=1, dtype=np.float64)
        loss: ReducedOutput = (np.log(total) + peak - target).astype(np.float32)
        return loss

    def _drop(self, reference: float, score: float) -> float:
        """Return the increase of the perplexity in percent."""
        return 100 * (score - reference) / reference

    def _format_drop(self, drop: float) -> str:
        return f"{drop:.2f} % above the reference"
