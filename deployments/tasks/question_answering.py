"""question-answering: the part of a context that answers a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Discriminator, Field, Tag
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest, ModelHead, TaskName
from deployments.errors import InvalidField
from deployments.messages import TextPair, TokenOffsets, Windowing
from deployments.tasks.base import DecodeContext, TaskInput, TextParameters, item_fields
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, one_or_many, parse_parameters
from deployments.tasks.spans import best_spans, character_bounds, window_chances

# Defaults of transformers' pipeline, which left the library with 5.0 (4.57 was the last).
_WINDOW_TOKENS = 384
_STRIDE_TOKENS = 128
_QUESTION_TOKENS = 64
_ANSWER_TOKENS = 15
# Candidates are looked at one by one, and there are twice as many of them per window.
_MOST_ANSWERS = 100
# Of all answers to one call. A word may be as long as a text, and each answer repeats its words.
MOST_ANSWER_CHARACTERS = 4_000_000


class QuestionParameters(TextParameters):
    """Parameters of question-answering; lengths are in tokens."""

    top_k: int | None = Field(None, ge=1, le=_MOST_ANSWERS)
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


class Asked(BaseModel):
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


def _form(value: Any) -> str:
    if isinstance(value, list):
        return "<many>"
    is_together = isinstance(value, dict) and (
        isinstance(value.get("question"), list) or isinstance(value.get("context"), list)
    )
    return "<together>" if is_together or isinstance(value, QuestionListInput) else "<one>"


_Questions = Annotated[
    Annotated[Asked, Tag("<one>")]
    | Annotated[QuestionListInput, Tag("<together>")]
    | Annotated[Many[Asked], Tag("<many>")],
    Discriminator(_form),
]


class QuestionAnswering:
    """For every question the best spans of its context, over all windows of a long one."""

    name: ClassVar = TaskName.QUESTION_ANSWERING
    inputs: ClassVar[Inputs[Asked | QuestionListInput | list[Asked]]] = Inputs(
        _Questions,
        "an object with `question` and `context`, a list of these, or an object with lists in both",
    )
    parameters: ClassVar[type[TextParameters]] = QuestionParameters
    answer: ClassVar[Any] = AnswerSpan | list[AnswerSpan] | list[AnswerSpan | list[AnswerSpan]]
    names_tokens: ClassVar = False
    unpooled: ClassVar = False

    def fits(self, manifest: ArtifactManifest) -> bool:
        """Models that answer spans."""
        return manifest.head is ModelHead.SPAN

    def claims(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """An object with `question` or `context`, or a list of such."""
        first = inputs[0] if isinstance(inputs, list) and inputs else inputs
        return isinstance(first, dict) and bool({"question", "context"} & set(first))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: {"question": text, "context": text}, several of them, or lists inside."""
        asked = parse_parameters(QuestionParameters, parameters)
        given = self.inputs.read(inputs)
        pairs, fields = _pairs(given)
        return TaskInput(
            texts=pairs,
            fields=fields,
            options=QuestionOptions(
                contexts=tuple(context for _, context in pairs),
                rules=_rules(asked),
                single=isinstance(given, Asked),
            ),
            truncation=asked.truncation,
            windowing=question_windowing(manifest.max_tokens, asked),
        )

    def decode(self, computed: DecodeContext, options: QuestionOptions) -> Any:
        """Per question its answer, a list of them when there is more than one.

        Raises InvalidField for more text than MOST_ANSWER_CHARACTERS.
        """
        windows: list[list[_Window]] = [[] for _ in options.contexts]
        for logits, layout in zip(computed.rows, computed.token_offsets, strict=True):
            windows[layout.text].append((logits, layout))
        answers: list[AnswerSpan | list[AnswerSpan]] = []
        told = 0
        for context, own in zip(options.contexts, windows, strict=True):
            found = extract_answers(context, own, options.rules)
            told += sum(len(answer["answer"]) for answer in found)
            _check_told(told)
            answers.append(_one_or_list(found))
        return answers[0] if options.single else answers


def _check_told(count: int) -> None:
    if count > MOST_ANSWER_CHARACTERS:
        raise InvalidField(
            f"`parameters.top_k`: the answers have more than {MOST_ANSWER_CHARACTERS} characters; "
            "ask for fewer answers or send fewer questions",
            field="parameters.top_k",
        )


def _one_or_list(answers: list[AnswerSpan]) -> AnswerSpan | list[AnswerSpan]:
    return answers[0] if len(answers) == 1 else answers


def _pairs(
    given: Asked | QuestionListInput | list[Asked],
) -> tuple[tuple[TextPair, ...], tuple[str, ...]]:
    """Questions with their contexts, and the path of each context."""
    if isinstance(given, Asked):
        return ((given.question, given.context),), ("inputs.context",)
    if isinstance(given, list):
        fields = tuple(
            f"{item}.context" for item in item_fields("inputs", len(given), single=False)
        )
        return tuple((asked.question, asked.context) for asked in given), fields
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
    return pairs, item_fields("inputs.context", count, single=False)


def _rules(asked: QuestionParameters) -> SpanOptions:
    given = {name: getattr(asked, name) for name in SpanOptions._fields}
    return SpanOptions()._replace(**{k: v for k, v in given.items() if v is not None})


_NOTHING_ASKED = QuestionParameters()


def question_windowing(max_tokens: int, asked: QuestionParameters = _NOTHING_ASKED) -> Windowing:
    """How questions become items for a model that reads `max_tokens`. Raises InvalidField."""
    tokens = min(asked.max_seq_len or _WINDOW_TOKENS, max_tokens)
    stride = min(tokens // 2, _STRIDE_TOKENS) if asked.doc_stride is None else asked.doc_stride
    if stride > tokens:
        raise InvalidField(
            f"`parameters.doc_stride` ({stride}) is larger than `max_seq_len` ({tokens})",
            field="parameters.doc_stride",
        )
    # A question nobody set a limit for leaves room for the context also in a short window.
    question = asked.max_question_len or min(_QUESTION_TOKENS, max(tokens // 2, 1))
    return Windowing(tokens=tokens, stride=stride, first_tokens=question)


_Window = tuple[NDArray[np.float32], TokenOffsets]  # logits [T, 2] and where the tokens stand


def extract_answers(
    context: str, windows: Sequence[_Window], rules: SpanOptions
) -> list[AnswerSpan]:
    """At most `top_k` answers of different text, best first; never none.

    Spans with the same text, whatever its case, are one answer with the sum of their scores:
    neighbouring windows both see it, and several spans may round to the same words.
    """
    answers: dict[str, AnswerSpan] = {}
    null = 1.0
    for logits, layout in windows:
        chances = window_chances(logits, layout)
        # A window without the answer rightly says so; the one that is least sure counts.
        null = min(null, chances.null)
        count = 2 * rules.top_k + 10 if rules.align_to_words else rules.top_k
        spans = best_spans(chances, rules.max_answer_len, count)
        bounds = character_bounds(layout, whole_words=rules.align_to_words)
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
