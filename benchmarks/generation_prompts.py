"""Prompts of any length: real prose, no two of which begin alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from benchmarks.generation_answers import Tokens
from benchmarks.local_model import LocalModel
from build_artifacts.decoders.texts import PASSAGES
from deployments.encoding.tokenizer_file import open_tokenizer


class PromptBook:
    """Draws prompts; a function of the seed and of what was drawn before.

    A prompt starts anywhere in the prose and goes on from its beginning when it is at the end.
    Two of them start at different places, so nothing that was read for one helps with another.
    """

    def __init__(self, prose: Sequence[int], seed: int) -> None:
        self._prose = list(prose)
        self._starts = self._shuffled(random.Random(seed))

    @classmethod
    def of(cls, model: LocalModel, seed: int) -> PromptBook:
        """Prose in the tokens of a model."""
        tokenizer = open_tokenizer(model.directory)
        texts = tokenizer.encode_batch(list(PASSAGES), add_special_tokens=False)
        return cls([token for text in texts for token in text.ids], seed)

    def draw(self, tokens: int) -> Tokens:
        """The next prompt, of so many tokens."""
        start = next(self._starts)
        prose = self._prose[start:] + self._prose[:start]
        whole, rest = divmod(tokens, len(prose))
        return tuple(prose * whole + prose[:rest])

    def draw_each(self, lengths: Sequence[int]) -> tuple[Tokens, ...]:
        """One prompt for each length."""
        return tuple(self.draw(tokens) for tokens in lengths)

    def _shuffled(self, dice: random.Random) -> Iterator[int]:
        starts = list(range(len(self._prose)))
        while True:
            dice.shuffle(starts)
            yield from starts
