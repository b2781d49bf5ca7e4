"""Parameters and answers of text-generation-inference's API, with its rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field

# Before Python 3.12 this is the only TypedDict that pydantic, which documents answers, reads.
from typing_extensions import TypedDict

from deployments.errors import UnknownParameter
from deployments.ingress.limits import MAX_STOPS, STOP_CHARS
from deployments.tasks.inputs import FailFastList, NonEmptyText, parse_parameters

MAX_TOP_TOKENS = 20
MAX_LISTED_KEYS = 16  # unknown keys of a body that are named in the refusal
MAX_SEED = (1 << 64) - 1

FinishWord = Literal["length", "eos_token", "stop_sequence"]
StopText = Annotated[NonEmptyText, Field(max_length=STOP_CHARS)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS), FailFastList()]
OpenProbability = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class GrammarParameter(BaseModel):
    """What the text must follow: `value` is a JSON schema, or a regular expression."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]


class GenerateParameters(BaseModel):
    """`parameters`, as text-generation-inference has them. null means "not given".

    `num_return_sequences`, `max_time`, `min_new_tokens` and `min_p` are those of transformers'
    pipelines; `stop_sequences` is an older spelling of `stop`.
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
        """Whether tokens are drawn: asked for, or implied by a parameter of drawing.

        As in text-generation-inference, `do_sample: false` beside one of these means nothing:
        older clients send it always.
        """
        given = (self.temperature, self.top_k, self.top_p, self.typical_p, self.min_p)
        return bool(self.do_sample) or any(value is not None for value in given)

    @property
    def includes_details(self) -> bool:
        """Whether an answer has `details`; the prompt's tokens are a part of these."""
        return bool(self.details or self.decoder_input_details)


class TokenDetails(TypedDict):
    """A token of an answer."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PromptToken(TypedDict):
    """A token of the prompt; the first one has no `logprob`."""

    id: int
    text: str
    logprob: float | None


class GenerationDetails(TypedDict):
    """One answer's tokens. `seed` is null where nothing was drawn."""

    finish_reason: FinishWord
    generated_tokens: int
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[TokenDetails]
    build_top_tokens: NotRequired[list[list[TokenDetails]]]


class BestOfSequence(GenerationDetails):
    """An answer that `best_of` passed over."""

    generated_text: str


class Details(GenerationDetails):
    """What `details` adds to a text."""

    best_of_sequences: NotRequired[list[BestOfSequence]]


class Generated(TypedDict):
    """An answer."""

    generated_text: str
    details: NotRequired[Details]


class StreamDetails(TypedDict):
    """How a stream ended."""

    finish_reason: FinishWord
    generated_tokens: int
    input_length: int
    seed: int | None


class TokenEvent(TypedDict):
    """One event of a stream; the last one has the text and the details."""

    index: int
    token: TokenDetails
    build_top_tokens: NotRequired[list[TokenDetails]]
    generated_text: str | None
    details: StreamDetails | None


class TgiErrorEvent(TypedDict):
    """The last event of a stream that failed."""

    error: str
    error_type: str
    code: str


def parse_generate_parameters(raw: Mapping[str, Any]) -> GenerateParameters:
    """`raw` as parameters. Raises UnknownParameter, EmptyInput or InvalidField naming the key.

    Unknown keys are refused rather than ignored, for ignoring hides typing errors, and in the
    sentence by which huggingface_hub knows what to leave out when it asks again. No key that it
    sends by itself is unknown.
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
