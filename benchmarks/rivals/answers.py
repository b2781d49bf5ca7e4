"""Comparison of server answers with right answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.agreement import extract_body
from benchmarks.common.errors import BenchmarkError
from benchmarks.rivals.apis import Api, CompletionApi, EmbeddingApi
from benchmarks.rivals.references import ReferenceCompletions, References
from benchmarks.rivals.results import AnswerCheck, CompletionCheck
from benchmarks.rivals.workloads import TextRequest
from build_artifacts.evaluation.metrics import row_cosines


class RawAnswer(NamedTuple):
    """The texts of a request and the raw HTTP response."""

    request: TextRequest
    response: bytes


class AnswerBounds(NamedTuple):
    """What the answers of a server must reach."""

    min_cosine: float  # of embeddings, to fp32 torch
    # Whether completions must equal those of the artifact in this process. False for rivals: they
    # compute with other weights, and a near-tie may change a greedy text from its first token on.
    # For them the results only state the share of equal leading tokens.
    has_our_completions: bool = False


def check_answers(
    api: Api, answers: Iterable[RawAnswer], references: References, bounds: AnswerBounds
) -> AnswerCheck:
    """Compare embeddings or completions with the references.

    Raises BenchmarkError if `api.parse` rejects an answer, or if the number of vectors is wrong.
    """
    if not isinstance(api, EmbeddingApi):
        if references.completions is None:
            raise AssertionError("bug: completions without a generative model")
        return _check_completions(api, list(answers), references.completions, bounds)
    bodies = [(answer.request, extract_body(answer.response)) for answer in answers]
    cosines = [
        row_cosines(_require_rows(api.parse(body), len(texts)), references.embeddings.embed(texts))
        for texts, body in bodies
    ]
    return AnswerCheck(
        compared=sum(map(len, cosines)),
        worst_cosine=min((float(row.min()) for row in cosines), default=0.0),
        required_cosine=bounds.min_cosine,
        tokens_per_response=None,
    )


def _check_completions(
    api: CompletionApi,
    answers: Sequence[RawAnswer],
    references: ReferenceCompletions,
    bounds: AnswerBounds,
) -> AnswerCheck:
    texts = [api.parse(extract_body(answer.response)).text for answer in answers]
    expected = references.complete([prompt for answer in answers for prompt in answer.request])
    pairs = list(zip(texts, expected, strict=True))
    tokens = [count_tokens(api, answer) for answer in answers]
    shares = [references.leading_share(*pair) for pair in pairs]
    return AnswerCheck(
        compared=len(answers),
        worst_cosine=None,
        required_cosine=None,
        tokens_per_response=float(np.mean(tokens)) if tokens else None,
        completions=CompletionCheck(
            # A model may end its answer at once. The reference then has no text either.
            empty=sum(not text and bool(right) for text, right in pairs),
            same=sum(text == right for text, right in pairs),
            equal_leading_share=float(np.mean(shares)) if shares else 0.0,
            must_be_equal=bounds.has_our_completions,
        ),
    )


def count_tokens(api: CompletionApi, answer: RawAnswer) -> int:
    """Return the tokens of a completion; 0 if it has no text. Raises BenchmarkError as `parse`."""
    completion = api.parse(extract_body(answer.response))
    return completion.tokens if completion.text else 0


def _require_rows(vectors: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    if len(vectors) != count:
        raise BenchmarkError(
            f"a request of {count} texts was answered with {len(vectors)} vectors",
            hint="leave the rival out with --rivals",
        )
    return vectors


def require_right(name: str, check: AnswerCheck) -> None:
    """Raise BenchmarkError if no answer was compared or an answer is wrong."""
    if check.is_met:
        return
    cosine = "" if check.worst_cosine is None else f", worst cosine {check.worst_cosine:.4f}"
    bound = "" if check.required_cosine is None else f", required {check.required_cosine:.4f}"
    texts = "" if check.completions is None else f", {check.completions.phrase}"
    raise BenchmarkError(
        f"the answers of {name} are wrong: {check.compared} compared{cosine}{bound}{texts}",
        hint="its timings are invalid; leave it out with --rivals",
    )
