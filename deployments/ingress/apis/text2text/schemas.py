"""Request parameters and response schemas of encoder-decoder models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField
from deployments.ingress.apis.text_generation.schemas import (
    Count,
    Details,
    GenerateParameters,
)
from deployments.tasks.inputs import parse_parameters

# Keys of objects with parameters for `generate`, in ascending precedence.
NESTED_KEYS = ("generate_kwargs", "generation_parameters", "generate_parameters")
# The score of a beam is divided by its length to the power of `length_penalty`. Larger penalties
# could overflow.
MAX_LENGTH_PENALTY = 10.0

NonNegative = Annotated[int, Field(ge=0)]


class TextToTextParameters(GenerateParameters):
    """Parameters of text generation and of the pipelines of transformers.

    A request has them in `parameters`, at the top level, or in an object such as `generate_kwargs`
    in one of these places. `parameters` takes precedence over the top level, and both take
    precedence over such an object. The defaults come from the checkpoint.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: NonNegative | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_length: Annotated[
        NonNegative | None,
        Field(description="`min_new_tokens` plus the start token."),
    ] = None
    max_length: Annotated[
        Annotated[int, Field(ge=2)] | None,
        Field(description="`max_new_tokens` plus the start token."),
    ] = None
    num_beams: Annotated[
        Count | None,
        Field(description="Above 1: beam search, without sampling and streaming."),
    ] = None
    length_penalty: (
        Annotated[
            float,
            Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY, description="For beam search."),
        ]
        | None
    ) = None
    early_stopping: Literal[True, False, "never"] | None = None
    no_repeat_ngram_size: NonNegative | None = None
    truncation: (
        Literal[True, False, "do_not_truncate", "longest_first", "only_first", "only_second"] | None
    ) = None
    clean_up_tokenization_spaces: bool | None = None
    src_lang: Annotated[
        str | None,
        Field(description="Language code of the inputs, such as `en_XX`. Needs `tgt_lang`."),
    ] = None
    tgt_lang: Annotated[
        str | None,
        Field(description="Language code of the outputs, such as `fr_XX`. Needs `src_lang`."),
    ] = None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled. Temperature 0 excludes sampling; else `do_sample` decides.

        If `do_sample` is not set, tokens are sampled if a parameter needs sampling and the request
        does not set beam search. Some clients always send neutral values, such as a
        temperature of 1. These do not count.
        """
        if self.temperature == 0:
            return False
        if self.do_sample is not None:
            return self.do_sample
        has_temperature, has_top_p = (
            self.temperature not in (None, 1.0),
            self.top_p not in (None, 1.0),
        )
        needs_sampling = has_temperature or has_top_p or self.top_k or self.typical_p or self.min_p
        return bool(needs_sampling) and not self.uses_beam_search

    @property
    def uses_beam_search(self) -> bool:
        """Whether the request sets beam search; the default of the model does not count."""
        return (self.num_beams or 1) > 1


class GeneratedText(TypedDict):
    """A text. Other keys repeat it for clients that read only the key of their task."""

    generated_text: str
    summary_text: NotRequired[str]
    translation_text: NotRequired[str]
    details: NotRequired[Details]


class Summary(TypedDict):
    """A summary. Other keys repeat it for clients that read only the key of their task."""

    summary_text: str
    translation_text: NotRequired[str]
    generated_text: NotRequired[str]
    details: NotRequired[Details]


class Translation(TypedDict):
    """A translation. Other keys repeat it for clients that read only the key of their task."""

    translation_text: str
    summary_text: NotRequired[str]
    generated_text: NotRequired[str]
    details: NotRequired[Details]


TextToTextAnswer = GeneratedText | Summary | Translation

# Key of the text in a response, by task.
TEXT_KEYS: Mapping[str, str] = {
    TaskName.TEXT2TEXT_GENERATION: "generated_text",
    TaskName.SUMMARIZATION: "summary_text",
    TaskName.TRANSLATION: "translation_text",
}


def parse_text2text_parameters(raw: Mapping[str, Any]) -> TextToTextParameters:
    """Merge the objects under NESTED_KEYS and the outer parameters, which take precedence.

    Raises UnknownParameter, EmptyInput or InvalidField.
    """
    merged: dict[str, Any] = {}
    for name in NESTED_KEYS:
        nested = raw.get(name)
        if nested is not None and not isinstance(nested, dict):
            raise InvalidField(
                f"`parameters.{name}` is a {type(nested).__name__}; it must be an object. Pass "
                "parameters by name, or omit it.",
                field=f"parameters.{name}",
            )
        merged |= _drop_nulls(nested or {})
    merged |= _drop_nulls({key: value for key, value in raw.items() if key not in NESTED_KEYS})
    return parse_parameters(TextToTextParameters, merged)


def _drop_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls: a null means "not set" and must not override a nested value."""
    return {key: value for key, value in raw.items() if value is not None}
