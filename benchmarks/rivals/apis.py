"""HTTP APIs of the measured servers: request bodies and parsers of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import build_inference_body, task_path
from deployments.artifacts.types import TaskName

NEW_TOKENS = 64  # maximum number of tokens per completion; the model may end earlier

Texts = Sequence[str]
Vectors = NDArray[np.float32]  # [texts, width]


class CompletedText(NamedTuple):
    """A generated text. `tokens` is its length as the server reports it."""

    text: str
    tokens: int


class EmbeddingApi(NamedTuple):
    """API that embeds one or several texts.

    `parse` raises BenchmarkError for an answer that is not JSON, or whose vectors are no rows of
    finite numbers.
    """

    path: str
    build: Callable[[Texts], bytes]
    parse: Callable[[bytes], Vectors]


class CompletionApi(NamedTuple):
    """API that completes one prompt greedily.

    `parse` raises BenchmarkError for an answer that is no JSON object with `choices` and `usage`.
    """

    path: str
    build: Callable[[Texts], bytes]
    parse: Callable[[bytes], CompletedText]


Api = EmbeddingApi | CompletionApi


def hugging_face_api(model_id: str) -> EmbeddingApi:
    """Return the pipeline API of Hundredfold. Requests bypass the response cache."""
    path = task_path(TaskName.FEATURE_EXTRACTION, model_id)
    return EmbeddingApi(path, lambda texts: build_inference_body(_one_or_many(texts)), _rows)


def inputs_api(path: str = "/embed") -> EmbeddingApi:
    """Return the API of the scripts in `programs/`: `{"inputs": ...}` returns a list of vectors."""
    return EmbeddingApi(path, lambda texts: orjson.dumps({"inputs": _one_or_many(texts)}), _rows)


def openai_api(path: str, model: str) -> EmbeddingApi:
    def build(texts: Texts) -> bytes:
        return orjson.dumps({"model": model, "input": _one_or_many(texts)})

    def parse(body: bytes) -> Vectors:
        return _to_vectors([entry["embedding"] for entry in _load(body, "data")], body)

    return EmbeddingApi(path, build, parse)


def open_inference_api(model: str) -> EmbeddingApi:
    """Return the API of the Open Inference Protocol in JSON. One input contains all texts."""

    def build(texts: Texts) -> bytes:
        tensor = {"name": "texts", "shape": [len(texts), 1], "datatype": "BYTES"}
        return orjson.dumps({"inputs": [{**tensor, "data": list(texts)}]})

    def parse(body: bytes) -> Vectors:
        (output,) = _load(body, "outputs")
        return _to_vectors(np.reshape(output["data"], output["shape"]), body)

    return EmbeddingApi(f"/v2/models/{model}/infer", build, parse)


def completion_api(model: str) -> CompletionApi:
    """Return the API `/v1/completions` of OpenAI, without streaming."""

    def build(texts: Texts) -> bytes:
        (prompt,) = texts
        settings = {"max_tokens": NEW_TOKENS, "temperature": 0}
        return orjson.dumps({"model": model, "prompt": prompt, **settings})

    def parse(body: bytes) -> CompletedText:
        (choice,) = _load(body, "choices")
        return CompletedText(choice["text"], int(_load(body, "usage")["completion_tokens"]))

    return CompletionApi("/v1/completions", build, parse)


def _one_or_many(texts: Texts) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)


def _rows(body: bytes) -> Vectors:
    return _to_vectors(_decode(body), body)


def _load(body: bytes, key: str) -> Any:
    value = _decode(body)
    if not isinstance(value, dict) or key not in value:
        raise _unexpected(body, f"an object with `{key}`")
    return value[key]


def _decode(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise _unexpected(body, "JSON") from exc


def _to_vectors(value: Any, body: bytes) -> Vectors:
    try:
        rows = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as exc:
        raise _unexpected(body, "a list of vectors") from exc
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise _unexpected(body, "a list of vectors of finite numbers")
    return rows


def _unexpected(body: bytes, expected: str) -> BenchmarkError:
    return BenchmarkError(
        f"expected {expected}, the answer is: {body[:120].decode(errors='replace')}",
        hint="see the log of the server",
    )
