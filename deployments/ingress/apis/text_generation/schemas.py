"""Request parameters and response schemas of text-generation-inference's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.errors import UnknownParameter
from deployments.ingress.limits import MAX_STOP_CHARS, MAX_STOPS
from deployments.tasks.inputs import FailFastList, NonEmptyText, parse_parameters, text_or

MAX_TOP_TOKENS = 20
MAX_LISTED_KEYS = 16  # unknown keys listed in an error
MAX_SEED = (1 << 64) - 1

FinishWord = Literal["length", "eos_token", "stop_sequence"]
StopText = Annotated[NonEmptyText, Field(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS), FailFastList()]
OpenProbability = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class GrammarParameter(BaseModel):
    """Constraint of the output; `value` is a JSON schema or a regular expression."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["json", "json_schema", "regex"]
    value: text_or(dict[str, Any], str)  # type: ignore[valid-type]  # built by a function


class GenerateParameters(BaseModel):
    """`parameters` of text-generation-inference. null means "not set".

    `num_return_sequences`, `max_time`, `min_new_tokens` and `min_p` come from the pipelines of
    transformers. `stop_sequences` is the older name of `stop`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_new_tokens: Count | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_k: Count | None = None
    top_p: OpenProbability | None = None
    typical_p: OpenProbability | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: Stops | None = None
    stop_sequences: Stops | None = None
    return_full_text: bool | None = None
    best_of: Count | None = None
    num_return_sequences: Count | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_TOP_TOKENS)] | None = None
    truncate: Count | None = None
    grammar: GrammarParameter | None = None
    max_time: Annotated[float, Field(gt=0, description="Seconds.")] | None = None
    watermark: bool | None = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled: `do_sample` is true or a sampling parameter is set.

        A set parameter overrides `do_sample: false`, as in text-generation-inference: older
        clients always send `do_sample: false`. A temperature of 1 changes nothing, so it does not
        count.
        """
        values = (self.top_k, self.top_p, self.typical_p, self.min_p)
        is_heated = self.temperature not in (None, 1.0)
        return bool(self.do_sample) or is_heated or any(value is not None for value in values)

    @property
    def has_best_of(self) -> bool:
        """Whether `best_of` selects among several candidates. A value of 1 has no effect."""
        return (self.best_of or 1) > 1

    @property
    def has_sequences(self) -> bool:
        """Whether `num_return_sequences` requests several sequences per prompt."""
        return (self.num_return_sequences or 1) > 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings of `stop` and `stop_sequences`, each once. Some clients send both lists."""
        return tuple(dict.fromkeys([*(self.stop or ()), *(self.stop_sequences or ())]))

    @property
    def includes_details(self) -> bool:
        """Whether the response has `details`, with or without the tokens of the prompt."""
        return bool(self.details or self.decoder_input_details)


class TokenDetails(TypedDict):
    id: int
    text: str
    logprob: float | None
    special: bool


class PromptToken(TypedDict):
    """A token of the prompt. The first has no `logprob`."""

    id: int
    text: str
    logprob: float | None


class GenerationDetails(TypedDict):
    """Tokens of one sequence. `seed` is null with greedy decoding."""

    finish_reason: FinishWord
    generated_tokens: int
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[TokenDetails]
    top_tokens: NotRequired[list[list[TokenDetails]]]


class BestOfSequence(GenerationDetails):
    """A sequence that `best_of` discarded."""

    generated_text: str


class Details(GenerationDetails):
    best_of_sequences: NotRequired[list[BestOfSequence]]


class Generated(TypedDict):
    generated_text: str
    details: NotRequired[Details]


class StreamDetails(TypedDict):
    """`details` of the last event of a stream."""

    finish_reason: FinishWord
    generated_tokens: int
    input_length: int
    seed: int | None


class TokenEvent(TypedDict):
    """One event of a stream. Only the last event has `generated_text` and `details`."""

    index: int
    token: TokenDetails
    top_tokens: NotRequired[list[TokenDetails]]
    generated_text: str | None
    details: StreamDetails | None


class TgiErrorEvent(TypedDict):
    """Last event of a failed stream."""

    error: str
    error_type: str
    code: str


def parse_generate_parameters(raw: Mapping[str, Any]) -> GenerateParameters:
    """Parse parameters. Raises UnknownParameter, EmptyInput or InvalidField naming the key.

    Unknown keys are rejected, because ignoring them would hide misspelled keys. huggingface_hub
    sends an unknown key only if the user sets it. After the error, it retries without the unknown
    keys, which it reads from the error message.
    """
    unknown = [key for key in raw if key not in GenerateParameters.model_fields]
    if unknown:
        names = ", ".join(f"'{name}'" for name in unknown[:MAX_LISTED_KEYS])
        raise UnknownParameter(
            f"The following `model_kwargs` are not used by the model: [{names}] "
            "(look for typing errors)",
            field=f"parameters.{unknown[0]}",
        )
    return parse_parameters(GenerateParameters, raw)
