"""Routes of text-embeddings-inference's API.

POST /embed  /embed_all  /embed_sparse  /predict  /similarity
POST /models/{id}/embed  ...                                         each of them, for one model
GET  /info

Without a model in the path, `model` in the body names the model. Without both, the first configured
model that fits the route answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deployments import __version__
from deployments.artifacts.types import TaskName
from deployments.errors import WrongTask
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.inference_requests import build_inference_request
from deployments.ingress.apis.shared.model_list import list_configured
from deployments.ingress.apis.shared.response_headers import INFERENCE_HEADERS
from deployments.ingress.apis.shared.tei_responses import TEI_ERROR_FORMAT, tei_response_headers
from deployments.ingress.apis.text_embeddings.schemas import (
    EmbedBody,
    PredictBody,
    PromptedBody,
    SimilarityBody,
    SparseValue,
    TeiInfo,
    encode_sparse_vectors,
    model_dtype,
    model_type,
    task_parameters,
    text_or_pair,
)
from deployments.ingress.http.api import (
    Access,
    Handler,
    Operation,
    build_schema,
    parse_body,
)
from deployments.ingress.http.bodies import JsonResponse, json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_fields import read_model_name
from deployments.ingress.requests import InferenceRequest, InferenceResponse
from deployments.ingress.token_ids import parse_token_ids
from deployments.tasks.base import TextParameters
from deployments.tasks.embedding import EmbeddingParameters, SimilarityParameters
from deployments.tasks.text_classification import LabelScore

B = TypeVar("B", bound=BaseModel)

# Field names for errors: the body has the parameters of the task at its top level.
TEI_FIELD_NAMES = {"parameters.": ""}
MODEL_PATH = "/models/{id:path}"
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "embed": {"two texts": {"inputs": ["A cat.", "A kitten."]}},
    "embed_all": {"one text": {"inputs": "A kitten."}},
    "embed_sparse": {"one text": {"inputs": "A kitten."}},
    "predict": {
        "one text": {"inputs": "A gorgeous, witty film."},
        "two texts": {"inputs": [["A gorgeous, witty film."], ["A dull one."]]},
    },
    "similarity": {
        "one with two": {
            "inputs": {"source_sentence": "A cat.", "sentences": ["A kitten.", "A tax."]}
        }
    },
}


class TextEmbeddingsRoutes:
    """Handlers of text-embeddings-inference's API."""

    name: ClassVar = "text-embeddings-inference"
    error_format: ClassVar = TEI_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        """Return the operations.

        `app.py` lists them before the Hugging Face API, whose model paths also match these paths.
        """
        embeddings, unpooled = (
            list[list[float]],
            "Embed texts without pooling, one vector per token",
        )
        return (
            _post("embed", self.embed, "Embed texts", EmbedBody, embeddings),
            _post("embed_all", self.embed_all, unpooled, PromptedBody, list[list[list[float]]]),
            _post(
                "embed_sparse",
                self.embed_sparse,
                "Sparse embeddings of a SPLADE model",
                PromptedBody,
                list[list[SparseValue]],
            ),
            _post(
                "predict",
                self.predict,
                "Classify texts or pairs of texts",
                PredictBody,
                list[LabelScore] | list[list[LabelScore]],
            ),
            _post(
                "similarity",
                self.similarity,
                "Similarity of a sentence with others",
                SimilarityBody,
                list[float],
            ),
            Operation(
                method="GET",
                paths=("/info",),
                handler=self.info,
                summary="Default model and the configured models",
                access=Access.INFER,
                response=build_schema(TeiInfo),
            ),
        )

    async def embed(self, request: Request) -> Response:
        body = await self._read_body(request, EmbedBody)
        with rename_error_fields(TEI_FIELD_NAMES):
            response = await self._infer(
                request,
                body,
                TaskName.FEATURE_EXTRACTION,
                parse_token_ids(body.inputs),
                {"normalize": True, **task_parameters(body, EmbeddingParameters)},
            )
        return json_response(response.result.value, headers=tei_response_headers(response))

    async def embed_all(self, request: Request) -> Response:
        """Return unpooled vectors, one per token, special tokens included."""
        body = await self._read_body(request, PromptedBody)
        response = await self._infer_prompted(request, body, TaskName.TOKEN_EMBEDDINGS)
        return json_response(response.result.value, headers=tei_response_headers(response))

    async def embed_sparse(self, request: Request) -> Response:
        """Return the nonzero weights of each text. A model that is not SPLADE is a WrongTask."""
        body = await self._read_body(request, PromptedBody)
        self._require_splade_model(read_model_name(request, body.model))
        response = await self._infer_prompted(request, body, TaskName.SPARSE_EMBEDDINGS)
        # Use a thread: encoding a million values takes tenths of a second.
        content = await asyncio.to_thread(encode_sparse_vectors, response.result.value)
        return JsonResponse(content, 200, tei_response_headers(response))

    async def predict(self, request: Request) -> Response:
        """Return all labels, best first: one list for a text or pair, else a list per item."""
        body = await self._read_body(request, PredictBody)
        inputs: Any = body.inputs
        is_batch = isinstance(inputs, list) and isinstance(inputs[0], list)
        function = {"function_to_apply": "none"} if body.raw_scores else {}
        with rename_error_fields(TEI_FIELD_NAMES):
            response = await self._infer(
                request,
                body,
                TaskName.TEXT_CLASSIFICATION,
                list(map(text_or_pair, inputs)) if is_batch else text_or_pair(inputs),
                {**task_parameters(body, TextParameters), **function},
            )
        labels = response.result.value
        return json_response(
            labels if is_batch else labels[0], headers=tei_response_headers(response)
        )

    async def similarity(self, request: Request) -> Response:
        body = await self._read_body(request, SimilarityBody)
        parameters = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
        response = await self._infer(
            request,
            body,
            TaskName.SENTENCE_SIMILARITY,
            body.inputs.model_dump(),
            parameters,
        )
        return json_response(response.result.value, headers=tei_response_headers(response))

    async def info(self, request: Request) -> Response:
        """Describe the default model as a TEI server does, and list the configured models."""
        model = self._pipeline.resolver.select(InferenceRequest(inputs=None)).model
        limits = self._pipeline.settings.limits
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
                max_client_batch_size=self._pipeline.admission.find_max_texts(model.manifest),
                auto_truncate=True,
                tokenization_workers=1,
                version=__version__,
                sha=None,
                docker_label=None,
                models=list_configured(self._pipeline),
            )
        )

    async def _read_body(self, request: Request, kind: type[B]) -> B:
        return parse_body(kind, await read_json_object(request, self._pipeline.settings.limits))

    async def _infer(
        self,
        request: Request,
        body: EmbedBody | PromptedBody | PredictBody | SimilarityBody,
        task: str,
        inputs: Any,
        parameters: Mapping[str, Any],
    ) -> InferenceResponse:
        return await self._pipeline.infer(
            build_inference_request(request, body, inputs, task, parameters)
        )

    async def _infer_prompted(
        self, request: Request, body: PromptedBody, task: TaskName
    ) -> InferenceResponse:
        with rename_error_fields(TEI_FIELD_NAMES):
            return await self._infer(
                request,
                body,
                task,
                parse_token_ids(body.inputs),
                task_parameters(body, SimilarityParameters),
            )

    def _require_splade_model(self, model_id: str | None) -> None:
        """Raise WrongTask, as the original does, if no default model does the task."""
        models = self._pipeline.permitted.open_models()
        if model_id is None and not any(TaskName.SPARSE_EMBEDDINGS in m.tasks for m in models):
            raise WrongTask(
                f"no served model does `{TaskName.SPARSE_EMBEDDINGS}`, which needs a SPLADE model. "
                "Use `/embed` for dense vectors"
            )


def _post(
    name: str, handler: Handler, summary: str, body: type[BaseModel], answer: Any
) -> Operation:
    return Operation(
        method="POST",
        paths=(f"/{name}", f"{MODEL_PATH}/{name}"),
        handler=handler,
        summary=summary,
        access=Access.INFER,
        body=build_schema(body),
        response=build_schema(answer),
        examples=EXAMPLES[name],
        runs_model=True,
        headers=INFERENCE_HEADERS,
    )
