"""What every API family shares: from a parsed question to an answer, with limits and records."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from deployments.cache import ResponseCache
from deployments.config import IngressUserConfig
from deployments.errors import (
    DeadlineExceeded,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    WrongTask,
)
from deployments.ingress.hardware import choose_device
from deployments.ingress.lanes import LaneBoard
from deployments.ingress.lengths import within_characters
from deployments.ingress.options import RequestOptions
from deployments.ingress.router import Router
from deployments.manifest import TaskName
from deployments.messages import (
    Answer,
    BatchKey,
    Call,
    Timings,
    characters,
)
from deployments.records import RequestRecord, RequestRecorder
from deployments.registry import OpenModel, Registry
from deployments.tasks import TASKS, TaskInput, served_tasks

log = logging.getLogger("ray.serve.hundredfold")

# Requests slower than this are worth a line at INFO.
SLOW_REQUEST_S = 1.0
# Seconds a lane takes to start, told to clients that come too early: process, imports, graphs.
ESTIMATED_START_S = 20.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request, whichever family it came through."""

    inputs: Any
    model_id: str | None = None  # None: the default model of the task
    task: TaskName | None = None  # None: the model's own, or the one the inputs have the shape of
    parameters: Mapping[str, Any] = field(default_factory=dict)
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and what is worth telling about it."""

    answer: Answer
    model: OpenModel
    task: TaskName
    characters: int
    items: int
    total_s: float


class InferenceService:
    """The ingress without HTTP."""

    def __init__(
        self,
        registry: Registry,
        router: Router,
        board: LaneBoard,
        recorder: RequestRecorder,
        settings: IngressUserConfig,
    ) -> None:
        self.registry = registry
        self.board = board
        self.settings = settings
        self.inflight_items = 0
        self.cache: ResponseCache[Answer] = ResponseCache(settings.cache, answer_bytes)
        self._router = router
        self._recorder = recorder

    def configure(self, settings: IngressUserConfig) -> None:
        """Serve new requests by other settings."""
        self.settings = settings
        self.cache.configure(settings.cache)
        self._router.configure(settings.batching)

    async def answer(self, question: Question) -> Reply:
        """The reply to one request. Raises ServeError."""
        started_s = time.perf_counter()
        note = _Note()
        try:
            reply = await self._answer(question, note)
        except ServeError as error:
            self._record(note, error.status, time.perf_counter() - started_s)
            raise
        reply = replace(reply, total_s=time.perf_counter() - started_s)
        note.compute = reply.answer.compute_type
        self._record(note, 200, reply.total_s)
        return reply

    async def _answer(self, question: Question, note: _Note) -> Reply:
        model = self._find_model(question)
        note.model = model.ref.id
        task = choose_task(question, model)
        note.task = task.value
        whole = TASKS[task].parse(question.inputs, question.parameters, model.manifest)
        parsed = self._limited(whole)
        note.items = len(parsed.texts)
        length = sum(map(characters, parsed.texts))
        device = choose_device(question.options.device, model.manifest, self.board.states)
        key = BatchKey(model.ref, task, device, length > self.settings.batching.long_call_chars)
        with self._admitted(len(parsed.texts)):
            answer = await self._cached(key, parsed, question.options)
        if parsed is not whole:
            shortened = sum(map(operator.ne, parsed.texts, whole.texts))
            answer = answer._replace(truncated=max(answer.truncated, shortened))
        return Reply(answer, model, task, length, len(parsed.texts), 0.0)

    async def _cached(self, key: BatchKey, parsed: TaskInput, options: RequestOptions) -> Answer:
        if options.use_cache is False or self.settings.cache.max_bytes == 0:
            return await self._compute(key, parsed, options)
        cache_key = (key, parsed)
        kept = self.cache.get(cache_key)
        if kept is not None:
            # Nothing was computed, but the tokens still count in the caller's `usage`.
            timings = Timings(tokens=kept.timings.tokens)
            return kept._replace(compute_type="cache", timings=timings)
        return await self.cache.compute_once(
            cache_key,
            lambda: self._compute(key, parsed, options),
            way=bool(options.wait_for_model),
        )

    async def _compute(self, key: BatchKey, parsed: TaskInput, options: RequestOptions) -> Answer:
        cold = self.board.states[key.device].running == 0
        patience_s = self.settings.timeout_s
        if cold and not options.wait_for_model:
            patience_s = min(patience_s, self.settings.loading_wait_s)
        call = Call(
            texts=parsed.texts,
            fields=parsed.fields,
            options=parsed.options,
            truncation=parsed.truncation,
            deadline_s=time.time() + patience_s,
        )
        try:
            return await self._router.run(key, call)
        except DeadlineExceeded:
            await self.board.refresh()
            if self.board.states[key.device].running == 0:
                raise ModelLoading(
                    f"Model {key.model.id} is currently loading",
                    estimated_time_s=ESTIMATED_START_S,
                ) from None
            raise

    def _find_model(self, question: Question) -> OpenModel:
        if question.model_id:
            return self.registry.find(question.model_id)
        for model in self.registry.open_models():
            served = served_tasks(model.manifest)
            if question.task in served or (question.task is None and served):
                return model
        raise InvalidField("`model` is required: no default model fits", field="model")

    def _limited(self, parsed: TaskInput) -> TaskInput:
        limits = self.settings.limits
        if len(parsed.texts) > limits.items:
            path = parsed.fields[-1].rpartition("[")[0]
            raise TooManyItems(
                f"`{path}` has {len(parsed.texts)} items; at most {limits.items} are taken",
                field=path,
            )
        return within_characters(parsed, limits.item_chars)

    @contextmanager
    def _admitted(self, items: int) -> Iterator[None]:
        """Hold a place for `items`, or refuse at once: a full house answers 429, not late."""
        if self.inflight_items + items > self.settings.limits.inflight_items:
            raise Overloaded("Model is overloaded")
        self.inflight_items += items
        try:
            yield
        finally:
            self.inflight_items -= items

    def _record(self, note: _Note, status: int, total_s: float) -> None:
        self._recorder.record(
            RequestRecord(note.model, note.task, note.compute, status, note.items, total_s)
        )
        level = log_level(status, total_s)
        if log.isEnabledFor(level):
            log.log(
                level,
                "%s %s status=%d compute=%s items=%d total=%.1fms",
                note.task,
                note.model,
                status,
                note.compute,
                note.items,
                total_s * 1e3,
            )


@dataclass(slots=True)
class _Note:
    """What is known of a request so far, for its record even when it fails half-way."""

    model: str = "none"
    task: str = "none"
    compute: str = "none"
    items: int = 0


def choose_task(question: Question, model: OpenModel) -> TaskName:
    """The task asked for, else the one the inputs have the shape of, else the model's own.

    Raises WrongTask naming what the model can do, or the task that is not served yet.
    """
    tasks = model.manifest.tasks
    if question.task is not None and question.task not in tasks:
        known = ", ".join(f"`{task}`" for task in tasks)
        raise WrongTask(
            f"Model {model.ref.id} cannot do `{question.task}`; it can do: {known}", field="task"
        )
    served = served_tasks(model.manifest)
    shaped = next((t for t in served if TASKS[t].claims(question.inputs)), tasks[0])
    task = question.task or shaped
    if task not in TASKS:
        raise not_served(model, task)
    return task


def not_served(model: OpenModel, task: TaskName) -> WrongTask:
    """The error for a task the model was built for and nobody can ask it yet."""
    known = ", ".join(f"`{served}`" for served in served_tasks(model.manifest)) or "none"
    return WrongTask(
        f"Model {model.ref.id} was built for `{task}`, which this release compiles but does not "
        f"serve yet; tasks of this model that it serves: {known}",
        field="task",
    )


def log_level(status: int, total_s: float) -> int:
    """How loudly a finished request is told.

    A line for every request measured a quarter of the request path in the ingress, so the
    ordinary ones are told at DEBUG only; the metrics count them all.
    """
    if status >= 500:
        return logging.WARNING
    return logging.INFO if status >= 400 or total_s > SLOW_REQUEST_S else logging.DEBUG


def answer_bytes(key: tuple[BatchKey, TaskInput], answer: Answer) -> int:
    """What a cached answer occupies: its texts (4 bytes a character at most) and its value."""
    value = answer.value
    size = value.nbytes if isinstance(value, np.ndarray) else 4 * len(orjson.dumps(value))
    return size + 4 * sum(map(characters, key[1].texts))
