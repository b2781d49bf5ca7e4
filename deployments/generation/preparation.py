"""From a call to a job: its prompt as tokens, its grammar compiled, everything within limits."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME
from deployments.engines.decoder import DecoderInfo
from deployments.errors import EmptyInput, InputTooLong, InvalidField, ManifestInvalid, UnknownToken
from deployments.generation.beam_search import BeamSearchJob
from deployments.generation.chat_template import ChatTemplate
from deployments.generation.grammar import Constraint, GrammarCompiler
from deployments.generation.job import Job, ModelContext, SamplingJob
from deployments.generation.messages import (
    BeamSearchParams,
    Chat,
    GenerationCall,
    GenerationOptions,
    Prompt,
)
from deployments.messages import Truncation
from deployments.registry import RegisteredModel
from deployments.tokenization.encodings import open_tokenizer, truncate_item


class Cut(NamedTuple):
    """What is kept of a prompt of too many tokens."""

    most: int  # tokens
    keep: Truncation  # REFUSE: all of it, for others to refuse


class PromptTokenizer:
    """The tokenizer and the chat template of one model. Not thread-safe."""

    def __init__(self, directory: Path, generation_config: GenerationConfig) -> None:
        """Of the artifact in `directory`. Raises ArtifactError."""
        self._directory = directory
        self._decoding = generation_config
        self.tokenizer = open_tokenizer(directory)

    def ids(self, prompt: Prompt, cut: Cut | None = None) -> list[int]:
        """The tokens of a prompt, at least one.

        Text gets the special tokens that the tokenizer adds, also where it is cut; token ids get
        none, and a conversation those that its template writes. Special tokens written in a text
        are read as such. Raises EmptyInput, UnknownToken, InputTooLong, or InvalidField with the
        template's reason.
        """
        if isinstance(prompt, Chat):
            return _kept(self._ids_of_chat(prompt), cut)
        if isinstance(prompt, str):
            ids = self._ids_of_text(prompt, cut)
        else:
            ids = _kept(self._checked(prompt), cut)
        if not ids:
            raise EmptyInput("`prompt` has no tokens", field="prompt")
        return ids

    def _ids_of_text(self, text: str, cut: Cut | None) -> list[int]:
        if not text:
            return []
        encoding = self.tokenizer.encode(text)
        ids: list[int] = encoding.ids
        if cut is None or cut.keep is Truncation.REFUSE or len(ids) <= cut.most:
            return ids
        kept: list[int] = truncate_item(encoding, cut.most, cut.keep).ids.tolist()
        return kept

    def _checked(self, given: tuple[int, ...]) -> list[int]:
        for token in (min(given, default=0), max(given, default=0)):
            if not 0 <= token < self._vocabulary_end:
                raise UnknownToken(
                    f"`prompt` has the token id {token}, the vocabulary goes from 0 to "
                    f"{self._vocabulary_end - 1}",
                    field="prompt",
                )
        return list(given)

    def _ids_of_chat(self, chat: Chat) -> list[int]:
        text = self._template.render(chat) if chat.messages else ""
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as exc:  # half a character, which templates can cut out of a text
            raise InvalidField(
                "`messages` make a prompt that is no text in UTF-8", field="messages"
            ) from exc
        if not ids:
            raise EmptyInput("`messages` have no tokens", field="messages")
        return ids

    @cached_property
    def _template(self) -> ChatTemplate:
        try:
            source = (self._directory / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InvalidField(
                "this model has no chat template; send a `prompt` to the completions route instead",
                field="messages",
            ) from None
        return ChatTemplate(source, self._decoding.special_tokens)

    @cached_property
    def _vocabulary_end(self) -> int:
        # Vocabularies of the wild have gaps, so their count is not where they end.
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _kept(ids: list[int], cut: Cut | None) -> list[int]:
    """What is left of tokens among which none is special to the tokenizer."""
    if cut is None or cut.keep is Truncation.REFUSE:
        return ids
    return ids[: cut.most] if cut.keep is Truncation.KEEP_START else ids[-cut.most :]


class RequestPreparer:
    """One model's desk. Not thread-safe, but for `constraint`: give it one thread."""

    def __init__(self, model: RegisteredModel, info: DecoderInfo) -> None:
        manifest = model.manifest
        if manifest.generation_config is None:
            raise ManifestInvalid(f"Model {model.ref.id} was not built to generate")
        self._prompts = PromptTokenizer(model.directory, manifest.generation_config)
        tokenizer = self._prompts.tokenizer  # only read, so that the loop may have it too
        added = tokenizer.get_added_tokens_decoder()
        self._words = ModelContext(
            tokenizer=tokenizer,
            vocabulary=info.vocabulary,
            eos_token_ids=manifest.generation_config.eos_token_ids,
            special_tokens=frozenset(i for i, token in added.items() if token.special),
            context=info.context,
            never=manifest.generation_config.suppressed_token_ids,
            source=manifest.generation_config.encoder_decoder,
        )
        self._rows = info.slots
        self._most_prompt = (
            info.max_source_tokens or info.context - 1
        )  # room for one token of answer
        self._grammars = GrammarCompiler(
            (model.directory / TOKENIZER_NAME).read_text(encoding="utf-8"),
            info.vocabulary,
            self._words.eos_token_ids,
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
            return BeamSearchJob(ids, options, beams, self._words, call.deadline_s)
        return SamplingJob(ids, options, self._words, constraint, call.deadline_s)

    def _kept(self, beams: BeamSearchParams) -> BeamSearchParams | None:
        """As many as there are rows for; None for a single one. Raises InvalidField."""
        if beams.width <= self._rows:
            return beams
        if beams.is_explicit:
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
        if options.truncate_prompt_tokens is not None:
            ids = ids[-options.truncate_prompt_tokens :]
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
