"""A generation from its admission to the record of its answers, streamed or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deployments.ingress.admission import Admission
from deployments.ingress.choices import combine_timings
from deployments.ingress.devices.device_forecasts import DeviceForecasts
from deployments.ingress.generation_executor import GenerationPlan
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.request_log import RequestContext
from deployments.ingress.shadow_traffic import ShadowTraffic
from deployments.messages import Completion, Finished, Started, join_reasoning_and_text


class GeneratedAnswers(NamedTuple):
    """What the calls of a plan have generated when the generation ends."""

    started: Sequence[Started]  # empty if the generation ended before
    finished: Sequence[Finished]
    texts: Sequence[str]  # with the reasoning before them
    unfinished: Sequence[Finished] = ()  # calls of a stream that ended before they did
    ended_early: bool = False  # whether the end of the stream cut an answer

    @classmethod
    def of_completions(cls, completions: Sequence[Completion]) -> GeneratedAnswers:
        return cls(
            [one.started for one in completions],
            [one.finished for one in completions],
            [join_reasoning_and_text(one) for one in completions],
        )

    @classmethod
    def of_stream(cls, stream: GenerationStream) -> GeneratedAnswers:
        return cls(
            stream.started, stream.finished, stream.texts, stream.unfinished, stream.ended_early
        )


class AdmittedGeneration:
    """A plan whose completions count toward the limits until they are released."""

    def __init__(
        self,
        plan: GenerationPlan,
        admission: Admission,
        forecasts: DeviceForecasts,
        shadows: ShadowTraffic,
    ) -> None:
        """Reserve capacity for the completions. Raises TooManyItems or Overloaded."""
        admission.reserve_generations(len(plan.calls), plan.client)
        self.plan = plan
        self._admission = admission
        self._forecasts = forecasts
        self._shadows = shadows
        self._end_work = forecasts.start(plan.work, plan.device)

    def release(self) -> None:
        """Release the capacity. Call once, when no completion runs anymore."""
        self._end_work()
        self._admission.generations.release(len(self.plan.calls), self.plan.client)

    def settle(self, answers: GeneratedAnswers, name: str | None, context: RequestContext) -> None:
        """Record the answers. Compute them again with a shadow version if none was cut.

        `name` is the model's name in the request; None for the default model.
        """
        plan = self.plan
        if answers.started:
            context.compute = answers.started[0].compute_type
        # A stream that failed or ended early counts too: its client may have read tokens.
        ended = context.finished = (*answers.finished, *answers.unfinished)
        context.timings = combine_timings(answers.started, ended, plan.candidates)
        self._forecasts.record_answers(plan.model, plan.device, answers.finished)
        if len(answers.finished) == len(plan.calls) and not answers.ended_early:
            self._shadows.mirror_answers(name, plan, answers.started, answers.texts)
