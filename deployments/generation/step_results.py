"""Results of the steps of a decoder: events of jobs, and numbers of tokens."""

from __future__ import annotations

from typing import NamedTuple

from deployments.messages import StreamEvent


class JobEvent(NamedTuple):
    """An event of a job. An error or a finished chunk is the last event of a job."""

    job: int  # Job.number
    payload: StreamEvent


class StepOutput(NamedTuple):
    """Counts of one decode step or verification."""

    tokens: int
    sequences: int = 1
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class PrefillOutput(NamedTuple):
    """Prompt tokens of one step, and the first tokens of the answers to them."""

    tokens: int  # computed
    cached_tokens: int  # from the prefix cache
    first_tokens: int


NO_PROMPTS, NO_OUTPUT = PrefillOutput(0, 0, 0), StepOutput(0)
