"""Request preparation: from a call to a job with prompt tokens, a compiled grammar and limits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import tokenizers

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_NAME,
    TOOL_TEMPLATE_NAME,
)
from deployments.engines.decoder import DecoderInfo
from deployments.errors import (
    TRUNCATION_ADVICE,
    EmptyInput,
    InputTooLong,
    InvalidField,
    ManifestInvalid,
    UnknownToken,
)
from deployments.generation.beam_search import BeamSearchJob
from deployments.generation.call_marks import find_call_marks
from deployments.generation.chat_template import ChatTemplate
from deployments.generation.grammar import Constraint, GrammarCompiler
from deployments.generation.grammar_trials import TrialLimits
from deployments.generation.harmony_splitter import HarmonySplitter, HarmonyTokens
from deployments.generation.job import Demand, Job, ModelContext, SamplingJob
from deployments.generation.reasoning import AnswerSplitter, ReasoningMarks, ReasoningSplitter
from deployments.messages import (
    BeamSearchParams,
    Chat,
    GenerationCall,
    GenerationOptions,
    Grammar,
    Prompt,
    Truncation,
)
from deployments.registry import RegisteredModel
from deployments.tokenization.encodings import open_tokenizer, translate_panics, truncate_item


class PromptTruncation(NamedTuple):
    """Rule that shortens a prompt of more than `max_tokens` tokens."""

    max_tokens: int
    side: Truncation  # REFUSE: do not shorten; the caller rejects the prompt


class PromptTokenizer:
    """The tokenizer and the chat template of one model. Not thread-safe."""

    def __init__(self, directory: Path, generation_config: GenerationConfig) -> None:
        """Open the tokenizer of the artifact in `directory`. Raises ArtifactError if invalid."""
        self._directory = directory
        self._generation_config = generation_config
        self.tokenizer = open_tokenizer(directory)

    def tokenize(
        self,
        prompt: Prompt,
        truncation: PromptTruncation | None = None,
        source_language: int | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt, at least one.

        The tokenizer adds special tokens to text, also to truncated text. It adds none to token
        ids. It adds none to conversations either, because a chat template contains its own special
        tokens. A special token that is written out in a text is parsed as that token.
        `source_language` replaces the language token that the tokenizer adds to text.

        Raises EmptyInput, or UnknownToken for token ids outside of the vocabulary. For a
        conversation also raises InputTooLong if its text is too long, and InvalidField if there is
        no template or the template fails.
        """
        if isinstance(prompt, Chat):
            return _truncate(self._tokenize_chat(prompt), truncation)
        if isinstance(prompt, str):
            ids = self._tokenize_text(prompt, truncation, source_language)
        else:
            ids = _truncate(self._check_ids(prompt), truncation)
        if not ids:
            raise EmptyInput("`prompt` has no tokens", field="prompt")
        return ids

    def _tokenize_text(
        self, text: str, truncation: PromptTruncation | None, source_language: int | None
    ) -> list[int]:
        if not text:
            return []
        encoding = self._encode(text)
        ids: list[int] = encoding.ids
        if (
            truncation is not None
            and truncation.side is not Truncation.REFUSE
            and len(ids) > truncation.max_tokens
        ):
            ids = truncate_item(encoding, truncation.max_tokens, truncation.side).ids.tolist()
        if source_language is None:
            return ids
        return self._set_source_language(ids, encoding.sequence_ids, source_language)

    def _set_source_language(
        self, ids: list[int], sequence_ids: Sequence[int | None], language: int
    ) -> list[int]:
        """Replace the language token that the tokenizer adds before or after the text.

        `sequence_ids` describe the text before truncation. Truncation keeps all added tokens, so
        their number before and after the text is the same in `ids`. Language tokens within the text
        stay as they are.
        """
        config = self._generation_config.encoder_decoder
        languages = set(config.languages.values()) if config else set()
        before = len(list(takewhile(lambda segment: segment is None, sequence_ids)))
        after = len(list(takewhile(lambda segment: segment is None, reversed(sequence_ids))))
        return [
            language if token in languages and not before <= index < len(ids) - after else token
            for index, token in enumerate(ids)
        ]

    def _check_ids(self, ids: tuple[int, ...]) -> list[int]:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self._vocabulary_end:
                raise UnknownToken(
                    f"`prompt` contains token id {token}; the range is 0 to "
                    f"{self._vocabulary_end - 1}",
                    field="prompt",
                )
        return list(ids)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """Encode one text. `encode` would hold the GIL, and so stop the decode steps meanwhile."""
        (encoding,) = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding

    def _tokenize_chat(self, chat: Chat) -> list[int]:
        text = self.select_template(chat).render(chat) if chat.messages else ""
        try:
            ids: list[int] = self._encode(text, add_special_tokens=False).ids
        except TypeError as exc:  # a template may split a surrogate pair
            raise InvalidField(
                "`messages` render to a prompt that is not valid UTF-8", field="messages"
            ) from exc
        if not ids:
            raise EmptyInput("`messages` have no tokens", field="messages")
        return ids

    def select_template(self, chat: Chat) -> ChatTemplate:
        return self._tool_template if chat.tools else self._template

    def ignores_tools(self, prompt: Prompt) -> bool:
        """Return whether a conversation has tools that its chat template does not use."""
        if not isinstance(prompt, Chat) or not prompt.tools:
            return False
        return self._tool_template.ignores_tools(prompt)

    @cached_property
    def _template(self) -> ChatTemplate:
        return self._read_template(CHAT_TEMPLATE_NAME)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        if (self._directory / TOOL_TEMPLATE_NAME).is_file():
            return self._read_template(TOOL_TEMPLATE_NAME)
        return self._template

    def _read_template(self, name: str) -> ChatTemplate:
        try:
            source = (self._directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InvalidField(
                "this model has no chat template; send a `prompt` to the completions route instead",
                field="messages",
            ) from None
        return ChatTemplate(source, self._generation_config.special_tokens)

    @cached_property
    def _vocabulary_end(self) -> int:
        # Some vocabularies have gaps, so the number of tokens does not give the highest id.
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _truncate(ids: list[int], truncation: PromptTruncation | None) -> list[int]:
    """Truncate the ids of a prompt to which the tokenizer adds no special tokens.

    Without a truncation, or with REFUSE, return the ids unchanged.
    """
    if truncation is None or truncation.side is Truncation.REFUSE:
        return ids
    if truncation.side is Truncation.KEEP_START:
        return ids[: truncation.max_tokens]
    return ids[-truncation.max_tokens :]


class RequestPreparer:
    """Builder of jobs from the calls of one model.

    `compile_grammar` and `estimate` are thread-safe. Only one thread may call the other methods.
    """

    def __init__(self, model: RegisteredModel, info: DecoderInfo) -> None:
        manifest = model.manifest
        if manifest.generation_config is None:
            raise ManifestInvalid(f"Model {model.ref.id} was not built to generate")
        self._prompts = PromptTokenizer(model.directory, manifest.generation_config)
        tokenizer = self._prompts.tokenizer  # read only, so the scheduler may share it
        added = tokenizer.get_added_tokens_decoder()
        self._model = ModelContext(
            tokenizer=tokenizer,
            vocabulary=info.vocabulary,
            eos_token_ids=manifest.generation_config.eos_token_ids,
            special_tokens=frozenset(i for i, token in added.items() if token.special),
            context=info.context,
            suppressed=manifest.generation_config.suppressed_token_ids,
            encoder_decoder=manifest.generation_config.encoder_decoder,
        )
        # The APIs find calls by their marks, so for requests with tools these are part of the text.
        call_marks = find_call_marks(tokenizer, self._model.special_tokens)
        special_tokens = self._model.special_tokens.union(call_marks)
        self._calling_model = replace(
            self._model, special_tokens=special_tokens, call_marks=call_marks
        )
        self._marks = ReasoningMarks.find_all(tokenizer, info.vocabulary)
        self._harmony = HarmonyTokens.find(tokenizer, info.vocabulary)
        self._slots = info.slots
        # The context of a decoder-only model contains prompt and answer, so reserve one token for
        # the answer.
        self._max_prompt_tokens = info.max_source_tokens or info.context - 1
        self._grammars = GrammarCompiler(
            (model.directory / TOKENIZER_NAME).read_text(encoding="utf-8"),
            info.vocabulary,
            self._model.eos_token_ids,
        )
        # If the tokenizer does not support grammars, `compile_grammar` raises the error for each
        # request with a grammar.
        with suppress(InvalidField):
            self._grammars.open()  # can hold the GIL for over a second, so do it before serving

    def compile_grammar(self, grammar: Grammar, limits: TrialLimits) -> Constraint:
        """Compile a grammar. Raises the errors of GrammarCompiler.compile."""
        return self._grammars.compile(grammar, limits)

    def close(self) -> None:
        self._grammars.close()

    def estimate(self, call: GenerationCall) -> Demand:
        """Estimate the demand of a call before its prompt is tokenized. Thread-safe."""
        options, context = call.options, self._model.context
        requested = context if options.max_new_tokens is None else options.max_new_tokens
        beams = 1 if options.beam_search is None else options.beam_search.num_beams
        return Demand(
            min_new_tokens=options.min_new_tokens,
            max_new_tokens=min(requested, context),
            slots=min(beams, self._slots),
            deadline_s=call.deadline_s,
            client=call.client,
            priority=call.priority,
        )

    def build_job(self, call: GenerationCall, constraint: Constraint | None) -> Job:
        """Build the job of a call with its compiled `constraint`.

        Raises InvalidField, InputTooLong, UnknownToken, EmptyInput or EngineFailed.
        """
        options = call.options
        with translate_panics():
            ids = self._tokenize(call.prompt, options)
        beams = None if options.beam_search is None else self._limit_beams(options.beam_search)
        job: Job
        if beams is not None:
            job = BeamSearchJob(ids, options, beams, self._model, call.deadline_s)
        else:
            reasoning = self._find_reasoning(
                call.prompt, ids, is_constrained=constraint is not None
            )
            offers_tools = isinstance(call.prompt, Chat) and bool(call.prompt.tools)
            model = self._calling_model if offers_tools else self._model
            job = SamplingJob(ids, options, model, constraint, call.deadline_s, reasoning)
        job.client, job.priority = call.client, call.priority
        job.ignores_tools = self._prompts.ignores_tools(call.prompt)
        return job

    def tokenize_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, which may exceed the context.

        Raises InvalidField, InputTooLong, UnknownToken, EmptyInput or EngineFailed.
        """
        with translate_panics():
            return tuple(self._prompts.tokenize(prompt))

    def _find_reasoning(
        self, prompt: Prompt, ids: Sequence[int], *, is_constrained: bool
    ) -> AnswerSplitter | None:
        """Return the splitter of an answer; None if it is all text.

        Answers to prompts without a chat template are, because the client chose their form.
        """
        if not isinstance(prompt, Chat):
            return None
        template, tokenizer = self._prompts.select_template(prompt), self._model.tokenizer
        if self._harmony is not None and template.is_harmony:
            functions = [str(tool["function"].get("name")) for tool in prompt.tools]
            return HarmonySplitter.after_prompt(
                ids, self._harmony, tokenizer, functions, is_constrained=is_constrained
            )
        named = template.reasoning_marks
        marks = next((each for each in self._marks if each.texts in named), None)
        if marks is None:
            return None
        # A grammar may require white space at the start of the text.
        return ReasoningSplitter.after_prompt(ids, marks, tokenizer, trims_text=not is_constrained)

    def _limit_beams(self, params: BeamSearchParams) -> BeamSearchParams | None:
        """Limit the beams to the KV slots. Return None if a single beam is left.

        Raises InvalidField if the request sets more beams than there are slots.
        """
        if params.num_beams <= self._slots:
            return params
        if params.is_explicit:
            raise InvalidField(
                f"`num_beams` is {params.num_beams}; the maximum is {self._slots}, the KV slots of "
                "this server. Ask for fewer beams.",
                field="num_beams",
            )
        return params._replace(num_beams=self._slots) if self._slots > 1 else None

    def _tokenize(self, prompt: Prompt, options: GenerationOptions) -> list[int]:
        if options.prompt_logprobs and self._model.encoder_decoder is not None:
            raise InvalidField(
                "`prompt_logprobs` is not supported by encoder-decoder models. Omit it.",
                field="prompt_logprobs",
            )
        limit = self._max_prompt_tokens
        source_language = None if options.languages is None else options.languages.source
        truncation = PromptTruncation(limit, options.truncation)
        ids = self._prompts.tokenize(prompt, truncation, source_language)
        if options.truncate_prompt_tokens is not None:
            ids = ids[-options.truncate_prompt_tokens :]
        # A tokenizer may have more tokens than the model. Prompts of encoder-decoders are not
        # checked, because the vocabulary of an encoder is not in the manifest.
        if self._model.encoder_decoder is None and max(ids) >= self._model.vocabulary:
            raise UnknownToken(
                f"`prompt` contains token id {max(ids)}; the maximum of the model is "
                f"{self._model.vocabulary - 1}",
                field="prompt",
            )
        if len(ids) > limit:
            raise InputTooLong(
                f"`prompt` has {len(ids)} tokens; the maximum is {limit}. Shorten it"
                f"{TRUNCATION_ADVICE}.",
                field="prompt",
            )
        return ids
