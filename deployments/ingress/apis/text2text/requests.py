"""Requests to encoder-decoder models, parsed into generation requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deployments.artifacts.generation_config import GenerationDefaults
from deployments.artifacts.types import TruncationSide
from deployments.ingress.apis.shared.envelope import merge_parameters
from deployments.ingress.apis.text2text.schemas import (
    TextToTextParameters,
    parse_text2text_parameters,
)
from deployments.ingress.apis.text_generation.requests import (
    GenerateRequest,
    RouteDefaults,
    build_generate_request,
    build_options,
    parameter_conflict,
    parse_inputs,
)
from deployments.ingress.models.resolver import require_task
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import GenerationRequest
from deployments.messages import (
    BeamSearchParams,
    GenerationOptions,
    Languages,
    SamplingParams,
    Truncation,
)
from deployments.registry import RegisteredModel

# Parameters that need token-by-token decoding, which beam search does not do.
TOKEN_LEVEL_PARAMETERS = (
    "stop", "stop_sequences", "grammar", "frequency_penalty", "details", "decoder_input_details",
    "top_n_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToTextRequest:
    """A parsed and checked body for one task of one model."""

    model: RegisteredModel
    task: str
    tgi_request: GenerateRequest
    parameters: TextToTextParameters
    languages: Languages | None

    @classmethod
    def parse(
        cls, body: Mapping[str, Any], model: RegisteredModel, task: str, *, streams: bool
    ) -> TextToTextRequest:
        """Parse and check a body. Raises InvalidField, EmptyInput or UnknownParameter."""
        defaults = RouteDefaults(many=True, streams=streams)
        inputs = parse_inputs(body, defaults)
        parameters = parse_text2text_parameters(merge_parameters(body))
        languages = parse_languages(parameters, model)
        _reject_conflicts(parameters, streams=streams)
        tgi_request = build_generate_request(inputs, parameters, defaults)
        return cls(
            model=model,
            task=task,
            tgi_request=tgi_request,
            parameters=parameters,
            languages=languages,
        )

    @property
    def options(self) -> GenerationOptions:
        """The options of the generation. Unset parameters have the defaults of the model.

        Raises InvalidField for an invalid grammar or conflicting lengths.
        """
        parameters, defaults = self.parameters, self.model.generation_config.defaults
        min_new_tokens, max_new_tokens = parse_lengths(parameters, defaults)
        no_repeat_ngram = parameters.no_repeat_ngram_size
        if no_repeat_ngram is None:  # 0 with a grammar: its texts may have to repeat n-grams
            no_repeat_ngram = 0 if parameters.grammar else defaults.no_repeat_ngram_size
        options = build_options(parameters, streams=self.tgi_request.streams)
        return options._replace(
            sampling=adapt_sampling(options.sampling, parameters, defaults),
            beam_search=parse_beam_search(parameters, defaults, streams=self.tgi_request.streams),
            no_repeat_ngram_size=no_repeat_ngram,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            truncation=parse_truncation(parameters, self.model.manifest.truncation_side),
            languages=self.languages,
        )

    def to_generation_request(
        self, request_options: RequestOptions, *, model_id: str | None
    ) -> GenerationRequest:
        """Build the generation request. Prompts get the task prefix (such as `summarize: `) once.

        Raises InvalidField for an invalid grammar or conflicting lengths.
        """
        prefix = self.model.generation_config.task_prefixes.get(self.task, "")
        first, *further = (
            prompt if prompt.startswith(prefix) else prefix + prompt
            for prompt in self.tgi_request.prompts
        )
        return replace(
            self.tgi_request.to_generation_request(
                request_options, model=self.model, model_id=model_id
            ),
            prompt=first,
            further_prompts=tuple(further),
            options=self.options,
            task=self.task,
        )


def resolve_generation_task(model: RegisteredModel, requested: str | None) -> str:
    """Return the requested task, else the model's first.

    Raises WrongTask if the model does not support the requested task.
    """
    return model.tasks[0] if requested is None else require_task(requested, model)


def parse_languages(parameters: TextToTextParameters, model: RegisteredModel) -> Languages | None:
    """Resolve `src_lang` and `tgt_lang` to language tokens; None if neither is set.

    Raises InvalidField if only one is set, or if the model does not know a code.
    """
    codes = {"src_lang": parameters.src_lang, "tgt_lang": parameters.tgt_lang}
    requested = [name for name, code in codes.items() if code is not None]
    if not requested:
        return None
    config = model.generation_config.encoder_decoder
    known = {} if config is None else config.languages
    if not known:
        raise parameter_conflict(
            requested[0], f"is not supported: model {model.ref.id} has no language codes. Omit it."
        )
    for name, code in codes.items():
        if code is None:
            raise parameter_conflict(
                name, "is required. Set both `src_lang` and `tgt_lang`, or neither."
            )
        if code not in known:
            names = ", ".join(f"`{language}`" for language in sorted(known))
            raise parameter_conflict(
                name, f"is `{code}`, which model {model.ref.id} does not know. Known: {names}"
            )
    return Languages(*(known[code] for code in codes.values() if code is not None))


def parse_lengths(
    parameters: TextToTextParameters, defaults: GenerationDefaults
) -> tuple[int, int | None]:
    """Return minimum and maximum of new tokens. The maximum None means the remaining context.

    If a default conflicts with a requested bound, the bound replaces the default. Raises
    InvalidField if the requested minimum exceeds the requested maximum.
    """
    minimum, maximum = parameters.min_new_tokens, parameters.max_new_tokens
    if minimum is None and parameters.min_length is not None:
        minimum = max(0, parameters.min_length - 1)
    if maximum is None and parameters.max_length is not None:
        maximum = parameters.max_length - 1
    if minimum is not None and maximum is not None and minimum > maximum:
        name = "min_length" if parameters.min_new_tokens is None else "min_new_tokens"
        raise parameter_conflict(
            name, f"requires at least {minimum} new tokens; the maximum is {maximum}"
        )
    if minimum is None:
        minimum = defaults.min_new_tokens
        if maximum is None:
            return minimum, defaults.max_new_tokens
        return min(minimum, maximum), maximum
    if maximum is None and defaults.max_new_tokens is not None:
        maximum = max(minimum, defaults.max_new_tokens)
    return minimum, maximum


def parse_beam_search(
    parameters: TextToTextParameters, defaults: GenerationDefaults, *, streams: bool
) -> BeamSearchParams | None:
    """Return the parameters of beam search; None for another decoding method.

    Another method is used for one beam, a stream, sampling or a token-level parameter.
    """
    num_beams = defaults.num_beams if parameters.num_beams is None else parameters.num_beams
    is_token_level = streams or parameters.samples or _find_token_level(parameters) is not None
    if num_beams == 1 or is_token_level:
        return None
    penalty, stopping = parameters.length_penalty, parameters.early_stopping
    return BeamSearchParams(
        num_beams=num_beams,
        length_penalty=defaults.length_penalty if penalty is None else penalty,
        early_stopping=defaults.early_stopping if stopping is None else stopping,
        is_explicit=parameters.num_beams is not None,
    )


def adapt_sampling(
    sampling: SamplingParams, parameters: TextToTextParameters, defaults: GenerationDefaults
) -> SamplingParams:
    """Return `sampling`, or greedy decoding if no sampling is requested.

    The default of `repetition_penalty` comes from the model. `top_k` 0 means no limit.
    """
    penalty = parameters.repetition_penalty
    penalty = defaults.repetition_penalty if penalty is None else penalty
    if parameters.samples:
        return sampling._replace(top_k=sampling.top_k or None, repetition_penalty=penalty)
    return SamplingParams(
        temperature=0.0,
        repetition_penalty=penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
    )


def parse_truncation(parameters: TextToTextParameters, side: TruncationSide) -> Truncation:
    """Return how to truncate long inputs. By default they are rejected, as in transformers.

    `side` is the side that the model's tokenizer removes.
    """
    is_truncated = parameters.truncation in (True, "longest_first", "only_first")
    return Truncation.remove(side) if is_truncated else Truncation.REFUSE


def _reject_conflicts(parameters: TextToTextParameters, *, streams: bool) -> None:
    if parameters.truncation == "only_second":
        raise parameter_conflict("truncation", "cannot be `only_second`: there is no second text")
    if not parameters.uses_beam_search:
        return
    if streams:
        raise parameter_conflict("num_beams", "must be 1 when streaming")
    if parameters.samples:
        raise parameter_conflict("num_beams", "must be 1 when sampling. Omit `do_sample`.")
    if (name := _find_token_level(parameters)) is not None:
        raise parameter_conflict("num_beams", f"must be 1 when `{name}` is set")
    if parameters.has_sequences:
        raise parameter_conflict("num_return_sequences", "must be 1 with beam search")


def _find_token_level(parameters: TextToTextParameters) -> str | None:
    return next((name for name in TOKEN_LEVEL_PARAMETERS if getattr(parameters, name)), None)
