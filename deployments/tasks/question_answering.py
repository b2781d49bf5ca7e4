"""question-answering: the part of a context that answers a question."""

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

# Defaults of transformers' pipeline, which left the library with 5.0 (4.57 was the last).
_WINDOW_TOKENS = 384
_STRIDE_TOKENS = 128
_QUESTION_TOKENS = 64
_ANSWER_TOKENS = 15
# Candidates are looked at one by one, and there are twice as many of them per window.
_MAX_ANSWERS = 100
# Of all answers to one call. A word may be as long as a text, and each answer repeats its words.
MAX_ANSWER_CHARACTERS = 4_000_000


class QuestionParameters(TextParameters):
    """Parameters of question-answering; lengths are in tokens."""

    top_k: int | None = Field(None, ge=1, le=_MAX_ANSWERS)
    doc_stride: int | None = Field(None, ge=0)
    max_answer_len: int | None = Field(None, ge=1)
    max_seq_len: int | None = Field(None, ge=1)
    max_question_len: int | None = Field(None, ge=1)
    handle_impossible_answer: bool | None = None
    align_to_words: bool | None = None


class SpanOptions(NamedTuple):
    """How spans become answers."""

    top_k: int = 1
    max_answer_len: int = _ANSWER_TOKENS  # tokens
    handle_impossible_answer: bool = False
    align_to_words: bool = True


class QuestionOptions(NamedTuple):
    """What the encoder needs to answer in the words of the contexts."""

    contexts: tuple[str, ...]  # one per question
    rules: SpanOptions
    single: bool  # one question that was not sent in a list


class QuestionInput(BaseModel):
    """A question, and the text that answers it."""

    question: NonEmptyText
    context: NonEmptyText


class QuestionListInput(BaseModel):
    """Questions with a context each, or all with the same one."""

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


_Questions = Annotated[
    Annotated[QuestionInput, Tag("<one>")]
    | Annotated[QuestionListInput, Tag("<together>")]
    | Annotated[Many[QuestionInput], Tag("<many>")],
    Discriminator(_detect_form),
]


class QuestionAnswering(Task):
    """For every question the best spans of its context, over all windows of a long one."""

    name: ClassVar = TaskName.QUESTION_ANSWERING
    head: ClassVar = ModelHead.SPAN
    inputs: ClassVar[Inputs[QuestionInput | QuestionListInput | list[QuestionInput]]] = Inputs(
        _Questions,
        "an object with `question` and `context`, a list of these, or an object with lists in both",
    )
    parameters: ClassVar[type[TextParameters]] = QuestionParameters
    response_type: ClassVar[Any] = (
        AnswerSpan | list[AnswerSpan] | list[AnswerSpan | list[AnswerSpan]]
    )
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": {"question": "Was it good?", "context": "The food was good."}
    }
    reads_pairs: ClassVar = True

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """An object with `question` or `context`, or a list of such."""
        first = inputs[0] if isinstance(inputs, list) and inputs else inputs
        return isinstance(first, dict) and bool({"question", "context"} & set(first))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: {"question": text, "context": text}, several of them, or lists inside."""
        params = parse_parameters(QuestionParameters, parameters)
        given = self.inputs.read(inputs)
        pairs, fields = _parse_pairs(given)
        return TaskInput(
            texts=pairs,
            fields=fields,
            options=QuestionOptions(
                contexts=tuple(context for _, context in pairs),
                rules=_build_span_options(params),
                single=isinstance(given, QuestionInput),
            ),
            truncation=params.truncation,
            windowing=build_question_windowing(manifest.max_tokens, params),
        )

    def decode(self, context: DecodeContext, options: QuestionOptions) -> Any:
        """Per question its answer, a list of them when there is more than one.

        Raises InvalidField for more text than MAX_ANSWER_CHARACTERS.
        """
        windows: list[list[_SpanWindow]] = [[] for _ in options.contexts]
        for logits, layout in zip(context.rows, context.token_offsets, strict=True):
            windows[layout.text].append((logits, layout))
        answers: list[AnswerSpan | list[AnswerSpan]] = []
        told = 0
        for text, own in zip(options.contexts, windows, strict=True):
            found = extract_answers(text, own, options.rules)
            told += sum(len(answer["answer"]) for answer in found)
            _check_answer_size(told)
            answers.append(_one_or_list(found))
        return answers[0] if options.single else answers


def _check_answer_size(count: int) -> None:
    if count > MAX_ANSWER_CHARACTERS:
        raise InvalidField(
            f"`parameters.top_k`: the answers have more than {MAX_ANSWER_CHARACTERS} characters; "
            "ask for fewer answers or send fewer questions",
            field="parameters.top_k",
        )


def _one_or_list(answers: list[AnswerSpan]) -> AnswerSpan | list[AnswerSpan]:
    return answers[0] if len(answers) == 1 else answers


def _parse_pairs(
    given: QuestionInput | QuestionListInput | list[QuestionInput],
) -> tuple[tuple[TextPair, ...], tuple[str, ...]]:
    """Questions with their contexts, and the path of each context."""
    if isinstance(given, QuestionInput):
        return ((given.question, given.context),), ("inputs.context",)
    if isinstance(given, list):
        fields = tuple(
            f"{item}.context" for item in build_item_paths("inputs", len(given), single=False)
        )
        return tuple((params.question, params.context) for params in given), fields
    count = len(given.question)
    if isinstance(given.context, str):
        return tuple((question, given.context) for question in given.question), (
            "inputs.context",
        ) * count
    if len(given.context) != count:
        raise InvalidField(
            f"`inputs.context` has {len(given.context)} texts for {count} questions",
            field="inputs.context",
        )
    pairs = tuple(zip(given.question, given.context, strict=True))
    return pairs, build_item_paths("inputs.context", count, single=False)


def _build_span_options(params: QuestionParameters) -> SpanOptions:
    given = {name: getattr(params, name) for name in SpanOptions._fields}
    return SpanOptions()._replace(**{k: v for k, v in given.items() if v is not None})


_NOTHING_ASKED = QuestionParameters()


def build_question_windowing(
    max_tokens: int, params: QuestionParameters = _NOTHING_ASKED
) -> Windowing:
    """How questions become items for a model that reads `max_tokens`. Raises InvalidField."""
    tokens = min(params.max_seq_len or _WINDOW_TOKENS, max_tokens)
    stride = min(tokens // 2, _STRIDE_TOKENS) if params.doc_stride is None else params.doc_stride
    if stride > tokens:
        raise InvalidField(
            f"`parameters.doc_stride` ({stride}) is larger than `max_seq_len` ({tokens})",
            field="parameters.doc_stride",
        )
    # A question nobody set a limit for leaves room for the context also in a short window.
    question = params.max_question_len or min(_QUESTION_TOKENS, max(tokens // 2, 1))
    return Windowing(tokens=tokens, stride=stride, first_tokens=question)


_SpanWindow = tuple[NDArray[np.float32], TokenOffsets]  # logits [T, 2] and where the tokens stand


def extract_answers(
    context: str, windows: Sequence[_SpanWindow], rules: SpanOptions
) -> list[AnswerSpan]:
    """At most `top_k` answers of different text, best first; never none.

    Spans with the same text, whatever its case, are one answer with the sum of their scores:
    neighbouring windows both see it, and several spans may round to the same words.
    """
    answers: dict[str, AnswerSpan] = {}
    null = 1.0
    for logits, layout in windows:
        chances = compute_span_probabilities(logits, layout)
        # A window without the answer rightly says so; the one that is least sure counts.
        null = min(null, chances.null)
        count = 2 * rules.top_k + 10 if rules.align_to_words else rules.top_k
        spans = find_best_spans(chances, rules.max_answer_len, count)
        bounds = find_character_bounds(layout, whole_words=rules.align_to_words)
        starts, ends = bounds[spans.first, 0].tolist(), bounds[spans.last, 1].tolist()
        for score, start, end in zip(spans.score.tolist(), starts, ends, strict=True):
            text = context[start:end]
            new = AnswerSpan(score=0.0, start=start, end=end, answer=text)
            answers.setdefault(text.lower(), new)["score"] += score
    found = list(answers.values())
    if rules.handle_impossible_answer or not found:
        # Without a single token of context there is nothing to be unsure of.
        score = null if rules.handle_impossible_answer else 0.0
        found.append(AnswerSpan(score=score, start=0, end=0, answer=""))
    return sorted(found, key=lambda answer: answer["score"], reverse=True)[: rules.top_k]
