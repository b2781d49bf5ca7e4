"""Routes of the Hugging Face Inference API: one model per path.

POST /  /v1  /invocations               `model` of the body, else the default model
POST /models/{id}  /models/{id}/v1      the task that the body matches, else the model's first
POST /models/{id}/pipeline/{task}       the task of the path
POST /pipeline/{task}/{id}              the same, older form
GET  /models  /models/{id}  /models/{id}/info  /models/{id}/health  /status/{id}

Two other packages define the requests and responses of generative models: text_generation for
decoder-only models, text2text for encoder-decoder models.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TaskName
from deployments.builds.estimates import BuildStatus
from deployments.builds.record import ENDS
from deployments.errors import ArtifactMissing, UnknownModel
from deployments.ingress.apis.huggingface.model_status import (
    ModelStatus,
    describe_served,
    describe_unserved,
)
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.envelope import (
    TASK_PARAMETER_KEYS,
    check_task_keys,
    find_task_inputs,
    merge_task_parameters,
    parse_envelope,
    parse_task,
    parse_task_inputs,
)
from deployments.ingress.apis.shared.model_list import (
    build_model_facts,
    build_short_path_list,
    build_version_facts,
    is_loaded,
)
from deployments.ingress.apis.shared.response_headers import (
    INFERENCE_HEADERS,
    inference_headers,
)
from deployments.ingress.apis.text2text.requests import resolve_generation_task
from deployments.ingress.apis.text2text.routes import (
    TEXT2TEXT_EXAMPLE,
    TEXT2TEXT_RESPONSE,
    TextToTextHandler,
    text2text_body_schemas,
)
from deployments.ingress.apis.text_generation.handler import TextGenerationHandler
from deployments.ingress.apis.text_generation.responses import TGI_ERROR_FORMAT, TGI_HEADERS
from deployments.ingress.apis.text_generation.routes import (
    ENVELOPE_EXAMPLE,
    ENVELOPE_RESPONSE,
    EVENT_SCHEMA,
    envelope_body_schema,
)
from deployments.ingress.apis.text_generation.schemas import GenerateParameters
from deployments.ingress.devices.cluster_state import model_loading_error
from deployments.ingress.http.api import Access, Operation, build_schema
from deployments.ingress.http.bodies import json_response, read_json
from deployments.ingress.http.error_responses import DEFAULT_ERROR_FORMAT
from deployments.ingress.http.request_fields import model_in_path, read_model_name, read_options
from deployments.ingress.http.sse import SseResponse, build_event
from deployments.ingress.models.resolver import has_encoder
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import InferenceRequest, InferenceResponse
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS
from deployments.tasks.inputs import JsonSchema
from deployments.tasks.text_classification import LabelScore

# huggingface_hub reads zero-shot responses as lists since version 1.2. Older versions read objects.
HUB_CLIENT = re.compile(r"hf_hub/(\d{1,9})\.(\d{1,9})")
LIST_SINCE_VERSION = (1, 2)

EVENT_TYPE = "text/event-stream"
# Parameters of text generation that no encoder task has.
GENERATION_KEYS = GenerateParameters.model_fields.keys() - TASK_PARAMETER_KEYS

# list[LabelScore] is the list form of zero-shot responses.
RESPONSE_TYPES = (
    *(task.response_type for task in TASKS.values()),
    list[LabelScore],
    ENVELOPE_RESPONSE,
    TEXT2TEXT_RESPONSE,
)
EXAMPLES: Mapping[str, Any] = {
    **{str(name): task.example for name, task in TASKS.items()},
    str(TaskName.SUMMARIZATION): TEXT2TEXT_EXAMPLE,
}


class HuggingFaceRoutes:
    """Handlers of the Hugging Face Inference API."""

    name: ClassVar = "Hugging Face"
    error_format: ClassVar = DEFAULT_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline
        self._builds = context.services.builds
        self._text_generation = TextGenerationHandler(context)
        self._text2text = TextToTextHandler(self._text_generation, context)

    def operations(self) -> Sequence[Operation]:
        """Return the operations. `/models/{id}` comes after the longer paths.

        A model id may contain slashes, so `/models/{id}` also matches the longer paths.
        """
        return (
            self._task_operation("Run the default model", "/", "/v1", "/invocations"),
            self._task_operation(
                "Run a task of a model",
                "/models/{id:path}/pipeline/{task}",
                "/pipeline/{task}/{id:path}",
            ),
            self._get_operation(
                "List the models of the store in pages, including rejected ones",
                "/models",
                self.models,
            ),
            self._get_operation("Health of a model", "/models/{id:path}/health", self.health),
            Operation(
                method="GET",
                paths=("/status/{id:path}",),
                handler=self.status,
                summary="Load state, device and build of a model; `accept: text/event-stream` "
                "follows its build",
                access=Access.INFER,
                response=build_schema(ModelStatus),
                events=build_schema(ModelStatus),
            ),
            self._get_operation("One model", "/models/{id:path}/info", self.info),
            self._task_operation(
                "Run a model",
                "/models/{id:path}/v1",
                "/models/{id:path}",
                generation=ENVELOPE_EXAMPLE,
            ),
            self._get_operation("One model", "/models/{id:path}", self.info),
        )

    def _task_operation(
        self, summary: str, *paths: str, **examples: Mapping[str, Any]
    ) -> Operation:
        return Operation(
            method="POST",
            paths=paths,
            handler=self.infer,
            summary=summary,
            access=Access.INFER,
            body=any_body_schema(),
            response=any_response_schema(),
            examples={**EXAMPLES, **examples},
            events=EVENT_SCHEMA,
            runs_model=True,
            headers={**TGI_HEADERS, **INFERENCE_HEADERS},
            error_formats=(DEFAULT_ERROR_FORMAT, TGI_ERROR_FORMAT),
        )

    def _get_operation(self, summary: str, path: str, handler: Any) -> Operation:
        return Operation(
            method="GET",
            paths=(path,),
            handler=handler,
            summary=summary,
            access=Access.INFER,
            response={"type": "object"},
        )

    async def infer(self, request: Request) -> Response:
        body = parse_envelope(await read_json(request, self._pipeline.settings.limits))
        model_id = read_model_name(request, body.get("model"))
        task = parse_task(request.path_params.get("task"))
        parameters = merge_task_parameters(body)
        selection = self._pipeline.resolver.select(
            InferenceRequest(
                inputs=find_task_inputs(body),
                model_id=model_id,
                task=task,
                parameters=parameters,
            ),
            may_generate=True,
            wants_text=body.get("stream") is True or not GENERATION_KEYS.isdisjoint(parameters),
        )
        if selection.model.is_generative:
            return await self._generate(request, body, selection.model, task)
        options = read_options(body.get("options"), request.headers)
        inputs = parse_task_inputs(body)
        check_task_keys(body)
        response = await self._pipeline.infer(
            InferenceRequest(
                inputs=inputs,
                model_id=model_id,
                task=task,
                parameters=parameters,
                options=options,
            ),
            selection,
        )
        return json_response(
            format_for_client(response, options, request.headers.get("user-agent", "")),
            headers=inference_headers(response),
        )

    async def _generate(
        self,
        request: Request,
        body: Mapping[str, Any],
        model: RegisteredModel,
        task: str | None,
    ) -> Response:
        resolve_generation_task(model, task)
        if has_encoder(model):
            return await self._text2text.handle_envelope(request, body, model, task)
        return await self._text_generation.handle_envelope(request, body, model)

    async def models(self, request: Request) -> Response:
        page = await build_short_path_list(self._pipeline, self._builds.store, request.query_params)
        return json_response(page)

    async def info(self, request: Request) -> Response:
        permitted = self._pipeline.permitted
        model = permitted.find(model_in_path(request) or "")
        monitor = self._pipeline.monitor
        versions = permitted.list_versions(model.ref.id)
        return json_response(
            {
                **build_model_facts(model, monitor),
                "versions": [build_version_facts(version, monitor) for version in versions],
            }
        )

    async def status(self, request: Request) -> Response:
        """Return the build of the model, and the load state for huggingface_hub before 0.35.

        Clients that accept EVENT_TYPE get a stream of both.
        """
        model_id = model_in_path(request) or ""
        build = await self._builds.status(model_id)
        now = self._describe_status(model_id, build)
        if EVENT_TYPE not in request.headers.get("accept", ""):
            return json_response(now.model_dump(mode="json"))
        return SseResponse(
            self._watch_status(model_id, now),
            None,
            lambda error: build_event(orjson.dumps({"error": error.message, "code": error.code})),
            stream_write_timeout_s=self._pipeline.settings.stream_write_timeout_s,
        )

    async def _watch_status(self, model_id: str, now: ModelStatus) -> AsyncGenerator[bytes, None]:
        """Yield an event per status of `BuildService.watch`; only one if the build has ended."""
        if now.build.state in ENDS:
            yield build_event(now.model_dump_json().encode())
            return
        async for build in self._builds.watch(model_id):
            status = self._describe_status(model_id, build)
            yield build_event(status.model_dump_json().encode())

    def _describe_status(self, model_id: str, build: BuildStatus | None) -> ModelStatus:
        """Describe a model and its build.

        Raises UnknownModel or ArtifactMissing for a model that has no version and no build.
        """
        try:
            model = self._pipeline.permitted.find(model_id)
        except (UnknownModel, ArtifactMissing):
            if build is None:
                raise
            return describe_unserved(build)
        return describe_served(model, self._pipeline.monitor, build)

    async def health(self, request: Request) -> Response:
        model_id = model_in_path(request) or ""
        model = self._pipeline.permitted.find(model_id)
        if not is_loaded(model, self._pipeline.monitor):
            raise model_loading_error(self._pipeline.monitor, model)
        return json_response({"status": "ok"})


@cache
def any_body_schema() -> JsonSchema:
    encoder_tasks = [envelope_schema(task) for task in TASKS]
    return {"anyOf": [*encoder_tasks, *text2text_body_schemas(), envelope_body_schema()]}


@cache
def any_response_schema() -> JsonSchema:
    return {"anyOf": [build_schema(response_type) for response_type in RESPONSE_TYPES]}


def envelope_schema(name: str) -> JsonSchema:
    task = TASKS[name]
    return {
        "title": str(name),
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": task.inputs.schema(),
            "parameters": build_schema(task.parameters),
            "options": build_schema(RequestOptions),
        },
    }


def format_for_client(response: InferenceResponse, options: RequestOptions, user_agent: str) -> Any:
    """Return the value in the form that the client reads. Only zero-shot values have two forms."""
    value = response.result.value
    # Compare with `!=`: a task that was read from a path is a plain str.
    if response.task != TaskName.ZERO_SHOT_CLASSIFICATION:
        return value
    client = HUB_CLIENT.search(user_agent)
    old_client = client is not None and (int(client[1]), int(client[2])) < LIST_SINCE_VERSION
    if old_client if options.legacy_format is None else options.legacy_format:
        return value
    return list(map(pair_labels, value)) if isinstance(value, list) else pair_labels(value)


def pair_labels(classified: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(classified["labels"], classified["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]
