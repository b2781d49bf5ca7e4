"""Parameters and answers of the tasks of models with an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# Before Python 3.12 this is the only TypedDict that pydantic, which documents answers, reads.
from typing_extensions import TypedDict

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField
from deployments.ingress.apis.text_generation.schemas import (
    Count,
    Details,
    GenerateParameters,
)
from deployments.tasks.inputs import parse_parameters

# Objects in which clients put what is meant for `generate`, the older spellings first.
NESTED_KEYS = ("generate_kwargs", "generation_parameters", "generate_parameters")
# An answer's score is divided by its length to this power, which must stay a number.
MAX_LENGTH_PENALTY = 10.0

NonNegative = Annotated[int, Field(ge=0)]


class TextToTextParameters(GenerateParameters):
    """`parameters`, as transformers' pipelines have them, and all of text generation's.

    They may stand by themselves, in `parameters`, or there in `generate_parameters`, whose other
    names are `generation_parameters` and `generate_kwargs`; the more deeply nested loses. What a
    request leaves out is as the model's authors say.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: NonNegative | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_length: Annotated[
        NonNegative | None,
        Field(description="`min_new_tokens` is one less: it counts the token answers follow."),
    ] = None
    max_length: Annotated[
        Annotated[int, Field(ge=2)] | None,
        Field(description="`max_new_tokens` is one less: it counts the token answers follow."),
    ] = None
    num_beams: Annotated[
        Count | None,
        Field(description="Above 1: beam search, which draws nothing and cannot be streamed."),
    ] = None
    length_penalty: (
        Annotated[
            float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY, description="Of beams.")
        ]
        | None
    ) = None
    early_stopping: Literal[True, False, "never"] | None = None
    no_repeat_ngram_size: NonNegative | None = None
    truncation: (
        Literal[True, False, "do_not_truncate", "longest_first", "only_first", "only_second"] | None
    ) = None
    clean_up_tokenization_spaces: bool | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: as `do_sample` says, else where a parameter of drawing does.

        Values that change nothing imply nothing: clients send them out of habit.
        """
        if self.temperature == 0:
            return False
        if self.do_sample is not None:
            return self.do_sample
        warm, bounded = self.temperature not in (None, 1.0), self.top_p not in (None, 1.0)
        given = warm or bounded or self.top_k or self.typical_p or self.min_p
        return bool(given) and not self.uses_beam_search

    @property
    def uses_beam_search(self) -> bool:
        """Whether beam search is asked for, rather than being the model's own way."""
        return (self.num_beams or 1) > 1


class GeneratedText(TypedDict):
    """An answer to text2text-generation."""

    generated_text: str
    details: NotRequired[Details]


class Summary(TypedDict):
    """An answer to summarization. `generated_text` is the same, for clients that only read that."""

    summary_text: str
    generated_text: NotRequired[str]
    details: NotRequired[Details]


class Translation(TypedDict):
    """An answer to translation. `generated_text` is the same, for clients that only read that."""

    translation_text: str
    generated_text: NotRequired[str]
    details: NotRequired[Details]


TextToTextAnswer = GeneratedText | Summary | Translation

# What an answer's text is called.
TEXT_KEYS: Mapping[TaskName, str] = {
    TaskName.TEXT2TEXT_GENERATION: "generated_text",
    TaskName.SUMMARIZATION: "summary_text",
    TaskName.TRANSLATION: "translation_text",
}


def parse_text2text_parameters(raw: Mapping[str, Any]) -> TextToTextParameters:
    """`raw` as parameters, nested ones among them. Raises UnknownParameter or InvalidField."""
    given: dict[str, Any] = {}
    for name in NESTED_KEYS:
        nested = raw.get(name)
        if nested is not None and not isinstance(nested, dict):
            raise InvalidField(f"`parameters.{name}` must be an object", field=f"parameters.{name}")
        given |= _told(nested or {})
    given |= _told({key: value for key, value in raw.items() if key not in NESTED_KEYS})
    return parse_parameters(TextToTextParameters, given)


def _told(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which mean that nothing is said and so overrule nothing."""
    return {key: value for key, value in raw.items() if value is not None}
