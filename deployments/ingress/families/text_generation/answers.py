"""From a generator's replies to text-generation-inference's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from deployments.generation.messages import Alternative, Completion, FinishReason, Token
from deployments.ingress.families.text_generation.messages import (
    AnswerFacts,
    Details,
    FinishWord,
    Generated,
    OtherSequence,
    TokenFacts,
)
from deployments.ingress.families.text_generation.questions import Asked
from deployments.ingress.generation import GenerationReply

REASONS: Mapping[FinishReason, FinishWord] = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "eos_token",
    FinishReason.STOP: "stop_sequence",
}


def answers_of(reply: GenerationReply, asked: Asked) -> list[list[Generated]]:
    """The answers to each prompt."""
    count = len(asked.prompts)
    told = in_parts(reply.completions, count)
    others = in_parts(reply.passed_over, count)
    return [
        [Teller(prompt, asked).answer(one, others[place]) for one in told[place]]
        for place, prompt in enumerate(asked.prompts)
    ]


def in_parts(completions: Sequence[Completion], count: int) -> list[Sequence[Completion]]:
    """`completions` in `count` runs of the same length."""
    size = len(completions) // count
    return [completions[i * size : (i + 1) * size] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Teller:
    """Tells what came for one of the prompts."""

    prompt: str
    asked: Asked

    def answer(self, told: Completion, passed_over: Sequence[Completion]) -> Generated:
        """An answer, and where details are wanted those that it was chosen from."""
        answer = Generated(generated_text=self.asked.shown(self.prompt, told.text))
        if self.asked.parameters.tells_details:
            # Facts are details of which no key that may be missing is there.
            details = cast("Details", self._facts(told))
            if passed_over:
                details["best_of_sequences"] = [self._other(one) for one in passed_over]
            answer["details"] = details
        return answer

    def _other(self, told: Completion) -> OtherSequence:
        text = self.asked.shown(self.prompt, told.text)
        return OtherSequence(generated_text=text, **self._facts(told))

    def _facts(self, told: Completion) -> AnswerFacts:
        facts = AnswerFacts(
            finish_reason=REASONS[told.finished.reason],
            generated_tokens=told.finished.generated_tokens,
            seed=self.asked.seed_told(told.started),
            prefill=[
                {"id": token.id, "text": token.text, "logprob": token.logprob}
                for token in told.started.prompt
            ],
            tokens=[token_facts(token) for token in told.tokens],
        )
        if self.asked.parameters.top_n_tokens:
            facts["top_tokens"] = [top_tokens(token) for token in told.tokens]
        return facts


def token_facts(token: Token | Alternative) -> TokenFacts:
    """One token, which came or might have come."""
    return {
        "id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "special": token.special,
    }


def top_tokens(token: Token) -> list[TokenFacts]:
    """The likeliest tokens in its place."""
    return [token_facts(one) for one in token.alternatives]
