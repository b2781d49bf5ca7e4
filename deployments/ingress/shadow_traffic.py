"""Shadow traffic: another version computes a share of the requests again, for comparison only.

Answers of generators agree if their texts and their reasoning are equal. The shadow version samples
with the seeds of the original answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deployments.deadlines import deadline_after
from deployments.errors import ServeError
from deployments.ingress.generation_executor import REPEAT_TIMEOUT_S, GenerationPlan
from deployments.ingress.limits import count_tokenized
from deployments.ingress.models.resolver import require_task
from deployments.ingress.requests import InferenceRequest, ResolvedRequest
from deployments.messages import (
    CallResult,
    Completion,
    ModelRef,
    Started,
    join_reasoning_and_text,
)
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.tasks import TaskInput
from deployments.tasks.sparse_embeddings import SparseVector

log = logging.getLogger("ray.serve.hundredfold")

# Limits of repeated requests in flight, so that a slow version does not delay real requests. The
# limit of generations is lower, because each generation holds a KV slot for seconds.
MAX_ENCODER_REQUESTS = 8
MAX_GENERATIONS = 2
MIN_COSINE = 0.99  # vectors with a lower cosine similarity differ
MAX_DIFFERENCE = 0.05  # scores with a larger difference differ
LOG_EVERY = 100  # comparisons per log line

Parse = Callable[[InferenceRequest, str, RegisteredModel], tuple[TaskInput, int]]
Execute = Callable[[ResolvedRequest], Awaitable[tuple[CallResult, bool]]]
Complete = Callable[[GenerationPlan], Awaitable[list[Completion]]]


@dataclass(slots=True)
class Comparison:
    """Number of requests that a shadow version computed again, by outcome."""

    agreed: int = 0
    differed: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.agreed + self.differed + self.failed


@dataclass(frozen=True, slots=True)
class _MirroredTasks:
    limit: int
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class ShadowTraffic:
    """Repetition of answered requests with shadow versions. Only the log shows the results."""

    def __init__(
        self, registry: ModelRegistry, parse: Parse, execute: Execute, complete: Complete
    ) -> None:
        """`parse` returns the inputs of a request for a task and a model, as the pipeline does."""
        self.comparisons: dict[ModelRef, Comparison] = {}
        self._registry = registry
        self._parse = parse
        self._execute = execute
        self._complete = complete
        self._encoder_requests = _MirroredTasks(MAX_ENCODER_REQUESTS)
        self._generations = _MirroredTasks(MAX_GENERATIONS)

    def mirror(self, request: ResolvedRequest, result: CallResult) -> None:
        """Compute an answered request again in the background, with the model's shadow version.

        Only a random share of the requests that name no version, and that the default version has
        answered, is repeated. A request is skipped while too many repeated ones are in flight.
        """

        async def does_agree(model: RegisteredModel) -> bool:
            options = request.options.model_copy(update={"use_cache": False, "priority": "batch"})
            deadline_s = deadline_after(REPEAT_TIMEOUT_S)
            # Versions may differ in prompts, labels and limits, so the inputs are parsed again.
            task = require_task(request.task, model)
            inputs, shortened = self._parse(request.request, task, model)
            repeated = replace(
                request,
                model=model,
                inputs=inputs,
                characters=count_tokenized(inputs, model.manifest),
                shortened=shortened,
                options=options,
                deadline_s=deadline_s,
            )
            other, _ = await self._execute(repeated)
            return agree(result.value, other.value)

        name = request.request.model_id
        self._mirror(name, request.model.ref, does_agree, self._encoder_requests)

    def mirror_answers(
        self,
        name: str | None,
        plan: GenerationPlan,
        started: Sequence[Started],
        texts: Sequence[str],
    ) -> None:
        """Generate all answers of a plan again, under the same conditions as `mirror`.

        `name` is the model's name in the request; None for the default model. `texts` have the
        reasoning before them.
        """

        async def does_agree(model: RegisteredModel) -> bool:
            seeds = [each.seed for each in started]
            others = await self._complete(plan.repeat_with(model, seeds))
            return list(map(join_reasoning_and_text, others)) == list(texts)

        self._mirror(name, plan.model.ref, does_agree, self._generations)

    def _mirror(
        self,
        name: str | None,
        ref: ModelRef,
        does_agree: Callable[[RegisteredModel], Awaitable[bool]],
        in_flight: _MirroredTasks,
    ) -> None:
        shadow = self._registry.find_shadow(name or ref.id, ref)
        if shadow is None or len(in_flight.tasks) >= in_flight.limit:
            return
        if random.uniform(0, 100) < shadow.percent:
            task = asyncio.get_running_loop().create_task(
                self._compare(ModelRef(ref.id, shadow.version), does_agree)
            )
            in_flight.tasks.add(task)
            task.add_done_callback(in_flight.tasks.discard)

    async def _compare(
        self, ref: ModelRef, does_agree: Callable[[RegisteredModel], Awaitable[bool]]
    ) -> None:
        comparison = self.comparisons.setdefault(ref, Comparison())
        try:
            agrees = await does_agree(self._registry.find(ref.name))
        except ServeError as error:
            comparison.failed += 1
            log.info("shadow %s failed: %s", ref.name, error.message)
        except Exception:
            comparison.failed += 1
            log.exception("bug: the answer of shadow %s cannot be compared", ref.name)
        else:
            comparison.agreed += agrees
            comparison.differed += not agrees
        if comparison.total % LOG_EVERY == 0:
            log.info("shadow %s: %s", ref.name, comparison)


def agree(first: Any, second: Any) -> bool:
    """Return whether two results of a task are equal within MIN_COSINE and MAX_DIFFERENCE.

    Entries with scores, such as labels, may differ in order, because near ties may change places.
    """
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and _is_parallel(first, second)
    if isinstance(first, float):
        return isinstance(second, float | int) and abs(first - second) <= MAX_DIFFERENCE
    if _is_sparse(first):
        return _is_sparse(second) and _is_parallel(*_align(first, second))
    first, second = _index_scores(first), _index_scores(second)
    if isinstance(first, Mapping):
        same_keys = isinstance(second, Mapping) and first.keys() == second.keys()
        return same_keys and all(agree(first[key], second[key]) for key in first)
    if isinstance(first, Sequence) and not isinstance(first, str):
        same_length = isinstance(second, Sequence) and len(first) == len(second)
        return same_length and all(map(agree, first, second))
    return bool(first == second)


def _index_scores(value: Any) -> Any:
    """Map each scored entry, such as a label or a span, to its score; keep other values."""
    if isinstance(value, Mapping) and "labels" in value:  # zero-shot classification
        scores = zip(value["labels"], value["scores"], strict=True)
        # The key of the text is a tuple, because any string may be a label.
        return {("sequence",): value["sequence"], **dict(scores)}
    if isinstance(value, Sequence) and value and _has_score(value[0]):
        return {
            tuple(v for k, v in entry.items() if k != "score"): entry["score"] for entry in value
        }
    return value


def _has_score(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "score" in entry


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == SparseVector.__annotations__.keys()


def _align(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of two sparse vectors at the indices that either has."""
    indices = np.union1d(first["indices"], second["indices"])
    aligned = np.zeros((2, len(indices)), np.float32)
    for row, vector in zip(aligned, (first, second), strict=True):
        row[np.searchsorted(indices, vector["indices"])] = vector["values"]
    return aligned[0], aligned[1]


def _is_parallel(first: np.ndarray, second: np.ndarray) -> bool:
    if first.shape != second.shape:
        return False
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    cosines = (first * second).sum(axis=-1) / np.maximum(lengths, 1e-12)
    cosines = np.where((first == second).all(axis=-1), 1.0, cosines)  # also of vectors of zeros
    return bool(cosines.min(initial=1.0) >= MIN_COSINE)
