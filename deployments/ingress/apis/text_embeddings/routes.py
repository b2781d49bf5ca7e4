"""The API of text-embeddings-inference, over several models.

POST /embed  /embed_all  /predict  /similarity              the first model that can, or `model`
POST /tokenize  /decode                                     likewise
POST /embed_sparse                                          refused: no graph here gives that
POST /models/{id}/embed  ...                                the same of one model
GET  /info
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TaskName
from deployments.errors import (
    ArtifactError,
    EmptyInput,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    UnknownParameter,
    UnknownToken,
    WrongTask,
)
from deployments.ingress.apis.model_list import build_model_list
from deployments.ingress.apis.response_headers import (
    INFERENCE_HEADERS,
    inference_headers,
    retry_headers,
)
from deployments.ingress.apis.text_embeddings.schemas import (
    DecodeBody,
    EmbedAllBody,
    EmbedBody,
    PredictBody,
    SimilarityBody,
    SimpleToken,
    TeiInfo,
    TokenizeBody,
    build_simple_tokens,
    model_dtype,
    model_type,
    task_parameters,
    text_or_pair,
)
from deployments.ingress.http.api import Handler, Operation, parse_body, schema_of
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields, status_and_type
from deployments.ingress.http.request_options import model_in_body, model_in_path, read_options
from deployments.ingress.service import InferenceRequest, InferenceResponse, InferenceService
from deployments.ingress.tokenization import parse_token_ids, token_sequences
from deployments.release import RELEASE
from deployments.tasks.base import TextParameters
from deployments.tasks.embedding import EmbeddingParameters, SimilarityParameters
from deployments.tasks.text_classification import LabelScore

# Status and `error_type` by kind of error; others keep their status.
ERRORS: Mapping[type[ServeError], tuple[int, str]] = {
    EmptyInput: (400, "Empty"),
    InvalidField: (422, "Validation"),
    UnknownParameter: (422, "Validation"),
    UnknownToken: (422, "Validation"),
    InputTooLong: (422, "Validation"),
    TooManyItems: (422, "Validation"),
    HardwareUnavailable: (422, "Validation"),
    WrongTask: (424, "Backend"),
    EngineFailed: (424, "Backend"),
    Overloaded: (429, "Overloaded"),
    ModelLoading: (503, "Unhealthy"),
    ArtifactError: (503, "Unhealthy"),
}


def build_tei_error(error: ServeError) -> Response:
    """`error_type` in Title case, as its server writes it, not as its documents say."""
    status, kind = status_and_type(error, ERRORS, refused="Validation", failed="Backend")
    body = {"error": error.message, "error_type": kind, "code": error.code}
    return json_response(body, status=status, headers=retry_headers(error))


B = TypeVar("B", bound=BaseModel)

# Parameters stand beside `inputs` here.
TEI_FIELD_NAMES = {"parameters.": ""}
MODEL_PATH = "/models/{id:path}"
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "embed": {"two texts": {"inputs": ["A cat.", "A kitten."]}},
    "embed_all": {"one text": {"inputs": "A kitten."}},
    "predict": {
        "one text": {"inputs": "A gorgeous, witty film."},
        "two texts": {"inputs": [["A gorgeous, witty film."], ["A dull one."]]},
    },
    "similarity": {
        "one with two": {
            "inputs": {"source_sentence": "A cat.", "sentences": ["A kitten.", "A tax."]}
        }
    },
    "tokenize": {"one text": {"inputs": "A kitten."}},
    "decode": {"one sequence": {"ids": [101, 1037, 18401, 1012, 102]}},
}
SUFFIXES = ("embed", "embed_all", "embed_sparse", "predict", "similarity", "tokenize", "decode")
# `/rerank` is served by another family, and speaks this one's language until its body says more.
OWN_NAMES = frozenset({*SUFFIXES, "rerank"})


class TextEmbeddingsRoutes:
    """Handlers of the family."""

    name: ClassVar = "text-embeddings-inference"

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def operations(self) -> Sequence[Operation]:
        """The per-model forms must stand before the Hugging Face family's greedy path."""
        vectors, no_such = list[list[float]], "not possible with the models served here"
        every = "The vector of every token, as the model gives it before pooling"
        return (
            _post("embed", self.embed, "Embeddings", EmbedBody, vectors),
            _post("embed_all", self.embed_all, every, EmbedAllBody, list[list[list[float]]]),
            _post("embed_sparse", self.embed_sparse, f"Sparse vectors: {no_such}", EmbedBody, Any),
            _post(
                "predict",
                self.predict,
                "Labels of a text, of a pair of texts, or of several of these",
                PredictBody,
                list[LabelScore] | list[list[LabelScore]],
            ),
            _post("similarity", self.similarity, "Cosines", SimilarityBody, list[float]),
            _post("tokenize", self.tokenize, "Tokens", TokenizeBody, list[list[SimpleToken]]),
            _post("decode", self.decode, "Texts of token ids", DecodeBody, list[str]),
            Operation(
                method="GET",
                paths=("/info",),
                handler=self.info,
                summary="The default model, and all others",
                response=schema_of(TeiInfo),
            ),
        )

    def owns(self, path: str) -> bool:
        """The routes above, and `/rerank`."""
        parts = path.strip("/").split("/")
        return parts[-1] in OWN_NAMES and (len(parts) == 1 or parts[0] == "models")

    async def embed(self, request: Request) -> Response:
        """Vectors, one for each text, of length 1 unless `normalize` says otherwise."""
        body = await self._get_operation(request, EmbedBody)
        with rename_error_fields(TEI_FIELD_NAMES):
            response = await self._infer(
                request,
                body.model,
                TaskName.FEATURE_EXTRACTION,
                parse_token_ids(body.inputs),
                {"normalize": True, **task_parameters(body, EmbeddingParameters)},
            )
        return json_response(response.result.value, headers=tei_response_headers(response))

    async def embed_all(self, request: Request) -> Response:
        """Vectors as they are, one for each token, special ones included."""
        body = await self._get_operation(request, EmbedAllBody)
        with rename_error_fields(TEI_FIELD_NAMES):
            response = await self._infer(
                request,
                body.model,
                TaskName.TOKEN_EMBEDDINGS,
                parse_token_ids(body.inputs),
                task_parameters(body, SimilarityParameters),
            )
        return json_response(response.result.value, headers=tei_response_headers(response))

    async def embed_sparse(self, request: Request) -> Response:
        """Refused: nothing sealed here has a SPLADE head."""
        raise await self._unsupported_error(
            request, "is not a SPLADE model; `/embed` gives dense vectors"
        )

    async def predict(self, request: Request) -> Response:
        """All labels, best first: flat for one text or pair, nested for a list of these."""
        body = await self._get_operation(request, PredictBody)
        given = body.inputs
        batch = isinstance(given, list) and isinstance(given[0], list)
        function = {"function_to_apply": "none"} if body.raw_scores else {}
        with rename_error_fields(TEI_FIELD_NAMES):
            response = await self._infer(
                request,
                body.model,
                TaskName.TEXT_CLASSIFICATION,
                [text_or_pair(one) for one in given] if batch else text_or_pair(given),
                {**task_parameters(body, TextParameters), **function},
            )
        labels = response.result.value
        return json_response(labels if batch else labels[0], headers=tei_response_headers(response))

    async def similarity(self, request: Request) -> Response:
        """Cosines of one sentence with others."""
        body = await self._get_operation(request, SimilarityBody)
        asked = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
        response = await self._infer(
            request,
            body.model,
            TaskName.SENTENCE_SIMILARITY,
            body.inputs.model_dump(),
            {"truncate": True, **asked},
        )
        return json_response(response.result.value, headers=tei_response_headers(response))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of each text, and where they stand in it."""
        body = await self._get_operation(request, TokenizeBody)
        question = InferenceRequest(
            inputs=body.inputs,
            model_id=select_model_id(request, body.model),
            parameters={"prompt_name": body.prompt_name},
        )
        with rename_error_fields(TEI_FIELD_NAMES):
            spelled = await self._service.tokenize(
                question, special=body.add_special_tokens is not False
            )
        # Off the event loop: describing a hundred thousand tokens takes tenths of a second.
        return json_response(
            await asyncio.to_thread(lambda: list(map(build_simple_tokens, spelled)))
        )

    async def decode(self, request: Request) -> Response:
        """The text of each sequence of token ids."""
        body = await self._get_operation(request, DecodeBody)
        question = InferenceRequest(
            inputs=token_sequences(body.ids, path="ids"),
            model_id=select_model_id(request, body.model),
        )
        skip = body.skip_special_tokens is not False
        return json_response(await self._service.decode(question, skip_special=skip))

    async def info(self, request: Request) -> Response:
        """The default model as one server of its own would tell, and the list of all."""
        model = self._service.find_model(InferenceRequest(inputs=None))
        limits = self._service.settings.limits
        return json_response(
            TeiInfo(
                model_id=model.ref.id,
                model_sha=model.manifest.source.revision,
                model_dtype=model_dtype(model.manifest),
                served_model_name=model.ref.id,
                model_type=model_type(model.manifest),
                max_concurrent_requests=limits.inflight_items,
                max_input_length=model.manifest.max_tokens,
                max_batch_tokens=None,
                max_batch_requests=None,
                max_client_batch_size=limits.items,
                auto_truncate=True,
                tokenization_workers=1,
                version=RELEASE,
                sha=None,
                docker_label=None,
                models=build_model_list(self._service)["data"],
            )
        )

    async def _get_operation(self, request: Request, kind: type[B]) -> B:
        return parse_body(kind, await read_json_object(request, self._service.settings.limits))

    async def _infer(
        self,
        request: Request,
        model: str | None,
        task: str,
        inputs: Any,
        parameters: Mapping[str, Any],
    ) -> InferenceResponse:
        return await self._service.infer(
            InferenceRequest(
                inputs=inputs,
                model_id=select_model_id(request, model),
                task=task,
                parameters=parameters,
                options=read_options(None, request.headers),
            )
        )

    async def _unsupported_error(self, request: Request, why: str) -> ServeError:
        body = await self._get_operation(request, EmbedBody)
        model = self._service.find_model(
            InferenceRequest(
                inputs=None,
                model_id=select_model_id(request, body.model),
                task=TaskName.FEATURE_EXTRACTION,
            )
        )
        return WrongTask(f"Model {model.ref.id} {why}")

    def error_response(self, error: ServeError) -> Response:
        """TEI's statuses and words."""
        return build_tei_error(error)


def select_model_id(request: Request, named: str | None) -> str | None:
    """The model in the path, else the one that the body names."""
    return model_in_path(request) or model_in_body(named)


def tei_response_headers(response: InferenceResponse) -> dict[str, str]:
    """Where the time went, in whole milliseconds, beside what every family tells."""
    timings = response.result.timings
    told = {
        "x-compute-time": response.total_s,
        "x-total-time": response.total_s,
        "x-tokenization-time": timings.tokenize_s,
        "x-queue-time": timings.queue_s,
        "x-inference-time": timings.forward_s,
    }
    times = {name: str(round(seconds * 1e3)) for name, seconds in told.items()}
    return {**inference_headers(response), **times}


def _post(
    name: str, handler: Handler, summary: str, body: type[BaseModel], answer: Any
) -> Operation:
    return Operation(
        method="POST",
        paths=(f"/{name}", f"{MODEL_PATH}/{name}"),
        handler=handler,
        summary=summary,
        body=schema_of(body),
        response=schema_of(answer),
        examples=EXAMPLES.get(name, {}),
        runs_model=True,
        headers=INFERENCE_HEADERS,
    )
