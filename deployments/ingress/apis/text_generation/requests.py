"""Requests of text-generation-inference's API, parsed into generation requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.errors import InvalidField
from deployments.ingress.apis.shared.envelope import merge_parameters
from deployments.ingress.apis.shared.schema_grammar import (
    build_schema_grammar,
    parse_named_schema,
    read_schema,
)
from deployments.ingress.apis.text_generation.schemas import (
    GenerateParameters,
    GrammarParameter,
    parse_generate_parameters,
)
from deployments.ingress.limits import MAX_STOPS
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import GenerationRequest
from deployments.messages import GenerationOptions, Grammar, SamplingParams, Started
from deployments.registry import RegisteredModel
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many

PROMPT = Inputs[str](NonEmptyText, "a text")
PROMPTS = Inputs[str | list[str]](one_or_many(NonEmptyText), "a text or a list of texts")
GRAMMAR_VALUE = "parameters.grammar.value"

# Fields of a GenerationRequest and their names in the body, for errors.
TGI_FIELD_NAMES = {
    "prompt": "inputs",
    "prompt_logprobs": "parameters.decoder_input_details",
    "grammar": "parameters.grammar",
    "max_new_tokens": "parameters.max_new_tokens",
    "min_new_tokens": "parameters.min_new_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "logprobs": "parameters.top_n_tokens",
    "stop": "parameters.stop",
    "sampling.": "parameters.",
    "choices": "parameters.num_return_sequences",
    "best_of": "parameters.best_of",
    "num_beams": "parameters.num_beams",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDefaults:
    """Properties of a route. `return_full_text` in the body replaces `full_text`."""

    full_text: bool = False  # default of `return_full_text`
    many: bool = False  # accepts several prompts and several sequences per prompt
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A parsed and checked body of text-generation-inference's API."""

    prompts: tuple[str, ...]
    is_list: bool  # `inputs` is a list; the response is a list of the same length
    parameters: GenerateParameters
    full_text: bool
    streams: bool

    def format_text(self, prompt: str, text: str) -> str:
        return prompt + text if self.full_text else text

    def reported_seed(self, started: Started) -> int | None:
        """Return the seed of a sampled sequence, None with greedy decoding."""
        return started.seed if self.parameters.samples else None

    def to_generation_request(
        self,
        request_options: RequestOptions,
        *,
        model: RegisteredModel | None = None,
        model_id: str | None = None,
    ) -> GenerationRequest:
        """Build the generation request. Raises InvalidField for an invalid grammar."""
        first, *further = self.prompts
        return GenerationRequest(
            prompt=first,
            further_prompts=tuple(further),
            options=build_options(self.parameters, streams=self.streams),
            model=model,
            model_id=model_id,
            choices=self.parameters.num_return_sequences or 1,
            best_of=self.parameters.best_of,
            request_options=request_options,
        )


def parse_generate_request(body: Mapping[str, Any], defaults: RouteDefaults) -> GenerateRequest:
    """Parse and check a body. Raises InvalidField, EmptyInput or UnknownParameter."""
    inputs = parse_inputs(body, defaults)
    parameters = parse_generate_parameters(merge_parameters(body))
    return build_generate_request(inputs, parameters, defaults)


def parse_inputs(body: Mapping[str, Any], defaults: RouteDefaults) -> str | list[str]:
    """Return the prompts of a body. Raises InvalidField or EmptyInput."""
    if body.get("inputs") is None:
        raise InvalidField("Error in `inputs`: field required", field="inputs")
    return (PROMPTS if defaults.many else PROMPT).read(body["inputs"])


def build_generate_request(
    inputs: str | list[str], parameters: GenerateParameters, defaults: RouteDefaults
) -> GenerateRequest:
    """Build the request. Raises InvalidField for unsupported or conflicting parameters."""
    is_list = isinstance(inputs, list)
    _reject_unsupported(parameters)
    _reject_conflicts(parameters)
    if defaults.streams:
        _reject_unstreamable(parameters, is_list=is_list)
    if not defaults.many and parameters.has_sequences:
        raise parameter_conflict(
            "num_return_sequences", "must be 1 on this route, which returns one object"
        )
    full_text = parameters.return_full_text
    return GenerateRequest(
        prompts=tuple(inputs) if isinstance(inputs, list) else (inputs,),
        is_list=is_list,
        parameters=parameters,
        full_text=defaults.full_text if full_text is None else full_text,
        streams=defaults.streams,
    )


def _reject_unsupported(parameters: GenerateParameters) -> None:
    if parameters.watermark:
        raise parameter_conflict("watermark", "is not supported. Omit it.")
    if parameters.adapter_id is not None:
        raise parameter_conflict(
            "adapter_id", "is not supported. Request the id of the model built with the adapter."
        )


def _reject_conflicts(parameters: GenerateParameters) -> None:
    has_best_of = parameters.has_best_of
    if has_best_of and not parameters.samples:
        raise parameter_conflict("best_of", "needs sampling. Set `do_sample` or `temperature`.")
    if has_best_of and parameters.seed is not None:
        raise parameter_conflict("seed", "must not be set when `best_of` is above 1")
    if has_best_of and parameters.max_time is not None:
        raise parameter_conflict("max_time", "must not be set when `best_of` is above 1")
    if has_best_of and parameters.has_sequences:
        raise parameter_conflict("num_return_sequences", "must be 1 when `best_of` is above 1")
    if len(parameters.stop_strings) > MAX_STOPS:
        raise parameter_conflict(
            "stop_sequences", f"and `stop` have more than {MAX_STOPS} strings together. Send fewer."
        )
    if parameters.has_sequences and not parameters.samples:
        raise parameter_conflict(
            "num_return_sequences", "needs sampling. Set `do_sample` or `temperature`."
        )


def _reject_unstreamable(parameters: GenerateParameters, *, is_list: bool) -> None:
    """Raise InvalidField for inputs and parameters that a stream of one sequence cannot have."""
    if is_list:
        raise InvalidField("`inputs` must be a text when `stream` is true", field="inputs")
    if parameters.has_best_of:
        raise parameter_conflict("best_of", "must be 1 when streaming")
    if parameters.has_sequences:
        raise parameter_conflict("num_return_sequences", "must be 1 when streaming")
    if parameters.decoder_input_details:
        raise parameter_conflict("decoder_input_details", "must be false when streaming")


def build_options(parameters: GenerateParameters, *, streams: bool) -> GenerationOptions:
    """Build the options. Raises InvalidField for an invalid grammar."""
    # Events of a stream always have a log-probability, because typed clients require a number.
    includes_tokens = streams or parameters.includes_details
    return GenerationOptions(
        sampling=build_sampling(parameters),
        max_new_tokens=parameters.max_new_tokens,
        min_new_tokens=parameters.min_new_tokens or 0,
        stop=parameters.stop_strings,
        include_stop_string=True,
        grammar=None if parameters.grammar is None else parse_grammar(parameters.grammar),
        logprobs=(parameters.top_n_tokens or 0) if includes_tokens else None,
        prompt_logprobs=bool(parameters.decoder_input_details),
        truncate_prompt_tokens=parameters.truncate,
    )


def build_sampling(parameters: GenerateParameters) -> SamplingParams:
    """Return greedy decoding (temperature 0), unless a parameter requests sampling."""
    penalty = parameters.repetition_penalty
    temperature = 0.0
    if parameters.samples:
        temperature = 1.0 if parameters.temperature is None else parameters.temperature
    return SamplingParams(
        temperature=temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        min_p=parameters.min_p,
        typical_p=parameters.typical_p,
        repetition_penalty=1.0 if penalty is None else penalty,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        seed=parameters.seed,
    )


def parse_grammar(grammar: GrammarParameter) -> Grammar:
    """Parse `parameters.grammar`. Raises InvalidField.

    A JSON schema is an object, or an object as JSON text. For the type `json_schema`, the schema
    may also be under the key `schema` of this object.
    """
    value = grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise InvalidField(f"`{GRAMMAR_VALUE}` must be a string", field=GRAMMAR_VALUE)
        return Grammar("regex", value)
    if grammar.type == "json_schema":
        return parse_named_schema(value, GRAMMAR_VALUE)
    return build_schema_grammar(read_schema(value, GRAMMAR_VALUE))


def parameter_conflict(name: str, requirement: str) -> InvalidField:
    return InvalidField(f"`parameters.{name}` {requirement}", field=f"parameters.{name}")
