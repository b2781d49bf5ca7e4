from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField
from deployments.messages import Truncation
from deployments.tasks import question_answering
from deployments.tasks.base import DecodeContext
from deployments.tasks.question_answering import QuestionAnswering, build_question_windowing
from deployments.tokenization.windows import TokenWindow, WindowTokenizer
from tests.support.artifacts import tiny_manifest
from tests.support.builders import tiny_tokenizer

TASK = QuestionAnswering()
MANIFEST = tiny_manifest().model_copy(
    update={"tasks": (TaskName.QUESTION_ANSWERING,), "output_width": 2, "max_tokens": 64}
)
ASKED = {"question": "was it good", "context": "the night train to the city is good"}
Marks = dict[str, float]  # what a text is worth as an answer's first or last token


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> WindowTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return WindowTokenizer(directory, MANIFEST.max_tokens)


class Model:
    """Marks tokens of the context by their text; every other one is worth 0."""

    def __init__(self, encoder: WindowTokenizer, starts: Marks, ends: Marks, null: float = -20):
        self._encoder = encoder
        self._starts, self._ends, self._null = starts, ends, null

    def answer(self, inputs: Any, **parameters: Any) -> Any:
        work = TASK.parse(inputs, parameters, MANIFEST)
        assert work.windowing is not None
        windows = [
            window
            for i, pair in enumerate(work.texts)
            for window in self._encoder.windows(pair, i, work.windowing, work.truncation)[0]
        ]
        computed = DecodeContext(
            rows=[self._logits(window, work.texts[window[1].text][1]) for window in windows],
            items=[item for item, _ in windows],
            token_offsets=[layout for _, layout in windows],
            manifest=MANIFEST,
        )
        return TASK.decode(computed, work.options)

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
def certain(encoder: WindowTokenizer) -> Model:
    """Sure that the answer goes from "night" to "train"."""
    return Model(encoder, {"night": 20}, {"train": 20})


NIGHT_TRAIN = {"score": pytest.approx(1), "start": 4, "end": 15, "answer": "night train"}


def test_one_question_gets_one_answer_object(certain: Model) -> None:
    assert certain.answer(ASKED) == NIGHT_TRAIN


@pytest.mark.parametrize(
    "inputs",
    [
        [ASKED, ASKED],
        {"question": [ASKED["question"]] * 2, "context": [ASKED["context"]] * 2},
        {"question": [ASKED["question"]] * 2, "context": ASKED["context"]},
    ],
)
def test_a_list_of_questions_gets_a_list_however_it_is_sent(certain: Model, inputs: Any) -> None:
    assert certain.answer(inputs) == [NIGHT_TRAIN, NIGHT_TRAIN]


def test_a_list_of_one_is_a_list(certain: Model) -> None:
    assert certain.answer([ASKED]) == [NIGHT_TRAIN]


def test_every_question_is_answered_from_its_own_context(certain: Model) -> None:
    other = {"question": "was it good", "context": "awful food on that night train"}
    first, second = certain.answer([ASKED, other])
    assert (first["start"], second["start"]) == (4, 19)


def test_several_answers_come_as_a_list_best_first(encoder: WindowTokenizer) -> None:
    model = Model(encoder, {"night": 5, "city": 3}, {"train": 5, "city": 3})
    answers = model.answer(ASKED, top_k=3)
    assert [answer["answer"] for answer in answers][:1] == ["night train"]
    assert len(answers) == 3
    scores = [answer["score"] for answer in answers]
    assert scores == sorted(scores, reverse=True)
    assert all(
        ASKED["context"][answer["start"] : answer["end"]] == answer["answer"] for answer in answers
    )


def test_there_are_no_more_answers_than_the_context_has(encoder: WindowTokenizer) -> None:
    # One answer is an object also when more were asked for.
    model = Model(encoder, {}, {})
    assert model.answer({"question": "a", "context": "city"}, top_k=5)["answer"] == "city"


def test_a_score_is_the_product_of_two_softmaxes(encoder: WindowTokenizer) -> None:
    model = Model(encoder, {"city": np.log(3)}, {"city": np.log(3)}, null=0)
    answer = model.answer({"question": "a", "context": "the city"})
    # First token, "the" and "city" share 1 : 1 : 3.
    assert answer["answer"] == "city"
    assert answer["score"] == pytest.approx(3 / 5 * 3 / 5, abs=1e-6)


def test_an_answer_has_no_more_tokens_than_allowed(encoder: WindowTokenizer) -> None:
    model = Model(encoder, {"night": 9}, {"city": 9, "train": 8})
    assert model.answer(ASKED, max_answer_len=5)["answer"] == "night train to the city"
    assert model.answer(ASKED, max_answer_len=4)["answer"] == "night train"


def test_parts_of_words_grow_to_whole_ones_and_their_scores_add_up(
    encoder: WindowTokenizer,
) -> None:
    # "xyz" is x ##y ##z.
    asked = {"question": "a", "context": "the xyz is"}
    model = Model(encoder, {"y": 9, "x": 9}, {"y": 9, "z": 9})
    whole = model.answer(asked)
    assert (whole["answer"], whole["start"], whole["end"]) == ("xyz", 4, 7)
    # x to y, x to z, y to y and y to z: a quarter each.
    assert whole["score"] == pytest.approx(1, abs=1e-2)
    parts = model.answer(asked, align_to_words=False, top_k=4)
    assert {part["answer"] for part in parts} == {"xy", "xyz", "y", "yz"}
    assert [part["score"] for part in parts] == pytest.approx([0.25] * 4, abs=1e-2)


def test_the_same_text_in_another_case_is_the_same_answer(encoder: WindowTokenizer) -> None:
    model = Model(encoder, {"city": 9}, {"city": 9})
    answer = model.answer({"question": "a", "context": "CITY is good City"}, max_answer_len=1)
    assert (answer["answer"], answer["start"]) == ("CITY", 0)
    assert answer["score"] == pytest.approx(0.5, abs=1e-2)


LONG = "the food was bad " * 12 + "and the night train was good " + "with that film " * 12


def test_an_answer_deep_in_a_long_context_has_offsets_into_the_whole_of_it(certain: Model) -> None:
    answer = certain.answer({"question": "a", "context": LONG}, doc_stride=10)
    at = LONG.index("night train")
    assert (answer["start"], answer["end"], answer["answer"]) == (at, at + 11, "night train")


def test_what_two_windows_see_is_one_answer_with_both_scores(certain: Model) -> None:
    # A window has room for ten tokens; the night train is sixth and seventh, so in the first two.
    context = "it was a good on the night train is good " + "it was a " * 8
    answer = certain.answer({"question": "a", "context": context}, max_seq_len=14, doc_stride=5)
    assert answer["answer"] == "night train"
    assert answer["score"] == pytest.approx(2, abs=0.01)


def test_no_answer_is_an_answer_where_that_is_asked_for(encoder: WindowTokenizer) -> None:
    model = Model(encoder, {"night": 5}, {"train": 5}, null=9)
    none = {"score": pytest.approx(0.96, abs=0.01), "start": 0, "end": 0, "answer": ""}
    assert model.answer(ASKED)["answer"] == "night train"
    assert model.answer(ASKED, handle_impossible_answer=True) == none
    best, second = model.answer(ASKED, handle_impossible_answer=True, top_k=2)
    assert (best, second["answer"]) == (none, "night train")


def test_the_window_that_is_least_sure_of_no_answer_counts(encoder: WindowTokenizer) -> None:
    # Only where the night train is does a window see anything but the first token.
    model = Model(encoder, {"night": 20}, {"train": 20}, null=9)
    answers = model.answer(
        {"question": "a", "context": LONG}, handle_impossible_answer=True, top_k=100, doc_stride=10
    )
    (null,) = (answer["score"] for answer in answers if answer["answer"] == "")
    assert null < 1e-6


def test_answers_longer_than_may_be_told_are_refused(
    certain: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = len("night train")
    monkeypatch.setattr(question_answering, "MAX_ANSWER_CHARACTERS", 2 * told)
    assert len(certain.answer([ASKED] * 2)) == 2
    with pytest.raises(InvalidField, match=f"more than {2 * told} characters") as refusal:
        certain.answer([ASKED] * 3)
    assert refusal.value.field == "parameters.top_k"


@pytest.mark.parametrize("context", ["   ", "\u200b"])
def test_a_context_without_words_has_the_empty_answer(certain: Model, context: str) -> None:
    nothing = {"score": 0.0, "start": 0, "end": 0, "answer": ""}
    assert certain.answer({"question": "a", "context": context}) == nothing


@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("Café Zoë: the NIGHT train à Kraków", "NIGHT train"),
        ("e\u0301te\u0301 the night train", "night train"),
        ("🍕👩‍👩‍👧 on the night train 🚆", "night train"),
        ("東京 night train 大阪", "night train"),
    ],
)
def test_offsets_are_characters_of_the_text_as_it_was_sent(
    certain: Model, context: str, answer: str
) -> None:
    found = certain.answer({"question": "a", "context": context})
    assert found["answer"] == answer
    assert context[found["start"] : found["end"]] == answer


def test_a_long_question_is_cut_and_the_context_still_answers(
    encoder: WindowTokenizer, certain: Model
) -> None:
    asked = {"question": "was it good " * 40, "context": ASKED["context"]}
    assert certain.answer(asked) == NIGHT_TRAIN
    pair = (asked["question"], asked["context"])
    windows, cut = encoder.windows(pair, 0, build_question_windowing(64), Truncation.REFUSE)
    assert (len(windows), cut) == (1, True)
