"""Admission control: size limits per request, and limits for all requests in flight together."""

from __future__ import annotations

from deployments.artifacts.manifest import ArtifactManifest
from deployments.capacity import Capacity
from deployments.config import LimitSettings
from deployments.errors import InvalidField, TooManyItems
from deployments.ingress.limits import (
    check_count,
    check_pairs,
    check_prompts,
    check_total_length,
    limit_text_length,
)
from deployments.ingress.requests import GenerationRequest
from deployments.large_outputs import limit_call_texts
from deployments.tasks import TaskInput


class Admission:
    """Limits of one ingress replica. A request beyond a limit fails at once instead of waiting."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.items = self._limit_in_flight("inflight_items", "texts")
        self.generations = self._limit_in_flight("inflight_generations", "completions")
        self.body_bytes = self._limit_in_flight("inflight_body_bytes", "body bytes")
        self.response_bytes = self._limit_in_flight(
            "inflight_response_bytes", "bytes of large answers"
        )

    def _limit_in_flight(self, name: str, unit: str) -> Capacity:
        """Build a capacity whose limit is the current value of the setting `name` of `limits`."""
        return Capacity(lambda: getattr(self.limits, name), unit, f"limits.{name}")

    def find_max_texts(self, manifest: ArtifactManifest) -> int:
        """Return the maximum of texts in one request to the model."""
        call_texts = limit_call_texts(manifest)
        return self.limits.items if call_texts is None else min(self.limits.items, call_texts)

    def limit_texts(self, inputs: TaskInput) -> TaskInput:
        """Truncate long texts if the request allows it, and check the limits of one request.

        Raises TooManyItems or InputTooLong.
        """
        items = len(inputs.texts) - inputs.extra
        if inputs.paired_with is None:
            check_count(inputs.many, items, self.limits.items)
        else:
            check_pairs(inputs.many, inputs.paired_with, items, self.limits.items)
        return check_total_length(
            limit_text_length(inputs, self.limits.item_chars), self.limits.request_chars
        )

    def check_generation(self, request: GenerationRequest) -> None:
        """Check the number of completions, the token limits and the sizes of the prompts.

        Raises InvalidField, TooManyItems or InputTooLong.
        """
        choices, candidates = request.choices, request.candidates
        for name, count in (("choices", choices), ("best_of", candidates)):
            if not 1 <= count <= self.limits.choices:
                raise InvalidField(
                    f"`{name}` must be between 1 and {self.limits.choices}", field=name
                )
        if candidates < choices:
            raise InvalidField(
                f"`best_of` is {candidates}; it must be at least {choices}, the number of answers "
                "per prompt",
                field="best_of",
            )
        minimum, maximum = request.options.min_new_tokens, request.options.max_new_tokens
        if maximum is not None and minimum > maximum:
            raise InvalidField(
                f"`min_new_tokens` is {minimum}, above the maximum of {maximum} new tokens of this "
                "request",
                field="min_new_tokens",
            )
        check_prompts(request.prompts, candidates, self.limits)

    def reserve_generations(self, completions: int, client: str) -> None:
        """Reserve capacity for the completions of a request.

        Raises TooManyItems if the request alone exceeds half of the limit: one client may use at
        most this half. Raises Overloaded if too little capacity is free in total or for `client`.
        """
        share = max(self.generations.limit // 2, 1)
        if completions > share:
            raise TooManyItems(
                f"`prompt` needs {completions} completions; the maximum is {share}. Send fewer "
                "prompts or choices.",
                field="prompt",
            )
        self.generations.reserve(completions, client)
