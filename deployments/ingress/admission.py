"""Admission control: size limits per request, and limits for all requests in flight together."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.capacity import Capacity
from deployments.config import LimitSettings
from deployments.errors import InvalidField, TooManyItems
from deployments.ingress.limits import (
    check_count,
    check_prompts,
    check_total_length,
    limit_text_length,
)
from deployments.messages import Prompt
from deployments.tasks import TaskInput


class Admission:
    """Limits of one ingress replica. A request beyond a limit fails at once instead of waiting."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.items = Capacity(lambda: self.limits.inflight_items, "texts")
        self.generations = Capacity(lambda: self.limits.inflight_generations, "completions")
        self.body_bytes = Capacity(lambda: self.limits.inflight_body_bytes, "body bytes")
        self.response_bytes = Capacity(
            lambda: self.limits.inflight_response_bytes, "bytes of large answers"
        )

    def limit_texts(self, inputs: TaskInput) -> TaskInput:
        """Truncate long texts if the request allows it, and check the limits of one request.

        Raises TooManyItems or InputTooLong.
        """
        check_count(inputs.many, len(inputs.texts) - inputs.extra, self.limits.items)
        return check_total_length(
            limit_text_length(inputs, self.limits.item_chars), self.limits.request_chars
        )

    def check_generation(self, prompts: Sequence[Prompt], choices: int, candidates: int) -> None:
        """Check counts and prompt sizes. Raises InvalidField, TooManyItems or InputTooLong."""
        for name, count in (("choices", choices), ("best_of", candidates)):
            if not 1 <= count <= self.limits.choices:
                raise InvalidField(
                    f"`{name}` must be between 1 and {self.limits.choices}", field=name
                )
        if candidates < choices:
            raise InvalidField(
                f"`best_of` is {candidates}; it must be at least `choices` ({choices})",
                field="best_of",
            )
        check_prompts(prompts, candidates, self.limits)

    def reserve_generations(self, completions: int, client: str) -> None:
        """Reserve capacity for the completions of a request.

        Raises TooManyItems if the request alone exceeds half of the limit, which is the share of
        one client. Raises Overloaded if too little capacity is free.
        """
        share = max(self.generations.limit // 2, 1)
        if completions > share:
            raise TooManyItems(
                f"`prompt` needs {completions} completions; the maximum is {share}. Send fewer "
                "prompts or choices.",
                field="prompt",
            )
        self.generations.reserve(completions, client)
