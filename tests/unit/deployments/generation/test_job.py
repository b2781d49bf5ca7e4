"""Forced first and last tokens of a model in combination with a grammar."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.generation.job import SamplingJob
from deployments.messages import GenerationOptions
from tests.support.fake_decoder import VOCABULARY
from tests.support.fakes import far_deadline
from tests.support.loop_harness import GREEDY, build_model_context

FIRST, LAST, ALLOWED = 5, 6, 7


@dataclass
class OneWord:
    """A grammar that allows the token ALLOWED any number of times, and no other token."""

    is_complete: bool = False
    accepted: list[int] = field(default_factory=list)

    def compute_allowed(self) -> NDArray[np.bool_]:
        return np.arange(VOCABULARY) == ALLOWED

    def accept(self, token: int) -> None:
        assert token == ALLOWED
        self.accepted.append(token)


def test_forced_tokens_are_not_passed_to_the_grammar() -> None:
    source = EncoderDecoderConfig(
        max_source_tokens=8,
        decoder_start_token_id=1,
        forced_bos_token_id=FIRST,
        forced_eos_token_id=LAST,
    )
    grammar = OneWord()
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=4)
    job = SamplingJob(
        [3, 4],
        options,
        replace(build_model_context(20), encoder_decoder=source),
        grammar,
        far_deadline(),
    )  # type: ignore[arg-type]
    written = []
    for _ in range(4):
        job.accept_logits(np.zeros((1, VOCABULARY), np.float32))
        written += job.last_tokens
    assert written == [FIRST, ALLOWED, ALLOWED, LAST]
    assert grammar.accepted == [ALLOWED, ALLOWED]
