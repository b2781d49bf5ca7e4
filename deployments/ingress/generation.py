"""What the API families that generate text share: from a parsed question to text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deployments.artifacts.types import Device, TaskName
from deployments.config import IngressUserConfig
from deployments.errors import (
    DeadlineExceeded,
    InvalidField,
    Overloaded,
    TooManyItems,
    WrongTask,
)
from deployments.generation.messages import (
    Completion,
    Finished,
    GenerationCall,
    GenerationOptions,
    Prompt,
    Started,
)
from deployments.ingress.cluster_state import DeploymentState, choose_device
from deployments.ingress.generation_stream import ChoiceChunk, GenerationStream
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_options import RequestOptions
from deployments.ingress.limits import check_prompts
from deployments.ingress.request_log import RequestContext, RequestSpan
from deployments.ingress.service import format_tasks, model_loading_error
from deployments.messages import EncoderTimings
from deployments.records import RequestRecorder
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.transports.base import GeneratorClient

T = TypeVar("T")

# Seeds are 64 bits wide.
SEEDS = 1 << 64


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives, computed side by side. When one fails the others are over before it is told.

    Raises what the first to fail raises.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seeded(options: GenerationOptions, number: int) -> GenerationOptions:
    """The options of one of several answers to a prompt: equal seeds would give equal answers."""
    seed = options.sampling.seed
    if seed is None or number == 0:
        return options
    return options._replace(sampling=options.sampling._replace(seed=(seed + number) % SEEDS))


def chosen(
    completions: Sequence[Completion], computed: int, choices: int
) -> tuple[tuple[Completion, ...], tuple[Completion, ...]]:
    """The likeliest `choices` of each prompt's `computed` answers, and the others."""
    if computed == choices:
        return tuple(completions), ()
    told: list[Completion] = []
    discarded: list[Completion] = []
    for start in range(0, len(completions), computed):
        ranked = sorted(completions[start : start + computed], key=mean_logprob, reverse=True)
        told += ranked[:choices]
        discarded += ranked[choices:]
    return tuple(told), tuple(discarded)


def mean_logprob(completion: Completion) -> float:
    """How likely the model found an answer: the mean over its tokens; the least for none."""
    known = [token.logprob for token in completion.tokens if token.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")


def timings_of(
    started: Sequence[Started], finished: Sequence[Finished], computed: int
) -> EncoderTimings:
    """Where a request's time went; a prompt's tokens count once, however often it is answered."""
    ended = [one.timings for one in finished]
    return EncoderTimings(
        queue_s=max((one.queue_s for one in ended), default=0.0),
        forward_s=max((one.prefill_s + one.decode_s for one in ended), default=0.0),
        tokens=sum(one.prompt_tokens for one in started[::computed])
        + sum(one.generated_tokens for one in finished),
    )


__all__ = [
    "ChoiceChunk",
    "GenerationRequest",
    "GenerationResponse",
    "GenerationService",
    "GenerationStream",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, or several that are answered alike, whichever API they came through."""

    prompt: Prompt
    further_prompts: tuple[Prompt, ...] = ()
    options: GenerationOptions = field(default_factory=GenerationOptions)
    model_id: str | None = None  # None: the first model that generates text
    choices: int = 1  # answers wanted; their seeds count up from the one given
    best_of: int | None = None  # answers computed, of which the likeliest `choices` are told
    task: str | None = None  # for the records; None: the model's own
    request_options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them."""
        return (self.prompt, *self.further_prompts)


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """The answers, best first where there was a choice, and what is worth telling about them.

    Those to the first prompt come first, `choices` for each.
    """

    model: RegisteredModel
    completions: tuple[Completion, ...]
    total_s: float
    discarded: tuple[Completion, ...] = ()  # computed for `best_of`
    timings: EncoderTimings = field(default_factory=EncoderTimings)


@dataclass(frozen=True, slots=True)
class _DispatchPlan:
    """What is asked of whom."""

    model: RegisteredModel
    device: Device
    client: GeneratorClient
    calls: tuple[GenerationCall, ...]  # `computed` for each prompt
    computed: int
    prompts: int
    deadline_s: float  # time.time
    cold: bool  # no replica runs, and the request does not want to wait for one

    def names_of(self, number: int) -> Mapping[str, str]:
        """What the fields of a call are in the question, for errors."""
        return {"prompt": f"prompt[{number // self.computed}]"} if self.prompts > 1 else {}


class GenerationService:
    """The ingress without HTTP, for text generation."""

    def __init__(
        self,
        registry: ModelRegistry,
        clients: Mapping[Device, GeneratorClient],
        states: Callable[[], Mapping[Device, DeploymentState]],
        refresh: Callable[[], Awaitable[None]],
        recorder: RequestRecorder,
        settings: IngressUserConfig,
    ) -> None:
        """`states` are as of the last look at the cluster; `refresh` looks again."""
        self.registry = registry
        self.settings = settings
        self.inflight_generations = 0
        self._clients = clients
        self._states = states
        self._refresh = refresh
        self._recorder = recorder

    def configure(self, settings: IngressUserConfig) -> None:
        """Serve new requests by other settings."""
        self.settings = settings

    async def complete(self, question: GenerationRequest) -> GenerationResponse:
        """The whole answers to one request. Raises ServeError."""
        record = RequestSpan(self._recorder)
        with record.failing() as note:
            plan = self._plan(question, note)
            self._reserve_generations(len(plan.calls))
            try:
                completions = await gather_or_cancel(
                    [self._completed(plan, number) for number in range(len(plan.calls))]
                )
            finally:
                self.inflight_generations -= len(plan.calls)
            note.compute = completions[0].started.compute_type
            started = [one.started for one in completions]
            note.timings = timings_of(started, [one.finished for one in completions], plan.computed)
        record.close(200)
        told, discarded = chosen(completions, plan.computed, question.choices)
        return GenerationResponse(plan.model, told, note.total_s, discarded, note.timings)

    async def stream(self, question: GenerationRequest) -> GenerationStream:
        """The answers as they come, once every one has started. Raises ServeError."""
        record = RequestSpan(self._recorder)
        with record.failing() as note:
            if question.best_of not in (None, question.choices):
                raise InvalidField("`best_of` cannot be streamed", field="best_of")
            plan = self._plan(question, note)
            sources = [plan.client.stream(call) for call in plan.calls]
            self._reserve_generations(len(plan.calls))

            def ended(status: int) -> None:
                self.inflight_generations -= len(plan.calls)
                if stream.started:
                    note.compute = stream.started[0].compute_type
                note.timings = timings_of(stream.started, stream.finished, plan.computed)
                record.close(status)

            stream = GenerationStream(plan.model, ended)
            await stream.start(sources, lambda number: self._in_time(plan, number))
        return stream

    def find_model(self, model_id: str | None) -> RegisteredModel:
        """The model of that id, else the first that generates text.

        Raises UnknownModel, ArtifactError, or WrongTask naming what the model can do.
        """
        if model_id is None:
            models = self.registry.open_models()
            able = next((m for m in models if m.is_generative), None)
            if able is None:
                raise WrongTask("No model here generates text; `/v1/models` tells what each can do")
            return able
        model = self.registry.find(model_id)
        if not model.is_generative:
            raise WrongTask(
                f"Model {model_id} generates no text; it can do: {format_tasks(model)}",
                field="model",
            )
        return model

    def _plan(self, question: GenerationRequest, note: RequestContext) -> _DispatchPlan:
        note.task = TaskName.TEXT_GENERATION.value
        model = self.find_model(question.model_id)
        note.model, note.task = model.ref.id, question.task or model.tasks[0]
        prompts = question.prompts
        note.items = len(prompts)
        computed = self._computed(question)
        check_prompts(prompts, computed, self.settings.limits)
        states = self._states()
        device = choose_device(question.request_options.device, model.manifest, states)
        deadline_s = time.time() + self.settings.generation_timeout_s
        options = question.options
        if computed > question.choices and options.logprobs is None:
            options = options._replace(logprobs=0)
        return _DispatchPlan(
            model=model,
            device=device,
            client=self._clients[device],
            calls=tuple(
                GenerationCall(model.ref, prompt, seeded(options, number), deadline_s)
                for prompt in prompts
                for number in range(computed)
            ),
            computed=computed,
            prompts=len(prompts),
            deadline_s=deadline_s,
            cold=states[device].running == 0 and not question.request_options.wait_for_model,
        )

    def _computed(self, question: GenerationRequest) -> int:
        """Answers computed for each prompt. Raises InvalidField."""
        most = self.settings.limits.choices
        best_of = question.choices if question.best_of is None else question.best_of
        for name, count in (("choices", question.choices), ("best_of", best_of)):
            if not 1 <= count <= most:
                raise InvalidField(f"`{name}` must be between 1 and {most}", field=name)
        if best_of < question.choices:
            raise InvalidField(
                f"`best_of` must be at least the {question.choices} answers wanted", field="best_of"
            )
        return best_of

    def _reserve_generations(self, answers: int) -> None:
        most = self.settings.limits.inflight_generations
        if answers > most:
            raise TooManyItems(
                f"{answers} answers are asked for; at most {most} are computed at once",
                field="prompt",
            )
        if self.inflight_generations + answers > most:
            raise Overloaded(f"Model is overloaded: {most} answers are asked for at once")
        self.inflight_generations += answers

    async def _completed(self, plan: _DispatchPlan, number: int) -> Completion:
        async with self._in_time(plan, number):
            return await plan.client.complete(plan.calls[number])

    @asynccontextmanager
    async def _in_time(self, plan: _DispatchPlan, number: int) -> AsyncIterator[None]:
        """Bound one call's time, and name its fields. Raises DeadlineExceeded or ModelLoading."""
        loop = asyncio.get_running_loop()
        waking: asyncio.Task[None] | None = None

        async def give_up_cold() -> None:
            await asyncio.sleep(self.settings.cold_start_wait_s)
            await self._refresh()  # it may have come since, and be answering
            if self._is_cold(plan.device):
                limit.reschedule(loop.time())

        try:
            async with asyncio.timeout(plan.deadline_s - time.time()) as limit:
                if plan.cold:
                    waking = asyncio.ensure_future(give_up_cold())
                with rename_error_fields(plan.names_of(number)):
                    yield
        except TimeoutError as exc:
            if not limit.expired():
                raise
            if plan.cold and self._is_cold(plan.device):
                raise model_loading_error(plan.model.ref.id) from exc
            raise DeadlineExceeded("the answer was not finished in time") from exc
        finally:
            if waking is not None:
                waking.cancel()

    def _is_cold(self, device: Device) -> bool:
        return self._states()[device].running == 0
