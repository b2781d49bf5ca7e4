"""The steps of every request, in order: resolve, admit, execute, record.

Encoder models and generative models share all steps but the execution. The pipeline knows neither
HTTP nor Ray.
"""

from __future__ import annotations

import operator
from typing import Any

from deployments.artifacts.types import TaskName
from deployments.config import IngressUserConfig
from deployments.errors import InvalidField, ServeError
from deployments.ingress.admission import Admission
from deployments.ingress.choices import select_best, sum_timings
from deployments.ingress.encoder_executor import EncoderExecutor
from deployments.ingress.generation_executor import GenerationExecutor, GenerationPlan
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.clients import current_client
from deployments.ingress.limits import check_count
from deployments.ingress.request_log import (
    RequestContext,
    RequestSpan,
    record_rejection,
    record_request,
)
from deployments.ingress.requests import (
    GenerationRequest,
    GenerationResponse,
    InferenceRequest,
    InferenceResponse,
    ResolvedRequest,
)
from deployments.ingress.resolver import ModelSelection, RequestResolver, resolve_task
from deployments.ingress.tokenization import (
    TokenIdInputs,
    TokenizationService,
    TokenizedText,
    replace_ids_with_texts,
)
from deployments.messages import count_characters
from deployments.records import RecorderGroup, RequestRecorder
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS


class RequestPipeline:
    """Shared by every API of one ingress replica."""

    def __init__(
        self,
        *,
        resolver: RequestResolver,
        encoders: EncoderExecutor,
        generators: GenerationExecutor,
        tokenization: TokenizationService,
        recorder: RequestRecorder,
        settings: IngressUserConfig,
    ) -> None:
        self.resolver = resolver
        self.registry = resolver.registry
        self.monitor = resolver.monitor
        self.admission = Admission(settings.limits)
        self.settings = settings
        self._encoders = encoders
        self._generators = generators
        self._tokenization = tokenization
        self._recorder = recorder

    def configure(self, settings: IngressUserConfig) -> None:
        """Apply other settings to new requests."""
        self.settings = settings
        self.admission.limits = settings.limits
        self._encoders.configure(settings)
        self._generators.configure(settings)

    def add_recorder(self, recorder: RequestRecorder) -> None:
        self._recorder = RecorderGroup(self._recorder, recorder)

    def record_rejection(self, error: ServeError, total_s: float) -> None:
        """Record a request that was rejected before it reached the pipeline."""
        record_rejection(self._recorder, error, total_s)

    async def infer(
        self, request: InferenceRequest, selection: ModelSelection | None = None
    ) -> InferenceResponse:
        """Run a task of an encoder model. `selection` skips the resolution. Raises ServeError."""
        with record_request(self._recorder, self._encoders.cache) as context:
            resolved = await self._resolve(request, selection, context)
            items = len(resolved.inputs.texts)
            with self.admission.items.hold(items, resolved.client):
                result, from_cache = await self._encoders.execute(resolved)
            context.compute, context.timings = result.compute_type, result.timings
            if self._encoders.uses_cache(request.options):
                context.cache = "hit" if from_cache else "miss"
        if resolved.shortened > result.truncated:
            result = result._replace(truncated=resolved.shortened)
        return InferenceResponse(
            result=result,
            model=resolved.model,
            task=resolved.task,
            characters=resolved.characters,
            items=items,
            total_s=context.total_s,
            from_cache=from_cache,
            fallback=resolved.fallback,
        )

    async def tokenize(self, request: InferenceRequest, *, special: bool) -> list[TokenizedText]:
        """Tokenize the texts in `inputs`, with their prompts. Raises ServeError."""
        with record_request(self._recorder, self._encoders.cache) as context:
            model = self._select_model(request, "tokenize", context)
            texts = self._tokenization.read_texts(
                request.inputs, request.parameters, model.manifest
            )
            check_count("inputs", len(texts), self.settings.limits.items)
            context.items = len(texts)
            with self.admission.items.hold(len(texts)):
                return await self._tokenization.tokenize(
                    model.ref,
                    texts,
                    self.settings.limits,
                    timeout_s=request.options.limit_timeout(self.settings.timeout_s),
                    special=special,
                )

    async def decode(self, request: InferenceRequest, *, skip_special: bool) -> tuple[str, ...]:
        """Decode each sequence of `inputs`, which are TokenIdInputs. Raises ServeError."""
        with record_request(self._recorder, self._encoders.cache) as context:
            model = self._select_model(request, "decode", context)
            return await self._decode(request, model, context, skip_special=skip_special)

    async def complete(self, request: GenerationRequest) -> GenerationResponse:
        """Generate all completions of a request. Raises ServeError."""
        span = RequestSpan(self._recorder)
        with span.close_on_error() as context:
            plan = self._plan_generation(request, context)
            self.admission.reserve_generations(len(plan.calls))
            try:
                completions = await self._generators.complete(plan)
            finally:
                self.admission.generations.release(len(plan.calls))
            context.compute = completions[0].started.compute_type
            started = [completion.started for completion in completions]
            finished = [completion.finished for completion in completions]
            context.timings = sum_timings(started, finished, plan.candidates)
        span.close(200)
        best, discarded = select_best(completions, plan.candidates, request.choices)
        return GenerationResponse(
            plan.model, best, context.total_s, discarded, context.timings, plan.fallback
        )

    async def stream(self, request: GenerationRequest) -> GenerationStream:
        """Return the stream once every prompt has started. Raises ServeError."""
        span = RequestSpan(self._recorder)
        with span.close_on_error() as context:
            if request.candidates != request.choices:
                raise InvalidField("`best_of` cannot be streamed", field="best_of")
            plan = self._plan_generation(request, context)
            self.admission.reserve_generations(len(plan.calls))

            def end(stream: GenerationStream, status: int) -> None:
                self.admission.generations.release(len(plan.calls))
                if stream.started:
                    context.compute = stream.started[0].compute_type
                context.timings = sum_timings(stream.started, stream.finished, plan.candidates)
                span.close(status)

            return await self._generators.stream(plan, end)

    async def _resolve(
        self,
        request: InferenceRequest,
        selection: ModelSelection | None,
        context: RequestContext,
    ) -> ResolvedRequest:
        selection = selection or self.resolver.select(request)
        model = selection.model
        context.model = model.ref.id
        task = resolve_task(selection)
        context.task = task
        parsed = TASKS[task].parse(
            await self._read_inputs(request, model, context),
            request.parameters,
            model.manifest,
        )
        inputs = self.admission.limit_texts(parsed)
        context.items = len(inputs.texts)
        choice = self.resolver.choose_device(request.options, model)
        return ResolvedRequest(
            model=model,
            task=task,
            inputs=inputs,
            characters=sum(map(count_characters, inputs.texts)),
            shortened=sum(map(operator.ne, inputs.texts, parsed.texts)),
            device=choice.device,
            fallback=choice.fallback,
            options=request.options,
            client=current_client(self.settings.limits.trusted_proxies),
        )

    async def _read_inputs(
        self, request: InferenceRequest, model: RegisteredModel, context: RequestContext
    ) -> Any:
        """Return JSON inputs, in which texts replace token ids."""
        if not isinstance(request.inputs, TokenIdInputs):
            return request.inputs
        texts = await self._decode(request, model, context, skip_special=True)
        return replace_ids_with_texts(request.inputs, texts)

    async def _decode(
        self,
        request: InferenceRequest,
        model: RegisteredModel,
        context: RequestContext,
        *,
        skip_special: bool,
    ) -> tuple[str, ...]:
        """`request.inputs` are TokenIdInputs."""
        inputs: TokenIdInputs = request.inputs
        sequences = len(inputs.sequences)
        check_count(inputs.path, sequences, self.settings.limits.items)
        context.items = sequences
        with self.admission.items.hold(sequences):
            return await self._tokenization.decode(
                model.ref,
                inputs,
                self.settings.limits,
                timeout_s=request.options.limit_timeout(self.settings.timeout_s),
                skip_special=skip_special,
            )

    def _select_model(
        self, request: InferenceRequest, task: str, context: RequestContext
    ) -> RegisteredModel:
        context.task = task
        model = self.resolver.select(request).model
        context.model = model.ref.id
        return model

    def _plan_generation(
        self, request: GenerationRequest, context: RequestContext
    ) -> GenerationPlan:
        context.task = TaskName.TEXT_GENERATION.value
        model = self.resolver.find_generator(request.model_id)
        context.model, context.task = model.ref.id, request.task or model.tasks[0]
        context.items = len(request.prompts)
        self.admission.check_generation(request.prompts, request.choices, request.candidates)
        choice = self.resolver.choose_device(request.request_options, model)
        return self._generators.plan(request, model, choice)
