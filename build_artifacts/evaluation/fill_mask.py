"""fill-mask: how surprised is a model by the words that were hidden from it?"""

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

EXPECTED = "plain text, one sentence a line"
MASK_EVERY = 7  # tokens, about the share that models were trained with
# Every masked token costs one row over the vocabulary: a megabyte for a large one.
MAX_MASKS = 16


def load_fill_mask(path: Path, model: EvaluatedModel, sampling: ExampleSampling) -> Evaluation:
    """The sentences of the file, an item each, with some tokens masked. Raises BadEvaluationData.

    Of sentence i every seventh token is masked, from token i modulo 7 on, so that every position
    has its turn and two builds mask the same tokens.
    """
    place = FileLocation(path, EXPECTED)
    if model.mask_token is None:
        raise AssertionError("this is a bug: a fill-mask model without a mask token")
    lines = sampling.of(read_lines(place))
    encodings = open_truncating_tokenizer(model).encode_batch([line for _, line in lines])
    items: list[TokenizedItem] = []
    hidden: list[TokenIds] = []
    for i, ((number, _), encoding) in enumerate(zip(lines, encodings, strict=True)):
        item = build_item(encoding, pair=False)
        if model.mask_token in item.ids:
            raise place.at(f"line {number}").data_error("the sentence holds the mask token")
        chosen = masked_positions(encoding.special_tokens_mask, offset=i)
        if len(chosen):
            hidden.append(item.ids[chosen])
            item.ids[chosen] = model.mask_token
            items.append(item)
    if not items:
        raise place.data_error("the tokenizer leaves nothing of any sentence")
    return FillMaskEvaluation(items, hidden)


def masked_positions(special: Sequence[int], offset: int) -> NDArray[np.intp]:
    """Which tokens to mask; `special` is 1 for tokens that are not text. Empty without text."""
    text = np.flatnonzero(np.asarray(special) == 0)
    # A sentence shorter than the step gets one mask, not none.
    return text[offset % min(MASK_EVERY, max(len(text), 1)) :: MASK_EVERY][:MAX_MASKS]


class FillMaskEvaluation(Evaluation):
    """`perplexity` over all masked tokens: 1 for a model that knows them, less is better."""

    def __init__(self, items: Sequence[TokenizedItem], hidden: Sequence[TokenIds]) -> None:
        super().__init__(items, "perplexity")
        self._hidden = hidden  # the true tokens behind each item's masks

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """`perplexity`: e to the mean surprise; infinite where that is too large for a number."""
        surprise = float(np.concatenate(reduced).mean(dtype=np.float64))
        try:
            return {"perplexity": math.exp(surprise)}
        except OverflowError:
            return {"perplexity": math.inf}

    def _reduce(self, index: int, answer: Output) -> ReducedOutput:
        """Negative log-likelihood of the true token at each mask, [M]."""
        true = answer[np.arange(len(answer)), self._hidden[index]]
        peak = answer.max(axis=1)
        total = np.exp(answer - peak[:, None]).sum(axis=1, dtype=np.float64)
        surprise: ReducedOutput = (np.log(total) + peak - true).astype(np.float32)
        return surprise

    def _drop(self, reference: float, score: float) -> float:
        """By how many percent the perplexity has grown."""
        return 100 * (score - reference) / reference
