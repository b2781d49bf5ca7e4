"""Routes of the rerank APIs, of vLLM's scores and of Infinity's classification.

POST /rerank  /v1/rerank  /v2/rerank          `texts`: response of text-embeddings-inference
                                              `documents`: response of Cohere, Jina, Infinity
POST /models/{id}/rerank  .../v1/rerank  .../v2/rerank
POST /score  /v1/score                        vLLM
POST /models/{id}/score  .../v1/score
POST /classify  /models/{id}/classify         Infinity
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField
from deployments.ingress.apis.rerank.schemas import (
    UNSUPPORTED_RERANK_FIELDS,
    ClassifyBody,
    ClassifyResponse,
    DocumentsBody,
    PairScore,
    RerankResponse,
    ScoreBody,
    ScoreResponse,
    ScoringResponse,
    TextsBody,
    build_ranked_document,
    document_text,
)
from deployments.ingress.apis.shared.cohere_forms import (
    COHERE_ERROR_FORMAT,
    build_cohere_meta,
    read_api_version,
)
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.inference_requests import (
    InferenceBody,
    build_inference_request,
)
from deployments.ingress.apis.shared.response_headers import (
    INFERENCE_HEADERS,
    inference_headers,
)
from deployments.ingress.apis.shared.tei_responses import TEI_ERROR_FORMAT, tei_response_headers
from deployments.ingress.apis.shared.token_usage import Usage, build_embeddings_usage
from deployments.ingress.apis.shared.unsupported_fields import reject_unsupported_fields
from deployments.ingress.choices import gather_or_cancel
from deployments.ingress.http.api import (
    Access,
    ErrorFormat,
    Operation,
    build_schema,
    parse_body,
    use_error_format,
)
from deployments.ingress.http.application import route_path
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.limits import check_count
from deployments.ingress.requests import InferenceResponse
from deployments.tasks.ranking import RankedText, RankingParameters

# Fields of an InferenceRequest and their names in the body, for errors.
TEXTS_FIELDS = {"inputs.": "", "parameters.": ""}
DOCUMENTS_FIELDS = {"inputs.texts": "documents", "inputs.": "", "parameters.": ""}
SCORE_FIELDS = {"inputs.texts": "text_2", "inputs.query": "text_1", "parameters.": ""}
CLASSIFY_FIELDS = {"inputs": "input", "parameters.": ""}
VERSIONED_PATHS = ("/v1/rerank", "/v2/rerank")
# Paths that text-embeddings-inference (TEI) also has. Errors have TEI's format unless the body has
# `documents` and no `texts`.
TEI_PATHS = ("/rerank",)
SEARCH = {"query": "Which animal purrs?", "top_n": 1}
ANIMALS = ["A dog barks.", "A cat purrs."]


class RerankRoutes:
    """Handlers of the rerank APIs and of `/classify`."""

    name: ClassVar = "Rerank"
    error_format: ClassVar = COHERE_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        """Return the operations.

        `app.py` lists them before the Hugging Face API, whose model paths also match these paths.
        """
        return (
            self._rerank_operation(VERSIONED_PATHS, COHERE_ERROR_FORMAT),
            self._rerank_operation(TEI_PATHS, TEI_ERROR_FORMAT, COHERE_ERROR_FORMAT),
            Operation(
                method="POST",
                paths=_with_models("/v1/score", "/score"),
                handler=self.score,
                summary="Score pairs of texts",
                access=Access.INFER,
                body=build_schema(ScoreBody),
                response=build_schema(ScoreResponse),
                examples={"one with two": {"text_1": SEARCH["query"], "text_2": ANIMALS}},
                runs_model=True,
                headers=INFERENCE_HEADERS,
            ),
            Operation(
                method="POST",
                paths=_with_models("/classify"),
                handler=self.classify,
                summary="Classify texts",
                access=Access.INFER,
                body=build_schema(ClassifyBody),
                response=build_schema(ClassifyResponse),
                examples={"one text": {"input": ["A gorgeous, witty film."]}},
                runs_model=True,
                headers=INFERENCE_HEADERS,
            ),
        )

    def _rerank_operation(self, paths: tuple[str, ...], *error_formats: ErrorFormat) -> Operation:
        return Operation(
            method="POST",
            paths=_with_models(*paths),
            handler=self.rerank,
            summary="Rank texts or documents by relevance to a query",
            access=Access.INFER,
            body={"anyOf": [build_schema(TextsBody), build_schema(DocumentsBody)]},
            response={"anyOf": [build_schema(list[RankedText]), build_schema(RerankResponse)]},
            examples={
                "texts": {"query": SEARCH["query"], "texts": ANIMALS},
                "documents": {**SEARCH, "documents": ANIMALS, "return_documents": True},
            },
            runs_model=True,
            headers=INFERENCE_HEADERS,
            error_formats=error_formats,
        )

    async def rerank(self, request: Request) -> Response:
        """Return a list for `texts`, else an object with the best `top_n` for `documents`.

        A body with both is ranked by `texts`.
        """
        body = await read_json_object(request, self._pipeline.settings.limits)
        if body.get("texts") is not None:
            return await self._rank_texts(request, parse_body(TextsBody, body))
        if "documents" not in body:
            missing = "texts" if self._is_tei_path(request) else "documents"
            raise InvalidField(f"Error in `{missing}`: field required", field=missing)
        use_error_format(request, COHERE_ERROR_FORMAT)
        return await self._rank_documents(request, parse_body(DocumentsBody, body))

    async def _rank_texts(self, request: Request, body: TextsBody) -> Response:
        parameters = body.model_dump(include=set(RankingParameters.model_fields), exclude_none=True)
        with rename_error_fields(TEXTS_FIELDS):
            response = await self._rank(request, body, body.query, body.texts, parameters)
        return json_response(response.result.value, headers=tei_response_headers(response))

    async def _rank_documents(self, request: Request, body: DocumentsBody) -> Response:
        reject_unsupported_fields(body, UNSUPPORTED_RERANK_FIELDS)
        texts = [document_text(document) for document in body.documents]
        parameters = body.model_dump(include={"raw_scores", "instruction"}, exclude_none=True)
        with rename_error_fields(DOCUMENTS_FIELDS):
            response = await self._rank(request, body, body.query, texts, parameters)
        returned_texts = texts if body.return_documents else None
        bare = self._is_tei_path(request)
        shared = build_scoring_response(response)
        content = {
            **shared,
            "object": "rerank",
            "results": [
                build_ranked_document(ranked, returned_texts, bare=bare)
                for ranked in response.result.value[: body.top_n]
            ],
            "meta": build_cohere_meta(read_api_version(request), shared["usage"]["prompt_tokens"]),
        }
        return json_response(content, headers=inference_headers(response))

    async def _rank(
        self,
        request: Request,
        body: InferenceBody,
        query: str,
        texts: Sequence[str],
        parameters: Mapping[str, Any],
    ) -> InferenceResponse:
        return await self._pipeline.infer(
            build_inference_request(
                request,
                body,
                {"query": query, "texts": texts},
                TaskName.TEXT_RANKING,
                parameters,
            )
        )

    async def score(self, request: Request) -> Response:
        """Return the score of each pair, in the order of the request."""
        raw = await read_json_object(request, self._pipeline.settings.limits)
        body = parse_body(ScoreBody, raw)
        queries, texts = _list(body.text_1), _list(body.text_2)
        check_count("text_1", len(queries), self._pipeline.settings.limits.items)
        if len(queries) not in (1, len(texts)):
            raise InvalidField(
                f"`text_1` has {len(queries)} texts and `text_2` {len(texts)}; send one text in "
                "`text_1`, or as many as in `text_2`",
                field="text_1",
            )
        parameters = body.model_dump(include={"instruction"}, exclude_none=True)
        groups = [texts] if len(queries) == 1 else [[text] for text in texts]
        with rename_error_fields(SCORE_FIELDS):
            responses = await gather_or_cancel(
                [
                    self._rank(request, body, query, group, parameters)
                    for query, group in zip(queries, groups, strict=True)
                ]
            )
        scores = [
            ranked["score"]
            for response in responses
            for ranked in sorted(response.result.value, key=itemgetter("index"))
        ]
        tokens = sum(response.result.timings.tokens for response in responses)
        content = {
            **build_scoring_response(responses[0]),
            "usage": Usage(prompt_tokens=tokens, total_tokens=tokens),
            "object": "list",
            "data": [
                PairScore(index=index, object="score", score=score)
                for index, score in enumerate(scores)
            ],
        }
        return json_response(content, headers=inference_headers(responses[0]))

    async def classify(self, request: Request) -> Response:
        """Return all labels of each text, best first."""
        raw = await read_json_object(request, self._pipeline.settings.limits)
        body = parse_body(ClassifyBody, raw)
        function = {"function_to_apply": "none"} if body.raw_scores else {}
        with rename_error_fields(CLASSIFY_FIELDS):
            response = await self._pipeline.infer(
                build_inference_request(
                    request,
                    body,
                    body.input,
                    TaskName.TEXT_CLASSIFICATION,
                    {"truncate": True, **function},
                )
            )
        shared = build_scoring_response(response)
        content = {**shared, "object": "classify", "data": response.result.value}
        return json_response(content, headers=inference_headers(response))

    def _is_tei_path(self, request: Request) -> bool:
        """Return whether text-embeddings-inference also has the path of the request."""
        return not route_path(request.scope).endswith(VERSIONED_PATHS)


def _with_models(*paths: str) -> tuple[str, ...]:
    """Return the paths, and each of them below a model; longer paths must come first."""
    return *paths, *(f"/models/{{id:path}}{path}" for path in paths)


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def build_scoring_response(response: InferenceResponse) -> ScoringResponse:
    return ScoringResponse(
        id=str(uuid.uuid4()),
        created=int(time.time()),
        model=response.model.ref.id,
        usage=build_embeddings_usage(response),
    )
