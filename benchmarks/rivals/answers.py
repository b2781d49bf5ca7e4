"""Comparison of server answers with fp32 torch on the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.agreement import COSINE_SLACK, extract_body, to_vector
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel, open_torch
from benchmarks.rivals.apis import Api, CompletionApi, EmbeddingApi
from benchmarks.rivals.materials import Materials
from benchmarks.rivals.results import AnswerCheck
from benchmarks.rivals.workloads import TextRequest
from build_artifacts.evaluation.metrics import row_cosines
from deployments.host.machine import usable_cores

FP32_MIN_COSINE = 0.999

EmbedTexts = Callable[[Sequence[str]], NDArray[np.float32]]  # returns vectors [texts, width]


class RawAnswer(NamedTuple):
    """The texts of a request and the raw HTTP response."""

    request: TextRequest
    response: bytes


class ReferenceEmbeddings:
    """Embeddings by the checkpoint in fp32 torch, computed once per text."""

    def __init__(self, embed: EmbedTexts) -> None:
        self._embed = embed
        self._known: dict[str, NDArray[np.float32]] = {}

    @classmethod
    def open(cls, model: LocalModel, materials: Materials) -> ReferenceEmbeddings:
        """Open the checkpoint of `model` in torch. Raises ServeError if it is unusable."""
        threads = usable_cores()
        source = str(materials.checkpoint)
        engine = open_torch(source, model.manifest, materials.scratch, threads)

        def embed(texts: Sequence[str]) -> NDArray[np.float32]:
            values = model.unbatched_values(texts, threads=threads, engine=engine)
            return np.stack([to_vector(value) for value in values])

        return cls(embed)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings [texts, width]. Compute them for new texts only."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._embed(new), strict=True))
        return np.stack([self._known[text] for text in texts])


def required_cosine(model: LocalModel, *, is_sealed: bool) -> float:
    """Return the minimum cosine between an answer and fp32 torch.

    If `is_sealed`, the server runs the artifact's graph. The minimum is then the limit of the
    accuracy gate minus COSINE_SLACK. For all other servers, the minimum is FP32_MIN_COSINE.
    """
    if not is_sealed:
        return FP32_MIN_COSINE
    return model.manifest.gate.cosine_worst - COSINE_SLACK


def check_answers(
    api: Api, answers: Iterable[RawAnswer], references: ReferenceEmbeddings, required: float
) -> AnswerCheck:
    """Compare embeddings with the references, or count the tokens of completions.

    Raises BenchmarkError if `api.parse` rejects an answer, or if the number of vectors is wrong.
    """
    if not isinstance(api, EmbeddingApi):
        tokens = [count_tokens(api, answer) for answer in answers]
        return AnswerCheck(
            compared=sum(count > 0 for count in tokens),
            worst_cosine=None,
            required_cosine=None,
            tokens_per_response=float(np.mean(tokens)) if tokens else None,
        )
    bodies = [(answer.request, extract_body(answer.response)) for answer in answers]
    cosines = [
        row_cosines(_require_rows(api.parse(body), len(texts)), references.embed(texts))
        for texts, body in bodies
    ]
    return AnswerCheck(
        compared=sum(map(len, cosines)),
        worst_cosine=min((float(row.min()) for row in cosines), default=0.0),
        required_cosine=required,
        tokens_per_response=None,
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
    raise BenchmarkError(
        f"the answers of {name} are wrong: {check.compared} compared{cosine}{bound}",
        hint="its timings are invalid; leave it out with --rivals",
    )
