"""What every API family shares: from a parsed question to an answer, with limits and records."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.config import IngressUserConfig
from deployments.errors import (
    DeadlineExceeded,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    WrongTask,
)
from deployments.ingress.cluster_state import ClusterMonitor, choose_device
from deployments.ingress.http.request_options import RequestOptions
from deployments.ingress.limits import check_count, check_total_length, limit_text_length
from deployments.ingress.request_log import RequestContext, record_rejection, recorded
from deployments.ingress.response_cache import ResponseCache, response_bytes
from deployments.ingress.routing import MicroBatchRouter
from deployments.ingress.tokenization import (
    TokenIdInputs,
    TokenizationService,
    TokenizedText,
    replace_ids_with_texts,
)
from deployments.messages import BatchKey, Call, CallResult, EncoderTimings, count_characters
from deployments.records import RecorderGroup, RequestRecorder
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.tasks import TASKS, TaskInput

# Seconds an encoder takes to start, told to clients that come too early: process, imports, graphs.
ESTIMATED_START_S = 20.0


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request, whichever family it came through."""

    inputs: Any  # JSON, or TokenIdInputs where a family takes them
    model_id: str | None = None  # None: the default model of the task
    task: str | None = None  # None: the model's own, or the one the inputs have the shape of
    parameters: Mapping[str, Any] = field(default_factory=dict)
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """An answer and what is worth telling about it."""

    result: CallResult
    model: RegisteredModel
    task: str
    characters: int
    items: int
    total_s: float
    from_cache: bool = False


class InferenceService:
    """The ingress without HTTP."""

    def __init__(
        self,
        registry: ModelRegistry,
        router: MicroBatchRouter,
        monitor: ClusterMonitor,
        recorder: RequestRecorder,
        settings: IngressUserConfig,
        tokens: TokenizationService,
    ) -> None:
        self.registry = registry
        self.monitor = monitor
        self.settings = settings
        self.inflight_items = 0
        self.cache: ResponseCache[CallResult] = ResponseCache(settings.cache, response_bytes)
        self._router = router
        self._recorder = recorder
        self._tokens = tokens

    def add_recorder(self, recorder: RequestRecorder) -> None:
        """Publish to `recorder` too."""
        self._recorder = RecorderGroup(self._recorder, recorder)

    def record_rejection(self, error: ServeError, total_s: float) -> None:
        """Record a request that was refused before, or without, a question."""
        record_rejection(self._recorder, error, total_s)

    def configure(self, settings: IngressUserConfig) -> None:
        """Serve new requests by other settings."""
        self.settings = settings
        self.cache.configure(settings.cache)
        self._router.configure(settings.batching)

    async def infer(self, question: InferenceRequest) -> InferenceResponse:
        """The reply to one request. Raises ServeError."""
        with recorded(self._recorder, self.cache) as note:
            reply = await self._answer(question, note)
            note.compute, note.timings = reply.result.compute_type, reply.result.timings
            if self._cacheable(question.options):
                note.cache = "hit" if reply.from_cache else "miss"
        return replace(reply, total_s=note.total_s)

    async def tokenize(self, question: InferenceRequest, *, special: bool) -> list[TokenizedText]:
        """The tokens of a text, or of several, prompts included. Raises ServeError."""
        with recorded(self._recorder, self.cache) as note:
            model = self._noted_model(question, note, "tokenize")
            texts = self._tokens.texts_of(question.inputs, question.parameters, model.manifest)
            check_count("inputs", len(texts), self.settings.limits.items)
            note.items = len(texts)
            with self._reserve_items(len(texts)):
                return await self._tokens.tokens(model.ref, texts, self.settings, special=special)

    async def decode(self, question: InferenceRequest, *, skip_special: bool) -> tuple[str, ...]:
        """The text of each of the `inputs`, which are TokenIdInputs. Raises ServeError."""
        with recorded(self._recorder, self.cache) as note:
            model = self._noted_model(question, note, "decode")
            return await self._decoded(question.inputs, model, note, skip_special=skip_special)

    async def _decoded(
        self,
        given: TokenIdInputs,
        model: RegisteredModel,
        note: RequestContext,
        *,
        skip_special: bool,
    ) -> tuple[str, ...]:
        check_count(given.path, len(given.sequences), self.settings.limits.items)
        note.items = len(given.sequences)
        with self._reserve_items(len(given.sequences)):
            return await self._tokens.texts(
                model.ref, given, self.settings, skip_special=skip_special
            )

    async def _answer(self, question: InferenceRequest, note: RequestContext) -> InferenceResponse:
        model = self.find_model(question)
        note.model = model.ref.id
        task = resolve_task(question, model)
        note.task = task
        inputs = question.inputs
        if isinstance(inputs, TokenIdInputs):
            inputs = replace_ids_with_texts(
                inputs, await self._decoded(inputs, model, note, skip_special=True)
            )
        whole = TASKS[task].parse(inputs, question.parameters, model.manifest)
        parsed = self._limited(whole)
        note.items = len(parsed.texts)
        length = sum(map(count_characters, parsed.texts))
        device = choose_device(question.options.device, model.manifest, self.monitor.states)
        key = BatchKey(model.ref, task, device, length > self.settings.batching.long_call_chars)
        with self._reserve_items(len(parsed.texts)):
            answer, kept = await self._cached(key, parsed, question.options)
        if parsed is not whole:
            shortened = sum(map(operator.ne, parsed.texts, whole.texts))
            answer = answer._replace(truncated=max(answer.truncated, shortened))
        return InferenceResponse(answer, model, task, length, len(parsed.texts), 0.0, kept)

    async def _cached(
        self, key: BatchKey, parsed: TaskInput, options: RequestOptions
    ) -> tuple[CallResult, bool]:
        """The answer, and whether it was kept from an earlier request."""
        if not self._cacheable(options):
            return await self._compute(key, parsed, options), False
        cache_key = (key, parsed)
        kept = self.cache.get(cache_key)
        if kept is not None:
            # Nothing was computed, but the tokens still count in the caller's `usage`.
            timings = EncoderTimings(tokens=kept.timings.tokens)
            return kept._replace(compute_type="cache", timings=timings), True
        computed = await self.cache.compute_once(
            cache_key,
            lambda: self._compute(key, parsed, options),
            way=bool(options.wait_for_model),
        )
        return computed, False

    def _cacheable(self, options: RequestOptions) -> bool:
        return options.use_cache is not False and self.settings.cache.max_bytes > 0

    async def _compute(
        self, key: BatchKey, parsed: TaskInput, options: RequestOptions
    ) -> CallResult:
        cold = self.monitor.states[key.device].running == 0
        timeout_s = self.settings.timeout_s
        if cold and not options.wait_for_model:
            timeout_s = min(timeout_s, self.settings.cold_start_wait_s)
        call = Call(
            texts=parsed.texts,
            fields=parsed.fields,
            options=parsed.options,
            truncation=parsed.truncation,
            deadline_s=time.time() + timeout_s,
            windowing=parsed.windowing,
        )
        try:
            return await self._router.run(key, call)
        except DeadlineExceeded:
            await self.monitor.refresh_with_timeout()
            if self.monitor.states[key.device].running == 0:
                raise model_loading_error(key.model.id) from None
            raise

    def _noted_model(
        self, question: InferenceRequest, note: RequestContext, task: str
    ) -> RegisteredModel:
        note.task = task
        model = self.find_model(question)
        note.model = model.ref.id
        return model

    def find_model(self, question: InferenceRequest) -> RegisteredModel:
        """The model asked for, else the first one that can do what is plainly meant.

        One whose head was made for the task comes before one that only fits it, and one that
        generates only where there is nothing else. Raises UnknownModel, ArtifactError or
        InvalidField.
        """
        if question.model_id:
            return self.registry.find(question.model_id)
        every = list(self.registry.open_models())
        models = [m for m in every if not m.is_generative]
        if not models and every and question.task is None:
            return every[0]
        if question.task is not None:
            models = [m for m in models if question.task in m.tasks]
        able = [m for m in models if detect_task(question, m) is not None]
        if not models:
            raise InvalidField("`model` is required: no default model fits", field="model")
        made = [m for m in able or models if is_native_task(question, m)]
        return (made or able or models)[0]

    def _limited(self, parsed: TaskInput) -> TaskInput:
        limits = self.settings.limits
        check_count(parsed.many, len(parsed.texts), limits.items)
        return check_total_length(
            limit_text_length(parsed, limits.item_chars), limits.request_chars
        )

    @contextmanager
    def _reserve_items(self, items: int) -> Iterator[None]:
        """Hold a place for `items`, or refuse at once: a full house answers 429, not late."""
        if self.inflight_items + items > self.settings.limits.inflight_items:
            raise Overloaded("Model is overloaded: too many texts are asked for at once")
        self.inflight_items += items
        try:
            yield
        finally:
            self.inflight_items -= items


def resolve_task(question: InferenceRequest, model: RegisteredModel) -> str:
    """The task asked for, else the one the body is plainly meant for, else the model's own.

    Raises WrongTask naming what the model can do.
    """
    if model.is_generative:
        raise wrong_route_error(model)
    if question.task is None:
        return detect_task(question, model) or model.tasks[0]
    return require_task(question.task, model)


def require_task(named: str, model: RegisteredModel) -> str:
    """`named`, which the model can do. Raises WrongTask naming what it can do."""
    if named not in model.tasks:
        raise WrongTask(
            f"Model {model.ref.id} cannot do `{named}`; it can do: {format_tasks(model)}",
            field="task",
        )
    return named


def format_tasks(model: RegisteredModel) -> str:
    """What the model can do, in an error."""
    return ", ".join(f"`{task}`" for task in model.tasks)


def model_loading_error(model_id: str) -> ModelLoading:
    """What is said where nothing runs yet that has the model."""
    return ModelLoading(
        f"Model {model_id} is currently loading", estimated_time_s=ESTIMATED_START_S
    )


def wrong_route_error(model: RegisteredModel) -> WrongTask:
    """What a model that generates says to those who want something else of it."""
    return WrongTask(
        f"Model {model.ref.id} generates text; ask it at /v1/chat/completions, "
        "/v1/completions, /generate or by its own path",
        field="task",
    )


def detect_task(question: InferenceRequest, model: RegisteredModel) -> str | None:
    """The task of the model that the body is plainly meant for, if any."""
    served = model.tasks
    claims = (t for t in served if TASKS[t].matches(question.inputs, question.parameters))
    return next(claims, None)


def is_native_task(question: InferenceRequest, model: RegisteredModel) -> bool:
    """Whether the model's head is the one that the task meant is made for."""
    task = question.task or detect_task(question, model)
    return task is not None and model.manifest.head is TASKS[task].head
