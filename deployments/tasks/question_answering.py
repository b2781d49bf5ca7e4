"""question-answering: the span of a context that answers a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Discriminator, Field, Tag
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import InvalidField
from deployments.messages import TextPair, TokenOffsets, Windowing
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters, build_item_paths
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, one_or_many, parse_parameters
from deployments.tasks.spans import (
    compute_span_probabilities,
    find_best_spans,
    find_character_bounds,
)

# Defaults of the pipeline of transformers 4.57, the last release with this pipeline.
_WINDOW_TOKENS = 384
_STRIDE_TOKENS = 128
_QUESTION_TOKENS = 64
_ANSWER_TOKENS = 15
# Maximum `top_k`. Each window contributes about twice as many candidates, which are processed one
# by one.
_MAX_ANSWERS = 100
# Limit of the total length of all answers to one call. By default an answer is extended to whole
# words, and a word may be as long as its text, so that each of many answers may be that long.
MAX_ANSWER_CHARACTERS = 4_000_000
# Seconds of `decode` per window and per span of a window, on a core of an AMD EPYC.
_WINDOW_S, _SPAN_S = 1e-4, 1e-6


class QuestionParameters(TextParameters):
    """Lengths are in tokens."""

    top_k: int | None = Field(None, ge=1, le=_MAX_ANSWERS)
    doc_stride: int | None = Field(None, ge=0)
    max_answer_len: int | None = Field(None, ge=1)
    max_seq_len: int | None = Field(None, ge=1)
    max_question_len: int | None = Field(None, ge=1)
    handle_impossible_answer: bool | None = None
    align_to_words: bool | None = None


class SpanOptions(NamedTuple):
    top_k: int = 1
    max_answer_len: int = _ANSWER_TOKENS  # tokens
    handle_impossible_answer: bool = False
    align_to_words: bool = True


class QuestionOptions(NamedTuple):
    contexts: tuple[str, ...]  # one context per question
    span_options: SpanOptions
    single: bool  # False: the request has a list of questions


class QuestionInput(BaseModel):
    question: NonEmptyText
    context: NonEmptyText


class QuestionListInput(BaseModel):
    """Questions with one context each, or with one common context."""

    question: Many[NonEmptyText]
    context: one_or_many(NonEmptyText)  # type: ignore[valid-type]


class AnswerSpan(TypedDict):
    """`answer` is `context[start:end]`, in characters."""

    score: float
    start: int
    end: int
    answer: str


def _detect_form(value: Any) -> str:
    if isinstance(value, list):
        return "<many>"
    is_together = isinstance(value, dict) and (
        isinstance(value.get("question"), list) or isinstance(value.get("context"), list)
    )
    return "<together>" if is_together or isinstance(value, QuestionListInput) else "<one>"


_QuestionField = Annotated[
    Annotated[QuestionInput, Tag("<one>")]
    | Annotated[QuestionListInput, Tag("<together>")]
    | Annotated[Many[QuestionInput], Tag("<many>")],
    Discriminator(_detect_form),
]


class QuestionAnswering(Task):
    """Task that returns the best spans of every question's context, over all of its windows."""

    name: ClassVar = TaskName.QUESTION_ANSWERING
    head: ClassVar = ModelHead.SPAN
    inputs: ClassVar[Inputs[QuestionInput | QuestionListInput | list[QuestionInput]]] = Inputs(
        _QuestionField,
        "an object with `question` and `context`, a list of these, or an object with lists in both",
    )
    parameters: ClassVar[type[TextParameters]] = QuestionParameters
    options_type: ClassVar[Any] = QuestionOptions
    response_type: ClassVar[Any] = (
        AnswerSpan | list[AnswerSpan] | list[AnswerSpan | list[AnswerSpan]]
    )
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": {"question": "Was it good?", "context": "The food was good."}
    }
    reads_pairs: ClassVar = True

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        first = inputs[0] if isinstance(inputs, list) and inputs else inputs
        return isinstance(first, dict) and bool({"question", "context"} & set(first))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(QuestionParameters, parameters)
        value = self.inputs.read(inputs)
        pairs, fields = _parse_pairs(value)
        return TaskInput(
            texts=pairs,
            fields=fields,
            options=QuestionOptions(
                contexts=tuple(context for _, context in pairs),
                span_options=_build_span_options(params),
                single=isinstance(value, QuestionInput),
            ),
            truncation=params.choose_truncation(manifest),
            windowing=build_question_windowing(manifest.max_tokens, params),
        )

    def decode(self, context: DecodeContext, options: QuestionOptions) -> Any:
        """Return one entry per question: its answer, or the list of its answers if it has several.

        If the request has no list of questions, return the entry alone. Raises InvalidField if the
        texts of all answers together exceed MAX_ANSWER_CHARACTERS.
        """
        windows: list[list[_SpanWindow]] = [[] for _ in options.contexts]
        for logits, layout in zip(context.rows, context.token_offsets, strict=True):
            windows[layout.text].append((logits, layout))
        answers: list[AnswerSpan | list[AnswerSpan]] = []
        characters = 0
        for text, own in zip(options.contexts, windows, strict=True):
            question_answers = extract_answers(text, own, options.span_options)
            characters += sum(len(answer["answer"]) for answer in question_answers)
            _check_answer_size(characters)
            answers.append(_one_or_list(question_answers))
        return answers[0] if options.single else answers

    def predict_decode_s(self, context: DecodeContext, options: QuestionOptions) -> float:
        window_s = _WINDOW_S + _SPAN_S * _count_spans(options.span_options)
        return super().predict_decode_s(context, options) + window_s * len(context.rows)


def _check_answer_size(count: int) -> None:
    if count > MAX_ANSWER_CHARACTERS:
        raise InvalidField(
            f"`parameters.top_k`: the answers have more than {MAX_ANSWER_CHARACTERS} characters. "
            "Lower `top_k` or send fewer questions",
            field="parameters.top_k",
        )


def _one_or_list(answers: list[AnswerSpan]) -> AnswerSpan | list[AnswerSpan]:
    return answers[0] if len(answers) == 1 else answers


def _parse_pairs(
    value: QuestionInput | QuestionListInput | list[QuestionInput],
) -> tuple[tuple[TextPair, ...], tuple[str, ...]]:
    """Return the pairs of question and context, and the request path of each context."""
    if isinstance(value, QuestionInput):
        return ((value.question, value.context),), ("inputs.context",)
    if isinstance(value, list):
        fields = tuple(
            f"{item}.context" for item in build_item_paths("inputs", len(value), single=False)
        )
        return tuple((item.question, item.context) for item in value), fields
    count = len(value.question)
    if isinstance(value.context, str):
        return tuple((question, value.context) for question in value.question), (
            "inputs.context",
        ) * count
    if len(value.context) != count:
        raise InvalidField(
            f"`inputs.context` has {len(value.context)} texts for {count} questions",
            field="inputs.context",
        )
    pairs = tuple(zip(value.question, value.context, strict=True))
    return pairs, build_item_paths("inputs.context", count, single=False)


def _build_span_options(params: QuestionParameters) -> SpanOptions:
    values = {name: getattr(params, name) for name in SpanOptions._fields}
    return SpanOptions()._replace(**{k: v for k, v in values.items() if v is not None})


_NO_PARAMETERS = QuestionParameters()


def build_question_windowing(
    max_tokens: int, params: QuestionParameters = _NO_PARAMETERS
) -> Windowing:
    """Build the windowing for a model that reads `max_tokens` tokens.

    Raises InvalidField for a stride that is longer than a window.
    """
    tokens = min(params.max_seq_len or _WINDOW_TOKENS, max_tokens)
    stride = min(tokens // 2, _STRIDE_TOKENS) if params.doc_stride is None else params.doc_stride
    if stride > tokens:
        raise InvalidField(
            f"`parameters.doc_stride` is {stride}; the maximum is `max_seq_len`, {tokens}",
            field="parameters.doc_stride",
        )
    # A question takes at most half of a window. With less space for the context, a short text would
    # need a thousand windows.
    question = min(params.max_question_len or _QUESTION_TOKENS, max(tokens // 2, 1))
    return Windowing(tokens=tokens, stride=stride, first_tokens=question)


_SpanWindow = tuple[NDArray[np.float32], TokenOffsets]  # logits [T, 2] and character offsets


def _count_spans(options: SpanOptions) -> int:
    """Return how many spans of each window may become answers.

    Extended to whole words, several spans become one answer.
    """
    return 2 * options.top_k + 10 if options.align_to_words else options.top_k


def extract_answers(
    context: str, windows: Sequence[_SpanWindow], options: SpanOptions
) -> list[AnswerSpan]:
    """Return up to `top_k` answers of different text, best first; at least one.

    Spans with equal text, ignoring case, become one answer with the sum of their scores. Such spans
    occur because adjacent windows overlap, and because spans are extended to whole words.
    """
    answers: dict[str, AnswerSpan] = {}
    null = 1.0
    for logits, layout in windows:
        probabilities = compute_span_probabilities(logits, layout)
        # A window without the answer has a high probability of no answer. The lowest of these
        # probabilities counts.
        null = min(null, probabilities.null)
        spans = find_best_spans(probabilities, options.max_answer_len, _count_spans(options))
        bounds = find_character_bounds(layout, whole_words=options.align_to_words)
        starts, ends = bounds[spans.first, 0].tolist(), bounds[spans.last, 1].tolist()
        for score, start, end in zip(spans.score.tolist(), starts, ends, strict=True):
            text = context[start:end]
            new = AnswerSpan(score=0.0, start=start, end=end, answer=text)
            answers.setdefault(text.lower(), new)["score"] += score
    results = list(answers.values())
    if options.handle_impossible_answer or not results:
        # Without `handle_impossible_answer` the empty answer is returned only if there is no span.
        score = null if options.handle_impossible_answer else 0.0
        results.append(AnswerSpan(score=score, start=0, end=0, answer=""))
    return sorted(results, key=lambda answer: answer["score"], reverse=True)[: options.top_k]
