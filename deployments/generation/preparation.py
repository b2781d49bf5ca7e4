"""From a call to a job: its prompt as tokens, its grammar compiled, everything within limits."""

from __future__ import annotations

from contextlib import suppress

from deployments.engines.decoder import DecoderInfo
from deployments.errors import InputTooLong, InvalidField, ManifestInvalid, UnknownToken
from deployments.generation.beam_job import BeamJob
from deployments.generation.grammar import Constraint, GrammarCompiler
from deployments.generation.job import GenerationJob, Job, Words
from deployments.generation.messages import Beams, GenerationCall, GenerationOptions, Prompt
from deployments.generation.prompts import Cut, PromptReader
from deployments.manifest import TOKENIZER_NAME
from deployments.registry import OpenModel


class Preparation:
    """One model's desk. Not thread-safe, but for `constraint`: give it one thread."""

    def __init__(self, model: OpenModel, info: DecoderInfo) -> None:
        manifest = model.manifest
        if manifest.decoding is None:
            raise ManifestInvalid(f"Model {model.ref.id} was not built to generate")
        self._prompts = PromptReader(model.directory, manifest.decoding)
        tokenizer = self._prompts.tokenizer  # only read, so that the loop may have it too
        added = tokenizer.get_added_tokens_decoder()
        self._words = Words(
            tokenizer=tokenizer,
            vocabulary=info.vocabulary,
            end_tokens=manifest.decoding.end_tokens,
            special_tokens=frozenset(i for i, token in added.items() if token.special),
            context=info.context,
            never=manifest.decoding.never,
            source=manifest.decoding.source,
        )
        self._rows = info.rows
        self._most_prompt = info.source_tokens or info.context - 1  # room for one token of answer
        self._grammars = GrammarCompiler(
            (model.directory / TOKENIZER_NAME).read_text(encoding="utf-8"),
            info.vocabulary,
            self._words.end_tokens,
        )
        # A kind of tokenizer that cannot follow grammars refuses them one by one, when asked for.
        with suppress(InvalidField):
            self._grammars.open()  # a third of a second, in which nobody else does anything

    def constraint(self, call: GenerationCall) -> Constraint | None:
        """What the answer must follow, if there is anything; a second for the most complex ones.

        Raises InvalidField.
        """
        grammar = call.options.grammar
        return None if grammar is None else self._grammars.compile(grammar)

    def job(self, call: GenerationCall, constraint: Constraint | None) -> Job:
        """What the loop works on, with the `constraint` of the call.

        Raises InvalidField, InputTooLong, UnknownToken or EmptyInput.
        """
        options = call.options
        ids = self._ids(call.prompt, options)
        beams = None if options.beams is None else self._kept(options.beams)
        if beams is not None:
            return BeamJob(ids, options, beams, self._words, call.deadline_s)
        return GenerationJob(ids, options, self._words, constraint, call.deadline_s)

    def _kept(self, beams: Beams) -> Beams | None:
        """As many as there are rows for; None for a single one. Raises InvalidField."""
        if beams.width <= self._rows:
            return beams
        if beams.is_asked:
            raise InvalidField(
                f"`num_beams` is {beams.width}; at most {self._rows} are kept", field="num_beams"
            )
        return beams._replace(width=self._rows) if self._rows > 1 else None

    def _ids(self, prompt: Prompt, options: GenerationOptions) -> list[int]:
        if options.prompt_logprobs and self._words.source is not None:
            raise InvalidField(
                "`prompt_logprobs` are not there: an encoder reads prompts, and expects no token",
                field="prompt_logprobs",
            )
        room = self._most_prompt
        ids = self._prompts.ids(prompt, Cut(room, options.truncation))
        if options.keep_last is not None:
            ids = ids[-options.keep_last :]
        # Tokenizers may know more than their models. (What an encoder knows is told nowhere.)
        if self._words.source is None and max(ids) >= self._words.vocabulary:
            raise UnknownToken(
                f"`prompt` has the token {max(ids)}, the model's vocabulary ends at "
                f"{self._words.vocabulary - 1}",
                field="prompt",
            )
        if len(ids) > room:
            raise InputTooLong(
                f"`prompt` has {len(ids)} tokens, the model reads at most {room} here; shorten it "
                "or ask for truncation",
                field="prompt",
            )
        return ids
