from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField
from deployments.messages import Truncation
from deployments.replicas.encoder_calls import INLINE_DECODE_S
from deployments.tasks import question_answering
from deployments.tasks.base import DecodeContext
from deployments.tasks.question_answering import QuestionAnswering, build_question_windowing
from deployments.tokenization.windows import TokenWindow, WindowTokenizer
from tests.support.artifacts import tiny_manifest, with_tasks
from tests.support.tiny_encoders import tiny_tokenizer

TASK = QuestionAnswering()
MANIFEST = with_tasks(tiny_manifest(), TaskName.QUESTION_ANSWERING).model_copy(
    update={"output_width": 2, "max_tokens": 64}
)
REQUEST = {"question": "was it good", "context": "the night train to the city is good"}
LogitsByText = dict[str, float]  # start or end logits of tokens by their text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> WindowTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return WindowTokenizer(directory, MANIFEST.max_tokens)


class QuestionModel:
    """A model whose logits of a context token depend on the token's text; 0 by default."""

    def __init__(
        self, encoder: WindowTokenizer, starts: LogitsByText, ends: LogitsByText, null: float = -20
    ):
        self._encoder = encoder
        self._starts, self._ends, self._null = starts, ends, null

    def answer(self, inputs: Any, **parameters: Any) -> Any:
        parsed = TASK.parse(inputs, parameters, MANIFEST)
        assert parsed.windowing is not None
        windows = [
            window
            for i, pair in enumerate(parsed.texts)
            for window in self._encoder.windows(pair, i, parsed.windowing, parsed.truncation)[0]
        ]
        computed = DecodeContext(
            rows=[self._logits(window, parsed.texts[window[1].text][1]) for window in windows],
            items=[item for item, _ in windows],
            token_offsets=[layout for _, layout in windows],
            manifest=MANIFEST,
        )
        return TASK.decode(computed, parsed.options)

    def _logits(self, window: TokenWindow, context: str) -> np.ndarray:
        item, layout = window
        logits = np.zeros((len(item.ids), 2), dtype=np.float32)
        logits[0] = self._null
        for token, (start, end) in enumerate(layout.offsets.tolist()):
            if layout.segments[token] == 1:
                text = context[start:end].lower()
                logits[token] = self._starts.get(text, 0), self._ends.get(text, 0)
        return logits


@pytest.fixture
def confident_model(encoder: WindowTokenizer) -> QuestionModel:
    """Return a model that gives the answer "night train" a probability near 1."""
    return QuestionModel(encoder, {"night": 20}, {"train": 20})


NIGHT_TRAIN = {"score": pytest.approx(1), "start": 4, "end": 15, "answer": "night train"}


def test_single_question_returns_an_object(confident_model: QuestionModel) -> None:
    assert confident_model.answer(REQUEST) == NIGHT_TRAIN


@pytest.mark.parametrize(
    "inputs",
    [
        [REQUEST, REQUEST],
        {"question": [REQUEST["question"]] * 2, "context": [REQUEST["context"]] * 2},
        {"question": [REQUEST["question"]] * 2, "context": REQUEST["context"]},
    ],
)
def test_several_questions_return_a_list_in_every_format(
    confident_model: QuestionModel, inputs: Any
) -> None:
    assert confident_model.answer(inputs) == [NIGHT_TRAIN, NIGHT_TRAIN]


def test_list_of_one_question_returns_a_list(confident_model: QuestionModel) -> None:
    assert confident_model.answer([REQUEST]) == [NIGHT_TRAIN]


def test_each_question_is_answered_from_its_context(confident_model: QuestionModel) -> None:
    other = {"question": "was it good", "context": "awful food on that night train"}
    first, second = confident_model.answer([REQUEST, other])
    assert (first["start"], second["start"]) == (4, 19)


def test_top_k_returns_a_list_with_the_best_answer_first(encoder: WindowTokenizer) -> None:
    model = QuestionModel(encoder, {"night": 5, "city": 3}, {"train": 5, "city": 3})
    answers = model.answer(REQUEST, top_k=3)
    assert [answer["answer"] for answer in answers][:1] == ["night train"]
    assert len(answers) == 3
    scores = [answer["score"] for answer in answers]
    assert scores == sorted(scores, reverse=True)
    assert all(
        REQUEST["context"][answer["start"] : answer["end"]] == answer["answer"]
        for answer in answers
    )


def test_top_k_larger_than_the_context_returns_fewer_answers(encoder: WindowTokenizer) -> None:
    # A single answer is an object even if `top_k` is larger.
    model = QuestionModel(encoder, {}, {})
    assert model.answer({"question": "a", "context": "city"}, top_k=5)["answer"] == "city"


def test_score_is_the_product_of_two_softmaxes(encoder: WindowTokenizer) -> None:
    model = QuestionModel(encoder, {"city": np.log(3)}, {"city": np.log(3)}, null=0)
    answer = model.answer({"question": "a", "context": "the city"})
    # The softmax weights of the first token, "the" and "city" are 1, 1 and 3.
    assert answer["answer"] == "city"
    assert answer["score"] == pytest.approx(3 / 5 * 3 / 5, abs=1e-6)


def test_max_answer_len_limits_the_tokens_of_an_answer(encoder: WindowTokenizer) -> None:
    model = QuestionModel(encoder, {"night": 9}, {"city": 9, "train": 8})
    assert model.answer(REQUEST, max_answer_len=5)["answer"] == "night train to the city"
    assert model.answer(REQUEST, max_answer_len=4)["answer"] == "night train"


def test_align_to_words_extends_answers_and_adds_scores(
    encoder: WindowTokenizer,
) -> None:
    # The tokens of "xyz" are x ##y ##z.
    request_body = {"question": "a", "context": "the xyz is"}
    model = QuestionModel(encoder, {"y": 9, "x": 9}, {"y": 9, "z": 9})
    whole = model.answer(request_body)
    assert (whole["answer"], whole["start"], whole["end"]) == ("xyz", 4, 7)
    # The spans xy, xyz, y and yz have a probability of 1/4 each.
    assert whole["score"] == pytest.approx(1, abs=1e-2)
    parts = model.answer(request_body, align_to_words=False, top_k=4)
    assert {part["answer"] for part in parts} == {"xy", "xyz", "y", "yz"}
    assert [part["score"] for part in parts] == pytest.approx([0.25] * 4, abs=1e-2)


def test_answers_equal_except_for_case_are_merged(encoder: WindowTokenizer) -> None:
    model = QuestionModel(encoder, {"city": 9}, {"city": 9})
    answer = model.answer({"question": "a", "context": "CITY is good City"}, max_answer_len=1)
    assert (answer["answer"], answer["start"]) == ("CITY", 0)
    assert answer["score"] == pytest.approx(0.5, abs=1e-2)


LONG = "the food was bad " * 12 + "and the night train was good " + "with that film " * 12


def test_offsets_refer_to_the_whole_long_context(confident_model: QuestionModel) -> None:
    answer = confident_model.answer({"question": "a", "context": LONG}, doc_stride=10)
    start = LONG.index("night train")
    assert (answer["start"], answer["end"], answer["answer"]) == (start, start + 11, "night train")


def test_same_answer_in_two_windows_adds_scores(confident_model: QuestionModel) -> None:
    # Windows have ten context tokens and overlap by five. The first two contain "night train".
    context = "it was a good on the night train is good " + "it was a " * 8
    answer = confident_model.answer(
        {"question": "a", "context": context}, max_seq_len=14, doc_stride=5
    )
    assert answer["answer"] == "night train"
    assert answer["score"] == pytest.approx(2, abs=0.01)


def test_handle_impossible_answer_allows_the_null_answer(encoder: WindowTokenizer) -> None:
    model = QuestionModel(encoder, {"night": 5}, {"train": 5}, null=9)
    null_answer = {"score": pytest.approx(0.96, abs=0.01), "start": 0, "end": 0, "answer": ""}
    assert model.answer(REQUEST)["answer"] == "night train"
    assert model.answer(REQUEST, handle_impossible_answer=True) == null_answer
    best, second = model.answer(REQUEST, handle_impossible_answer=True, top_k=2)
    assert (best, second["answer"]) == (null_answer, "night train")


def test_null_score_is_the_minimum_over_windows(encoder: WindowTokenizer) -> None:
    # Only the fourth of six windows has "night train", and thus a better answer than the null one.
    model = QuestionModel(encoder, {"night": 20}, {"train": 20}, null=9)
    answers = model.answer(
        {"question": "a", "context": LONG},
        handle_impossible_answer=True,
        top_k=100,
        max_answer_len=2,
        max_seq_len=24,
        doc_stride=5,
    )
    (null,) = (answer["score"] for answer in answers if answer["answer"] == "")
    assert null < 1e-6


def test_too_long_answers_are_rejected(
    confident_model: QuestionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len("night train")
    monkeypatch.setattr(question_answering, "MAX_ANSWER_CHARACTERS", 2 * length)
    assert len(confident_model.answer([REQUEST] * 2)) == 2
    with pytest.raises(InvalidField, match=f"more than {2 * length} characters") as caught:
        confident_model.answer([REQUEST] * 3)
    assert caught.value.field == "parameters.top_k"


@pytest.mark.parametrize("context", ["   ", "\u200b"])
def test_context_without_words_returns_the_empty_answer(
    confident_model: QuestionModel, context: str
) -> None:
    empty = {"score": 0.0, "start": 0, "end": 0, "answer": ""}
    assert confident_model.answer({"question": "a", "context": context}) == empty


@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("Café Zoë: the NIGHT train à Kraków", "NIGHT train"),
        ("e\u0301te\u0301 the night train", "night train"),
        ("🍕👩‍👩‍👧 on the night train 🚆", "night train"),
        ("東京 night train 大阪", "night train"),
    ],
)
def test_offsets_are_characters_of_the_original_text(
    confident_model: QuestionModel, context: str, answer: str
) -> None:
    result = confident_model.answer({"question": "a", "context": context})
    assert result["answer"] == answer
    assert context[result["start"] : result["end"]] == answer


def test_long_question_is_truncated_and_answered(
    encoder: WindowTokenizer, confident_model: QuestionModel
) -> None:
    request_body = {"question": "was it good " * 40, "context": REQUEST["context"]}
    assert confident_model.answer(request_body) == NIGHT_TRAIN
    pair = (request_body["question"], request_body["context"])
    windows, truncated = encoder.windows(pair, 0, build_question_windowing(64), Truncation.REFUSE)
    assert (len(windows), truncated) == (1, True)


def test_many_windows_are_predicted_to_take_long() -> None:
    def predict_s(windows: int, **parameters: Any) -> float:
        options = TASK.parse(REQUEST, parameters, MANIFEST).options
        rows = [np.zeros((40, 2), np.float32)] * windows
        context = DecodeContext(rows=rows, items=(), token_offsets=(), manifest=MANIFEST)
        return TASK.predict_decode_s(context, options)

    assert predict_s(1) < predict_s(10) < INLINE_DECODE_S < predict_s(100)
    assert predict_s(10, top_k=100) > INLINE_DECODE_S
