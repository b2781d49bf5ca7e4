"""Who knows the right answers to compare served ones with."""

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
from deployments.artifacts.types import TaskName

# A manifest states the worst cosine over the build's probe texts; other texts may be a bit worse.
COSINE_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class CosineCheck:
    """The worst cosine over everything that was compared, and the least it may be."""

    what: str
    compared: int
    worst_cosine: float
    required_cosine: float

    @classmethod
    def of(cls, what: str, left: ArrayLike, right: ArrayLike, required: float) -> CosineCheck:
        """Row by row, both [N, W]."""
        cosines = row_cosines(left, right)
        return cls(what, len(cosines), float(cosines.min()) if len(cosines) else 0.0, required)

    @property
    def holds(self) -> bool:
        """Whether something was compared, and all of it is near enough."""
        return self.compared > 0 and self.worst_cosine >= self.required_cosine

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.what}: worst cosine {self.worst_cosine:.4f} of {self.compared}, "
            f"required {self.required_cosine:.4f}"
        )


def require_agreement(agreements: Iterable[CosineCheck]) -> None:
    """Raises BenchmarkError when one of them does not hold: the figures are then worth nothing."""
    for agreement in agreements:
        if not agreement.holds:
            raise BenchmarkError(
                f"wrong answers, so the figures mean nothing: {agreement.sentence}",
                hint="check that the store holds what is served, or build the model again",
            )


# Where no manifest is at hand to say how far company may move an int8 answer: far enough for the
# dynamic int8 graphs seen so far (0.97), too near for an answer to another text.
REPEATED_MIN_COSINE = 0.95


@dataclass(frozen=True, slots=True)
class ExpectedEmbeddings:
    """Knows the embeddings that texts should get, [N, W]."""

    name: str
    required_cosine: float
    embed_alone: Callable[[Sequence[str]], NDArray[np.float32]]

    def compare(self, texts: Sequence[str], answers: Sequence[Mapping[int, bytes]]) -> CosineCheck:
        """Kept HTTP answers, by index of the text that was asked, against the right ones.

        Raises BenchmarkError for an answer that is not one vector.
        """
        what = f"served against {self.name}"
        pairs = [(index, raw) for kept in answers for index, raw in sorted(kept.items())]
        if not pairs:
            return CosineCheck(what, 0, 0.0, self.required_cosine)
        asked = sorted({index for index, _ in pairs})
        right = dict(zip(asked, self.embed_alone([texts[i] for i in asked]), strict=True))
        given = [parse_embedding(body_of(raw)) for _, raw in pairs]
        expected = [right[index] for index, _ in pairs]
        return CosineCheck.of(what, np.stack(given), np.stack(expected), self.required_cosine)


def local_expectation(model: LocalModel, threads: int) -> ExpectedEmbeddings:
    """The engine in this process, on the artifact that is served."""

    def embed_alone(texts: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([embedding(v) for v in model.unbatched_values(texts, threads=threads)])

    required = model.candidate.parity.batched_cosine_worst - COSINE_SLACK
    return ExpectedEmbeddings(f"the local engine ({model.manifest.version})", required, embed_alone)


def repeated_expectation(client: Client, model_id: str) -> ExpectedEmbeddings:
    """The server itself, asked one text at a time."""

    def embed_alone(texts: Sequence[str]) -> NDArray[np.float32]:
        task = TaskName.FEATURE_EXTRACTION
        return np.stack([embedding(client.infer(task, model_id, text).value) for text in texts])

    return ExpectedEmbeddings("the same requests alone", REPEATED_MIN_COSINE, embed_alone)


def parse_embedding(body: bytes) -> NDArray[np.float32]:
    """The vector in a JSON answer for one text. Raises BenchmarkError."""
    try:
        return embedding(orjson.loads(body))
    except orjson.JSONDecodeError as exc:
        raise _not_one_vector(body) from exc


def embedding(value: Any) -> NDArray[np.float32]:
    """The vector [W] in an answer for one text, [[...]]. Raises BenchmarkError."""
    try:
        rows = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as exc:
        raise _not_one_vector(value) from exc
    if rows.ndim != 2 or rows.shape[0] != 1 or not np.isfinite(rows).all():
        raise _not_one_vector(value)
    vector: NDArray[np.float32] = rows[0]
    return vector


def body_of(raw: bytes) -> bytes:
    """The body of one whole HTTP answer."""
    collected = _Body()
    httptools.HttpResponseParser(collected).feed_data(raw)
    return b"".join(collected.parts)


class _Body:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def on_body(self, part: bytes) -> None:
        """Called by the parser."""
        self.parts.append(part)


def _not_one_vector(value: Any) -> BenchmarkError:
    return BenchmarkError(
        f"an answer is not one vector of numbers: {str(value)[:80]}",
        hint="name an embedding model with --model ID",
    )
