"""From a body to questions for a generator whose model has an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deployments.artifacts.generation_config import GenerationDefaults
from deployments.artifacts.types import TaskName
from deployments.generation.messages import BeamSearchParams, GenerationOptions, SamplingParams
from deployments.ingress.apis.huggingface.requests import merge_parameters
from deployments.ingress.apis.text2text.schemas import (
    TextToTextParameters,
    parse_text2text_parameters,
)
from deployments.ingress.apis.text_generation.requests import (
    GenerateRequest,
    RouteDefaults,
    build_generate_request,
    parameter_conflict,
    parse_inputs,
    parse_options,
)
from deployments.ingress.generation import GenerationRequest
from deployments.ingress.http.request_options import RequestOptions
from deployments.ingress.service import format_tasks, require_task
from deployments.messages import Truncation
from deployments.registry import RegisteredModel

# Parameters that choose, or end, an answer token by token.
TOKEN_LEVEL_PARAMETERS = (
    "stop", "stop_sequences", "grammar", "frequency_penalty", "details", "decoder_input_details",
    "top_n_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToTextRequest:
    """A body that was read, for a model and one of its tasks."""

    model: RegisteredModel
    task: TaskName
    asked: GenerateRequest
    parameters: TextToTextParameters

    @classmethod
    def read(
        cls, body: Mapping[str, Any], model: RegisteredModel, task: TaskName, *, streams: bool
    ) -> TextToTextRequest:
        """A body as it is meant. Raises InvalidField, EmptyInput or UnknownParameter."""
        defaults = RouteDefaults(many=True, streams=streams)
        inputs = parse_inputs(body, defaults)
        parameters = parse_text2text_parameters(merge_parameters(body))
        _reject_languages(parameters, model)
        _reject_conflicts(parameters, streams=streams)
        asked = build_generate_request(inputs, parameters, defaults)
        return cls(model=model, task=task, asked=asked, parameters=parameters)

    @property
    def options(self) -> GenerationOptions:
        """The parameters, completed by the model's own, in a generator's terms."""
        parameters, defaults = self.parameters, self.model.generation_config.defaults
        fewest, most = parse_lengths(parameters, defaults)
        repeats = parameters.no_repeat_ngram_size
        if repeats is None:  # what follows a grammar has to repeat itself
            repeats = 0 if parameters.grammar else defaults.no_repeat_ngram_size
        options = parse_options(parameters, streams=self.asked.streams)
        return options._replace(
            sampling=adapt_sampling(options.sampling, parameters),
            beam_search=parse_beam_search(parameters, defaults, streams=self.asked.streams),
            no_repeat_ngram_size=repeats,
            max_new_tokens=most,
            min_new_tokens=fewest,
            truncation=parse_truncation(parameters),
        )

    def question(self, request: RequestOptions) -> GenerationRequest:
        """What a generator is asked. Raises InvalidField for a grammar that is none."""
        prefix = self.model.generation_config.task_prefixes.get(self.task, "")
        first, *further = (
            prompt if prompt.startswith(prefix) else prefix + prompt
            for prompt in self.asked.prompts
        )
        return replace(
            self.asked.question(self.model.ref.id, request),
            prompt=first,
            further_prompts=tuple(further),
            options=self.options,
            task=self.task,
        )


def has_encoder(model: RegisteredModel) -> bool:
    """Whether a model reads a text and writes another, rather than continuing the one it read."""
    generation_config = model.manifest.generation_config
    return generation_config is not None and generation_config.encoder_decoder is not None


def resolve_generation_task(model: RegisteredModel, named: TaskName | None) -> TaskName:
    """The task asked for, else the model's own. Raises WrongTask naming what it can do."""
    return model.tasks[0] if named is None else require_task(named, model)


def parse_lengths(
    parameters: TextToTextParameters, defaults: GenerationDefaults
) -> tuple[int, int | None]:
    """Least and most new tokens; a default gives way to what is asked for. Raises InvalidField."""
    fewest, most = parameters.min_new_tokens, parameters.max_new_tokens
    if fewest is None and parameters.min_length is not None:
        fewest = max(0, parameters.min_length - 1)
    if most is None and parameters.max_length is not None:
        most = parameters.max_length - 1
    if fewest is not None and most is not None and fewest > most:
        name = "min_length" if parameters.min_new_tokens is None else "min_new_tokens"
        raise parameter_conflict(name, "asks for more tokens than there may be")
    if fewest is None:
        own = defaults.min_new_tokens
        return own if most is None else min(own, most), most or defaults.max_new_tokens
    if most is None and defaults.max_new_tokens is not None:
        most = max(fewest, defaults.max_new_tokens)
    return fewest, most


def parse_beam_search(
    parameters: TextToTextParameters, defaults: GenerationDefaults, *, streams: bool
) -> BeamSearchParams | None:
    """Beam search where it is asked for, or the model's own way and nothing asked speaks against.

    What goes token by token does: streams, drawing, penalties, and what ends a text.
    """
    width = defaults.num_beams if parameters.num_beams is None else parameters.num_beams
    if (
        width == 1
        or streams
        or parameters.samples
        or _find_token_level_parameter(parameters) is not None
    ):
        return None
    penalty, stopping = parameters.length_penalty, parameters.early_stopping
    return BeamSearchParams(
        num_beams=width,
        length_penalty=defaults.length_penalty if penalty is None else penalty,
        early_stopping=defaults.early_stopping if stopping is None else stopping,
        is_explicit=parameters.num_beams is not None,
    )


def adapt_sampling(given: SamplingParams, parameters: TextToTextParameters) -> SamplingParams:
    """`given`, with nothing drawn unless that is asked for; 0 as `top_k` bounds nothing."""
    if parameters.samples:
        return given._replace(top_k=given.top_k or None)
    return SamplingParams(
        temperature=0.0,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=given.seed,
    )


def parse_truncation(parameters: TextToTextParameters) -> Truncation:
    """What becomes of texts that are too long; as in transformers' pipelines they are not cut."""
    cuts = parameters.truncation in (True, "longest_first", "only_first")
    return Truncation.KEEP_START if cuts else Truncation.REFUSE


def _reject_conflicts(parameters: TextToTextParameters, *, streams: bool) -> None:
    """Raise InvalidField for what beam search, when it is asked for, cannot go together with."""
    if parameters.truncation == "only_second":
        raise parameter_conflict("truncation", "cannot be `only_second`: there is no second text")
    if not parameters.uses_beam_search:
        return
    if streams:
        raise parameter_conflict("num_beams", "must be 1 when streaming")
    if parameters.samples:
        raise parameter_conflict(
            "num_beams", "must be 1 where tokens are drawn: leave `do_sample` out"
        )
    if (name := _find_token_level_parameter(parameters)) is not None:
        raise parameter_conflict("num_beams", f"must be 1 where `{name}` is given")
    if (parameters.num_return_sequences or 1) > 1:
        raise parameter_conflict("num_return_sequences", "is not possible with beam search")


def _find_token_level_parameter(parameters: TextToTextParameters) -> str | None:
    """A parameter that is of use only token by token, if one is given."""
    if parameters.repetition_penalty not in (None, 1.0):
        return "repetition_penalty"
    return next((name for name in TOKEN_LEVEL_PARAMETERS if getattr(parameters, name)), None)


def _reject_languages(parameters: TextToTextParameters, model: RegisteredModel) -> None:
    given = [name for name in ("src_lang", "tgt_lang") if getattr(parameters, name) is not None]
    if not given:
        return
    if len(given) == 1:
        raise parameter_conflict(given[0], "is not enough: `src_lang` and `tgt_lang` go together")
    raise parameter_conflict(
        "src_lang",
        f"is not possible: model {model.ref.id} takes no languages by name. Without them it can "
        f"do: {format_tasks(model)}",
    )
