"""From a body to questions for a generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from deployments.errors import InvalidField, MalformedBody
from deployments.generation.messages import GenerationOptions, Grammar, SamplingParams, Started
from deployments.ingress.apis.huggingface.requests import merge_parameters
from deployments.ingress.apis.text_generation.schemas import (
    GenerateParameters,
    GrammarParameter,
    parse_generate_parameters,
)
from deployments.ingress.generation import GenerationRequest
from deployments.ingress.http.bodies import parse_json
from deployments.ingress.http.request_options import RequestOptions
from deployments.tasks.inputs import Inputs, JsonSchema, NonEmptyText, one_or_many

PROMPT = Inputs[str](NonEmptyText, "a text")
PROMPTS = Inputs[str | list[str]](one_or_many(NonEmptyText), "a text or a list of texts")

# Fields of our own request, as clients know them.
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
    """How a route wants to be asked, and answers where the body does not say."""

    full_text: bool = False  # the prompt stands before what was generated
    many: bool = False  # several prompts may be asked, and several answers be given
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A body that was read."""

    prompts: tuple[str, ...]
    listed: bool  # they came as a list, and so do their answers
    parameters: GenerateParameters
    full_text: bool
    streams: bool

    def shown(self, prompt: str, text: str) -> str:
        """An answer's text, behind its prompt where that is wanted."""
        return prompt + text if self.full_text else text

    def reported_seed(self, started: Started) -> int | None:
        """The seed tokens were drawn with; None where they were not drawn."""
        return started.seed if self.parameters.samples else None

    def question(self, model_id: str | None, request: RequestOptions) -> GenerationRequest:
        """What a generator is asked. Raises InvalidField for a grammar that is none."""
        first, *further = self.prompts
        return GenerationRequest(
            prompt=first,
            further_prompts=tuple(further),
            options=parse_options(self.parameters, streams=self.streams),
            model_id=model_id,
            choices=self.parameters.num_return_sequences or 1,
            best_of=self.parameters.best_of,
            request_options=request,
        )


def parse_generate_request(body: Mapping[str, Any], defaults: RouteDefaults) -> GenerateRequest:
    """A body as it is meant. Raises InvalidField, EmptyInput or UnknownParameter."""
    inputs = parse_inputs(body, defaults)
    return build_generate_request(
        inputs, parse_generate_parameters(merge_parameters(body)), defaults
    )


def parse_inputs(body: Mapping[str, Any], defaults: RouteDefaults) -> str | list[str]:
    """A text, or several where they may be asked. Raises InvalidField or EmptyInput."""
    if body.get("inputs") is None:
        raise InvalidField("Error in `inputs`: field required", field="inputs")
    return (PROMPTS if defaults.many else PROMPT).read(body["inputs"])


def build_generate_request(
    inputs: str | list[str], parameters: GenerateParameters, defaults: RouteDefaults
) -> GenerateRequest:
    """What was read, put together. Raises InvalidField for what does not go together."""
    listed = isinstance(inputs, list)
    _reject_unsupported(parameters)
    if defaults.streams:
        _reject_unstreamable(parameters, listed=listed)
    if not defaults.many and (parameters.num_return_sequences or 1) > 1:
        raise parameter_conflict(
            "num_return_sequences", "is not possible here: one object is answered"
        )
    full_text = parameters.return_full_text
    return GenerateRequest(
        prompts=tuple(inputs) if isinstance(inputs, list) else (inputs,),
        listed=listed,
        parameters=parameters,
        full_text=defaults.full_text if full_text is None else full_text,
        streams=defaults.streams,
    )


def _reject_unsupported(parameters: GenerateParameters) -> None:
    """Raise InvalidField for parameters that do not go with each other, or with this server."""
    several = (parameters.best_of or 1) > 1
    if parameters.watermark:
        raise parameter_conflict("watermark", "is not supported here")
    if parameters.adapter_id is not None:
        raise parameter_conflict(
            "adapter_id", "is not supported here: a model with its adapter has an id of its own"
        )
    if several and not parameters.samples:
        raise parameter_conflict("best_of", "needs sampling: set `do_sample` or `temperature`")
    if several and parameters.seed is not None:
        raise parameter_conflict("seed", "must not be set when `best_of` is above 1")
    if several and parameters.max_time is not None:
        raise parameter_conflict("max_time", "is not possible with `best_of`")
    if (parameters.num_return_sequences or 1) > 1:
        if several:
            raise parameter_conflict("num_return_sequences", "is not possible with `best_of`")
        if not parameters.samples:
            raise parameter_conflict(
                "num_return_sequences", "needs sampling: set `do_sample` or `temperature`"
            )


def _reject_unstreamable(parameters: GenerateParameters, *, listed: bool) -> None:
    """Raise InvalidField for what a stream of one text's tokens cannot tell."""
    if listed:
        raise InvalidField("`inputs` must be a text when `stream` is true", field="inputs")
    if (parameters.best_of or 1) > 1:
        raise parameter_conflict("best_of", "is not possible when streaming")
    if (parameters.num_return_sequences or 1) > 1:
        raise parameter_conflict("num_return_sequences", "is not possible when streaming")
    if parameters.decoder_input_details:
        raise parameter_conflict("decoder_input_details", "is not possible when streaming")


def parse_options(parameters: GenerateParameters, *, streams: bool) -> GenerationOptions:
    """The parameters in a generator's terms. Raises InvalidField for a grammar that is none."""
    # Every event has its token's log-probability: clients in typed languages insist on a number.
    tells_tokens = streams or parameters.includes_details
    return GenerationOptions(
        sampling=parse_sampling(parameters),
        max_new_tokens=parameters.max_new_tokens,
        min_new_tokens=parameters.min_new_tokens or 0,
        stop=tuple(parameters.stop or parameters.stop_sequences or ()),
        include_stop_string=True,
        grammar=None if parameters.grammar is None else parse_grammar(parameters.grammar),
        logprobs=(parameters.top_n_tokens or 0) if tells_tokens else None,
        prompt_logprobs=bool(parameters.decoder_input_details),
        truncate_prompt_tokens=parameters.truncate,
    )


def parse_sampling(parameters: GenerateParameters) -> SamplingParams:
    """How tokens are chosen: the likeliest, unless the parameters say they are drawn."""
    likeliest_or_drawn = 1.0 if parameters.samples else 0.0
    return SamplingParams(
        temperature=likeliest_or_drawn
        if parameters.temperature is None
        else parameters.temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        min_p=parameters.min_p,
        typical_p=parameters.typical_p,
        repetition_penalty=1.0
        if parameters.repetition_penalty is None
        else parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        seed=parameters.seed,
    )


def parse_grammar(given: GrammarParameter) -> Grammar:
    """The grammar; a JSON schema may stand in an object with its name, or be text itself.

    Raises InvalidField.
    """
    value = given.value
    if given.type == "regex":
        if not isinstance(value, str):
            raise InvalidField(
                "`parameters.grammar.value` must be a string", field="parameters.grammar.value"
            )
        return Grammar("regex", value)
    schema = parse_schema(value) if isinstance(value, str) else value
    named = schema.get("schema")
    if given.type == "json_schema" and isinstance(named, dict):
        schema = named
    return Grammar("json_schema", orjson.dumps(schema).decode())


def parse_schema(text: str) -> JsonSchema:
    """The JSON object that a text is. Raises InvalidField."""
    try:
        value = parse_json(text.encode())
    except MalformedBody:
        value = None
    if not isinstance(value, dict):
        raise InvalidField(
            "`parameters.grammar.value` must be a JSON schema", field="parameters.grammar.value"
        )
    return value


def parameter_conflict(name: str, why: str) -> InvalidField:
    """What is said of a parameter that cannot be."""
    return InvalidField(f"`parameters.{name}` {why}", field=f"parameters.{name}")
