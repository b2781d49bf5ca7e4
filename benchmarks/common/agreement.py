"""Expected embeddings, and the comparison of served responses with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httptools
import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client
from benchmarks.common.local_model import LocalModel
from build_artifacts.evaluation.metrics import row_cosines
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import TaskName

# A manifest contains the worst cosines of the build's probe texts. Benchmark texts may have lower
# cosines. COSINE_SLACK is the margin for cosines to fp32 torch, BATCHED_COSINE_SLACK the margin for
# cosines between batched and unbatched outputs.
COSINE_SLACK = 0.01
BATCHED_COSINE_SLACK = 0.001
FP32_MIN_COSINE = 0.999


def required_cosine(model: LocalModel, *, is_sealed: bool) -> float:
    """Return the minimum cosine between an answer of a system and fp32 torch.

    If `is_sealed`, the system runs the artifact's graph. The minimum is then the limit of the
    accuracy gate minus COSINE_SLACK. For all other systems, the minimum is FP32_MIN_COSINE.
    """
    if not is_sealed:
        return FP32_MIN_COSINE
    return model.manifest.gate.cosine_worst - COSINE_SLACK


@dataclass(frozen=True, slots=True)
class CosineCheck:
    """The worst cosine of all compared vectors, and the lower bound that it must reach."""

    what: str
    compared: int
    worst_cosine: float
    required_cosine: float

    @classmethod
    def compare(cls, what: str, left: ArrayLike, right: ArrayLike, required: float) -> CosineCheck:
        """Compare `left` and `right`, both [texts, width], row by row."""
        cosines = row_cosines(left, right)
        return cls(what, len(cosines), float(cosines.min()) if len(cosines) else 0.0, required)

    @property
    def is_met(self) -> bool:
        """Whether the worst cosine reaches the bound; False if nothing was compared."""
        return self.compared > 0 and self.worst_cosine >= self.required_cosine

    @property
    def sentence(self) -> str:
        return (
            f"{self.what}: worst cosine {self.worst_cosine:.4f} of {self.compared}, "
            f"required {self.required_cosine:.4f}"
        )


def require_agreement(checks: Iterable[CosineCheck]) -> None:
    """Raise BenchmarkError if a check is not met, because timings of wrong answers are invalid."""
    for check in checks:
        if not check.is_met:
            raise BenchmarkError(
                f"the answers are wrong, so the timings are invalid: {check.sentence}",
                hint="check that --store holds the served version, or build the model again",
            )


# Required cosine for servers whose manifest is not read. How much batching changes their outputs is
# unknown, so the limit applies that the accuracy gate sets for every model.
REPEATED_MIN_COSINE = Gate().batched_cosine_worst


@dataclass(frozen=True, slots=True)
class ExpectedEmbeddings:
    """Source of the correct embeddings of texts. `embed_unbatched` returns [texts, width]."""

    name: str
    required_cosine: float
    embed_unbatched: Callable[[Sequence[str]], NDArray[np.float32]]

    def compare(
        self, texts: Sequence[str], responses: Sequence[Mapping[int, bytes]]
    ) -> CosineCheck:
        """Compare raw HTTP responses with the correct embeddings of `texts`.

        `responses` holds one mapping per load level: from the index in `texts` to the response.
        Raise BenchmarkError for a response that is not one vector.
        """
        what = f"served against {self.name}"
        pairs = [(index, raw) for level in responses for index, raw in sorted(level.items())]
        if not pairs:
            return CosineCheck(what, 0, 0.0, self.required_cosine)
        indices = sorted({index for index, _ in pairs})
        embeddings = self.embed_unbatched([texts[i] for i in indices])
        by_index = dict(zip(indices, embeddings, strict=True))
        actual = np.stack([parse_embedding(extract_body(raw)) for _, raw in pairs])
        expected = np.stack([by_index[index] for index, _ in pairs])
        return CosineCheck.compare(what, actual, expected, self.required_cosine)


def local_expectation(model: LocalModel, threads: int) -> ExpectedEmbeddings:
    """Expect the embeddings that an engine in this process computes from the served artifact."""

    def embed_unbatched(texts: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([to_vector(v) for v in model.unbatched_values(texts, threads=threads)])

    required = model.candidate.parity.batched_cosine_worst - BATCHED_COSINE_SLACK
    name = f"the local engine ({model.manifest.version})"
    return ExpectedEmbeddings(name, required, embed_unbatched)


def repeated_expectation(client: Client, model_id: str) -> ExpectedEmbeddings:
    """Expect the embeddings that the server returns if requests are sent one at a time."""

    def embed_unbatched(texts: Sequence[str]) -> NDArray[np.float32]:
        task = TaskName.FEATURE_EXTRACTION
        return np.stack([to_vector(client.infer(task, model_id, text).value) for text in texts])

    return ExpectedEmbeddings("the same requests alone", REPEATED_MIN_COSINE, embed_unbatched)


def parse_embedding(body: bytes) -> NDArray[np.float32]:
    """Parse the JSON response to one text. Raises BenchmarkError if it is not one vector."""
    try:
        return to_vector(orjson.loads(body))
    except orjson.JSONDecodeError as exc:
        raise _not_one_vector(body) from exc


def to_vector(value: Any) -> NDArray[np.float32]:
    """Convert the value `[[...]]` of the response to one text to a vector [width].

    Raises BenchmarkError if the value is not one vector of finite numbers.
    """
    try:
        rows = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as exc:
        raise _not_one_vector(value) from exc
    if rows.ndim != 2 or rows.shape[0] != 1 or not np.isfinite(rows).all():
        raise _not_one_vector(value)
    vector: NDArray[np.float32] = rows[0]
    return vector


def is_same_embedding(expected: Any, value: Any, min_cosine: float) -> bool:
    """Return whether the embeddings in two responses have at least the cosine `min_cosine`.

    Return False if a value is not one vector, or if the vectors differ in length.
    """
    try:
        left, right = to_vector(expected), to_vector(value)
    except BenchmarkError:
        return False
    return left.shape == right.shape and bool(row_cosines([left], [right])[0] >= min_cosine)


def is_same_completion(expected: Any, value: Any) -> bool:
    """Return whether the first choices of two `/v1/completions` responses have the same text."""
    return bool(expected["choices"][0]["text"] == value["choices"][0]["text"])


def extract_body(raw: bytes) -> bytes:
    """Return the body of one complete HTTP response, with chunks merged."""
    collected = _BodyCollector()
    httptools.HttpResponseParser(collected).feed_data(raw)
    return b"".join(collected.chunks)


class _BodyCollector:
    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def on_body(self, chunk: bytes) -> None:
        """Store a part of the body. The parser calls this method."""
        self.chunks.append(chunk)


def _not_one_vector(value: Any) -> BenchmarkError:
    return BenchmarkError(
        f"a response is not one vector of numbers: {str(value)[:80]}",
        hint="name an embedding model with --model ID",
    )
