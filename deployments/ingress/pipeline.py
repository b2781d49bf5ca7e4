"""The steps of every request, in order: resolve, admit, execute, record.

Encoder models and generative models share all steps but the execution. The pipeline runs without an
HTTP server and without Ray.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from deployments.artifacts.types import TaskName
from deployments.config import IngressUserConfig
from deployments.errors import InvalidField, Overloaded, ServeError, forget_frames
from deployments.ingress.admission import Admission
from deployments.ingress.admitted_generation import AdmittedGeneration, GeneratedAnswers
from deployments.ingress.choices import select_best
from deployments.ingress.client_identity import current_client
from deployments.ingress.devices.device_choice import DeviceChooser
from deployments.ingress.devices.device_forecasts import RequestWork
from deployments.ingress.encoder_executor import EncoderExecutor
from deployments.ingress.generation_executor import GenerationExecutor, GenerationPlan
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.limits import check_count, count_tokenized
from deployments.ingress.models.resolver import ModelSelection, RequestResolver, resolve_task
from deployments.ingress.models.version_trials import VersionTrials
from deployments.ingress.request_log import (
    RequestContext,
    RequestSpan,
    may_run_again,
    record_rejection,
)
from deployments.ingress.request_options import NO_OPTIONS, RequestOptions
from deployments.ingress.requests import (
    GenerationRequest,
    GenerationResponse,
    InferenceRequest,
    InferenceResponse,
    ResolvedRequest,
)
from deployments.ingress.shadow_traffic import ShadowTraffic
from deployments.ingress.token_ids import TokenIdInputs, replace_ids_with_texts
from deployments.ingress.tokenization_service import TokenizationService, TokenizedText
from deployments.messages import (
    CallResult,
    DecodeRequest,
    TokenizeRequest,
)
from deployments.records import RecorderGroup, RequestRecorder
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS, TaskInput


class RequestPipeline:
    """The steps of a request, shared by all APIs of one ingress replica."""

    def __init__(
        self,
        *,
        resolver: RequestResolver,
        devices: DeviceChooser,
        encoders: EncoderExecutor,
        generators: GenerationExecutor,
        tokenization: TokenizationService,
        recorder: RequestRecorder,
    ) -> None:
        self.resolver = resolver
        self.permitted = resolver.permitted
        self.shadows = ShadowTraffic(
            resolver.registry, self._parse, encoders.execute, generators.complete
        )
        self._trials = VersionTrials(resolver.registry, self._load)
        self.monitor = devices.monitor
        self.settings = IngressUserConfig()
        self.admission = Admission(self.settings.limits)
        self.devices = devices
        self._forecasts = devices.forecasts
        self._encoders = encoders
        self._generators = generators
        self._tokenization = tokenization
        self._recorder = recorder

    def configure(self, settings: IngressUserConfig) -> None:
        """Apply new settings to later requests."""
        self.settings = settings
        self.admission.limits = settings.limits
        self.permitted.configure(settings.model_names)
        self._forecasts.settings = settings.placement
        self._encoders.configure(settings)
        self._generators.configure(settings)

    def list_missing(self) -> list[str]:
        """List the reasons why this server is not ready. A ready server has none.

        A server whose configured models are all unusable is still ready if the store has another
        model, which requests can name.
        """
        missing = self.monitor.missing()
        rejected = self.permitted.rejected()
        if rejected and not self.permitted.has_usable_model():
            missing.append(f"no model could be opened: {next(iter(rejected.values())).message}")
        return missing

    def add_recorder(self, recorder: RequestRecorder) -> None:
        self._recorder = RecorderGroup(self._recorder, recorder)

    def record_rejection(self, error: ServeError, total_s: float) -> None:
        """Record a request that ended with an error response, unless it is recorded already."""
        record_rejection(self._recorder, error, total_s)

    async def infer(
        self, request: InferenceRequest, selection: ModelSelection | None = None
    ) -> InferenceResponse:
        """Run a task of an encoder model. Raises ServeError.

        Without `selection`, the resolver selects the model and the task.
        """
        with self._open_span() as context:
            resolved = await self._resolve(request, selection, context)
            items = len(resolved.inputs.texts)
            work = RequestWork.of_texts(resolved.model, resolved.characters, items)
            # As `limit_texts` counts, so that every permitted request fits an idle server.
            with self.admission.items.hold(items - resolved.inputs.extra, resolved.client):
                context.sent_tokens = work.tokens
                try:
                    result, from_cache = await self._execute(resolved, work)
                except Overloaded as error:
                    forget_frames(error)
                    device = self.devices.choose_after_refusal(
                        request.options, work, resolved.device, resolved.deadline_s
                    )
                    if device is None:
                        raise
                    resolved = replace(resolved, device=device)
                    result, from_cache = await self._execute(resolved, work)
            if not from_cache:
                self._forecasts.record_result(work, resolved.device, items, result.timings)
            self.shadows.mirror(resolved, result)
            context.compute, context.timings = result.compute_type, result.timings
            if self._encoders.uses_cache(request.options):
                context.cache = "hit" if from_cache else "miss"
        return InferenceResponse(
            result=result,
            model=resolved.model,
            task=resolved.task,
            characters=resolved.characters,
            items=items,
            total_s=context.total_s,
            from_cache=from_cache,
            fallback=resolved.fallback,
            truncation=resolved.describe_truncation(
                result.truncated, self.admission.limits.item_chars
            ),
        )

    async def tokenize(self, request: InferenceRequest, *, special: bool) -> list[TokenizedText]:
        """Prepend a prompt of the model, such as `query: `, to each text of `inputs`; tokenize it.

        `TokenizationService.read_texts` selects the prompt. Raises ServeError.
        """
        with self._open_span() as context:
            deadline_s = request.options.start_deadline(self.settings.timeout_s)
            model = await self._select_model(request, "tokenize", context, deadline_s)
            texts = self._tokenization.read_texts(
                request.inputs, request.parameters, model.manifest
            )
            check_count("inputs", len(texts), self.settings.limits.items)
            context.items = len(texts)
            client, priority = current_client(), request.options.priority_index
            with self.admission.items.hold(len(texts), client):
                return await self._tokenization.tokenize(
                    TokenizeRequest(model.ref, texts, special, client, priority),
                    self.settings.limits,
                    deadline_s=deadline_s,
                )

    async def decode(self, request: InferenceRequest, *, skip_special: bool) -> tuple[str, ...]:
        """Decode each sequence of `inputs`, which are TokenIdInputs. Raises ServeError."""
        with self._open_span() as context:
            deadline_s = request.options.start_deadline(self.settings.timeout_s)
            model = await self._select_model(request, "decode", context, deadline_s)
            return await self._decode(
                request, model, context, deadline_s, skip_special=skip_special
            )

    async def settle_generator(
        self, name: str | None, model: RegisteredModel, options: RequestOptions
    ) -> RegisteredModel:
        """Return the version that `settle` returns within the deadline of a generation."""
        deadline_s = options.start_deadline(self.settings.generation_timeout_s)
        return await self.settle(name, model, deadline_s)

    async def settle(
        self, name: str | None, model: RegisteredModel, deadline_s: float
    ) -> RegisteredModel:
        """Return `model`, or another version for `name` if the version of `model` fails its trial.

        A trial loads a new version before requests use it (version_trials.py). `name` None means
        the id of `model`. Raises DeadlineExceeded.
        """
        name = name or model.ref.id
        while await self._trials.is_refused_after_trial(name, model, deadline_s):
            model = self.permitted.find(name)
        return model

    async def complete(self, request: GenerationRequest) -> GenerationResponse:
        """Generate all completions of a request. Raises ServeError."""
        with self._open_span() as context:
            generation = await self._admit_generation(request, context)
            plan = generation.plan
            try:
                completions = await self._generators.complete(plan)
            finally:
                generation.release()
            answers = GeneratedAnswers.of_completions(completions)
            generation.settle(answers, request.model_id, context)
        best, discarded = select_best(completions, plan.candidates, request.choices)
        return GenerationResponse(
            plan.model, best, context.total_s, discarded, context.timings, plan.fallback
        )

    async def stream(self, request: GenerationRequest) -> GenerationStream:
        """Return the stream once every prompt has a started completion. Raises ServeError."""
        span = self._open_span(is_streamed=True)
        with span as context:
            if request.candidates != request.choices:
                raise InvalidField("`best_of` cannot be streamed", field="best_of")
            generation = await self._admit_generation(request, context)

            def end(stream: GenerationStream, status: int) -> None:
                generation.release()
                answers = GeneratedAnswers.of_stream(stream)
                generation.settle(answers, request.model_id, context)
                if stream.started or not may_run_again(stream.failure):
                    span.close(status, stream.failure)

            return await self._generators.stream(generation.plan, end)

    async def tokenize_prompt(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the token ids of the request's only prompt. Raises ServeError."""
        with self._open_span() as context:
            plan = await self._plan_generation(replace(request, task="tokenize"), context)
            with self.admission.items.hold(1, plan.client):
                return await self._generators.tokenize_prompt(plan)

    def _open_span(self, *, is_streamed: bool = False) -> RequestSpan:
        return RequestSpan(self._recorder, self._encoders.cache, is_streamed=is_streamed)

    async def _execute(
        self, resolved: ResolvedRequest, work: RequestWork
    ) -> tuple[CallResult, bool]:
        """Return the result of an encoder, and whether it came from the cache."""
        end_work = self._forecasts.start(work, resolved.device)
        try:
            return await self._encoders.execute(resolved)
        finally:
            end_work()

    async def _load(self, model: RegisteredModel) -> None:
        """Load a model on the device that serves requests without options. Raises ServeError."""
        choice = self.devices.choose(NO_OPTIONS, RequestWork(model, 0))
        executor = self._generators if model.is_generative else self._encoders
        await executor.load(model.ref, choice.device)

    async def _resolve(
        self,
        request: InferenceRequest,
        selection: ModelSelection | None,
        context: RequestContext,
    ) -> ResolvedRequest:
        selection = selection or self.resolver.select(request)
        deadline_s = request.options.start_deadline(self.settings.timeout_s)
        model = await self.settle(request.model_id, selection.model, deadline_s)
        selection = selection._replace(model=model)
        context.set_model(model.ref)
        task = resolve_task(selection)
        context.task = task
        request = await self._replace_token_ids(request, model, context, deadline_s)
        inputs, shortened = self._parse(request, task, model)
        context.items = len(inputs.texts)
        characters = count_tokenized(inputs, model.manifest)
        work = RequestWork.of_texts(model, characters, len(inputs.texts))
        choice = self.devices.choose(request.options, work)
        return ResolvedRequest(
            model=model,
            task=task,
            request=request,
            inputs=inputs,
            characters=characters,
            shortened=shortened,
            device=choice.device,
            fallback=choice.fallback,
            options=request.options,
            deadline_s=deadline_s,
            client=current_client(),
        )

    def _parse(
        self, request: InferenceRequest, task: str, model: RegisteredModel
    ) -> tuple[TaskInput, int]:
        """Return the inputs within the limits, and the number of texts that were truncated."""
        parsed = TASKS[task].parse(request.inputs, request.parameters, model.manifest)
        inputs = self.admission.limit_texts(parsed)
        return inputs, sum(map(operator.ne, inputs.texts, parsed.texts))

    async def _replace_token_ids(
        self,
        request: InferenceRequest,
        model: RegisteredModel,
        context: RequestContext,
        deadline_s: float,
    ) -> InferenceRequest:
        """Return the request with texts in place of sequences of token ids.

        The texts omit special tokens at both ends, because the tokenizer adds them again. Other
        special tokens are part of the text.
        """
        if not isinstance(request.inputs, TokenIdInputs):
            return request
        texts = await self._decode(
            request, model, context, deadline_s, skip_special=False, trim_special=True
        )
        return replace(request, inputs=replace_ids_with_texts(request.inputs, texts))

    async def _decode(
        self,
        request: InferenceRequest,
        model: RegisteredModel,
        context: RequestContext,
        deadline_s: float,
        *,
        skip_special: bool,
        trim_special: bool = False,
    ) -> tuple[str, ...]:
        """Decode the sequences of `request.inputs`, which must be TokenIdInputs."""
        inputs: TokenIdInputs = request.inputs
        sequences = len(inputs.sequences)
        check_count(inputs.path, sequences, self.settings.limits.items)
        context.items = sequences
        client, priority = current_client(), request.options.priority_index
        with self.admission.items.hold(sequences, client):
            return await self._tokenization.decode(
                DecodeRequest(
                    model.ref, inputs.sequences, skip_special, client, priority, trim_special
                ),
                self.settings.limits,
                deadline_s=deadline_s,
                path=inputs.path,
            )

    async def _select_model(
        self, request: InferenceRequest, task: str, context: RequestContext, deadline_s: float
    ) -> RegisteredModel:
        context.task = task
        selected = self.resolver.select(request).model
        model = await self.settle(request.model_id, selected, deadline_s)
        context.set_model(model.ref)
        return model

    async def _admit_generation(
        self, request: GenerationRequest, context: RequestContext
    ) -> AdmittedGeneration:
        plan = await self._plan_generation(request, context)
        context.sent_tokens = plan.work.tokens + sum(plan.prompt_sizes)
        return AdmittedGeneration(plan, self.admission, self._forecasts, self.shadows)

    async def _plan_generation(
        self, request: GenerationRequest, context: RequestContext
    ) -> GenerationPlan:
        context.task = TaskName.TEXT_GENERATION.value
        model = request.model
        if model is None:
            model = self.resolver.find_generator(request.model_id)
            model = await self.settle_generator(request.model_id, model, request.request_options)
        context.set_model(model.ref)
        context.task = request.task or model.tasks[0]
        context.items = len(request.prompts)
        self.admission.check_generation(request)
        answers = len(request.prompts) * request.candidates
        tokens = self._forecasts.expect_tokens(model, request.options.max_new_tokens)
        work = RequestWork(model, answers * tokens)
        choice = self.devices.choose(request.request_options, work)
        return self._generators.plan(request, work, choice)
