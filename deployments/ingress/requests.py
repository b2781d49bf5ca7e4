"""Requests and responses of the pipeline, the same for every API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.artifacts.types import Device
from deployments.ingress.request_options import RequestOptions
from deployments.messages import CallResult, CallTimings, Completion, GenerationOptions, Prompt
from deployments.registry import RegisteredModel
from deployments.tasks import TaskInput


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A parsed request for an encoder model."""

    inputs: Any  # JSON, or TokenIdInputs
    model_id: str | None = None  # None: the default model of the task
    task: str | None = None  # None: detected from the body, else the model's first task
    parameters: Mapping[str, Any] = field(default_factory=dict)
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request within the limits, with its model, task, device and parsed inputs."""

    model: RegisteredModel
    task: str
    request: InferenceRequest  # texts replace the token ids of its inputs
    inputs: TaskInput
    characters: int  # total of all texts
    shortened: int  # number of texts truncated to `limits.item_chars`
    device: Device
    fallback: Device | None  # the CPU if it replaces a preferred GPU, else None
    options: RequestOptions
    deadline_s: float  # time.monotonic, see deployments.deadlines
    client: str = ""

    def describe_truncation(self, truncated: int, item_chars: int) -> str:
        """Return how many texts were cut, and to which limit; "" if none was.

        `truncated` is the number of texts that the tokenizer cut.
        """
        if not (truncated or self.shortened):
            return ""
        windowing, what = self.inputs.windowing, "texts"
        if self.shortened > truncated:
            truncated, limit = self.shortened, f"{item_chars} characters"
        elif windowing is not None and windowing.first_tokens is not None:
            what, limit = "questions", f"{windowing.first_tokens} tokens"
        else:
            limit = f"{self.model.manifest.max_tokens} tokens"
        return f"{truncated} of {len(self.inputs.texts)} {what} cut to {limit}"


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """The result of an encoder model, and values for the response headers."""

    result: CallResult
    model: RegisteredModel
    task: str
    characters: int
    items: int
    total_s: float
    from_cache: bool = False
    fallback: Device | None = None
    truncation: str = ""  # how many texts were cut, and to which limit; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A parsed request for a generative model: one or several prompts with the same options."""

    prompt: Prompt
    further_prompts: tuple[Prompt, ...] = ()
    options: GenerationOptions = field(default_factory=GenerationOptions)
    model: RegisteredModel | None = None  # the model that the request was parsed for, if any
    model_id: str | None = None  # as the request names it; None: the default generative model
    choices: int = 1  # completions returned per prompt
    # Candidates per prompt, of which the best `choices` are returned. Candidate i is sampled with
    # the given seed plus i. None: `choices` candidates.
    best_of: int | None = None
    task: str | None = None  # for the request log; None: the model's first task
    request_options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt, *self.further_prompts)

    @property
    def candidates(self) -> int:
        """The number of completions computed per prompt."""
        return self.choices if self.best_of is None else self.best_of


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """`GenerationRequest.choices` completions per prompt, in the order of the prompts.

    If `best_of` discarded candidates, the best completion of each prompt comes first.
    """

    model: RegisteredModel
    completions: tuple[Completion, ...]
    total_s: float
    discarded: tuple[Completion, ...] = ()  # candidates of `best_of` that are not returned
    timings: CallTimings = field(default_factory=CallTimings)
    fallback: Device | None = None
