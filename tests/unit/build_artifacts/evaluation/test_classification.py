from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.errors import BuildError
from build_artifacts.evaluation import BadEvaluationData, ExampleSampling, load_evaluation
from deployments.artifacts.types import TaskName
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile, json_lines

TASK = TaskName.TEXT_CLASSIFICATION
MOODS = ("NEGATIVE", "NEUTRAL", "POSITIVE")


def rows(*values: list[float]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.float32) for row in values]


BEST = {"n": [3.0, 1.0, 2.0], "o": [0.0, 1.0, 0.5], "p": [-3.0, -2.0, -1.0]}


def one_hot(marks: str) -> list[np.ndarray]:
    return rows(*(BEST[mark] for mark in marks))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "label\tsentence\n2\tgood\n0\tbad\n0\tawful\n1\tit is\n"),
        ("a.tsv", "text\tlabel\ngood\tPOSITIVE\nbad\tNEGATIVE\nawful\tnegative\nit is\tneutral\n"),
        ("a.tsv", "POSITIVE\tgood\nNEGATIVE\tbad\nNEGATIVE\tawful\nNEUTRAL\tit is\n"),
        ("a.tsv", "good\t2\nbad\t0\nawful\t0\nit is\t1\n"),
        ("a.jsonl", json_lines({"text": "good", "label": 2}, {"text": "bad", "label": "NEGATIVE"},
                               {"text": "awful", "label": "0"}, {"text": "it is", "label": 1})),
    ],
)  # fmt: skip
def test_labels_are_names_or_ids(
    write: WriteFile, make_model: MakeModel, name: str, text: str
) -> None:
    evaluation = load_evaluation(write(name, text), TASK, make_model(labels=MOODS))
    assert [len(item.ids) for item in evaluation.items] == [3, 3, 3, 4]
    assert evaluation.metric == "accuracy"
    assert evaluation.score(one_hot("pnno")) == {"accuracy": 1, "macro_f1": 1}
    scores = evaluation.score(one_hot("pnpp"))
    # NEGATIVE: 1 correct, 1 predicted, 2 expected. NEUTRAL: none.
    # POSITIVE: 1 correct, 3 predicted, 1 expected.
    assert scores == {"accuracy": 0.5, "macro_f1": pytest.approx((2 / 3 + 0 + 1 / 2) / 3)}


def test_label_named_like_an_id_is_read_as_a_name(write: WriteFile, make_model: MakeModel) -> None:
    stars = make_model(labels=("1", "2", "0"))
    evaluation = load_evaluation(write("a.tsv", "label\ttext\n1\tbad\n0\tgood\n"), TASK, stars)
    assert evaluation.score(rows([1, 0, 0], [0, 0, 1]))["accuracy"] == 1


def test_text_pairs_have_two_segments(write: WriteFile, make_model: MakeModel) -> None:
    model = make_model(labels=("no", "yes"))
    path = write("a.jsonl", json_lines({"text": "a film", "text_pair": "good", "label": "yes"}))
    (item,) = load_evaluation(path, TASK, model).items
    assert (len(item.ids), item.second_segment_start) == (6, 4)
    path = write("a.tsv", "sentence1\tsentence2\tlabel\na film\tgood\tyes\n")
    (same,) = load_evaluation(path, TASK, model).items
    assert same.ids.tolist() == item.ids.tolist()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "text\tlabels\ngood\tPOSITIVE, neutral\nbad\t0\nit\t\n"),
        ("a.tsv", "POSITIVE,NEUTRAL\tgood\nNEGATIVE\tbad\n\tit\n"),
        ("a.jsonl", json_lines({"text": "good", "labels": ["POSITIVE", 1]},
                               {"text": "bad", "labels": [0]}, {"text": "it", "labels": []})),
    ],
)  # fmt: skip
def test_multiple_labels_are_scored_together(
    write: WriteFile, make_model: MakeModel, name: str, text: str
) -> None:
    model = make_model(labels=MOODS, problem_type="multi_label")
    evaluation = load_evaluation(write(name, text), TASK, model)
    assert evaluation.metric == "micro_f1"
    answers = rows([-1, 2, 1], [3, 2, -1], [-1, -1, -2])
    # Labels of the three texts. Predicted: {1, 2}, {0, 1}, {}. Expected: {1, 2}, {0}, {}.
    assert evaluation.score(answers) == {
        "micro_f1": pytest.approx(2 * 3 / (4 + 3)),
        "macro_f1": pytest.approx((1 + 2 / 3 + 1) / 3),
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", json_lines({"text": "good", "labels": "Food, drink"},
                               {"text": "bad", "labels": "Food"})),
        ("a.tsv", "Food, drink\tgood\nFood\tbad\n"),
    ],
)  # fmt: skip
def test_label_with_a_comma_is_one_label(
    write: WriteFile, make_model: MakeModel, name: str, text: str
) -> None:
    model = make_model(labels=("Food, drink", "Food"), problem_type="multi_label")
    evaluation = load_evaluation(write(name, text), TASK, model)
    assert evaluation.score(rows([1, -1], [-1, 1]))["micro_f1"] == 1


@pytest.mark.parametrize("problem", ["regression", "single_label", "multi_label"])
def test_single_score_is_evaluated_by_spearman_and_pearson(
    problem: str, write: WriteFile, make_model: MakeModel
) -> None:
    model = make_model(labels=("SCORE",), problem_type=problem)
    path = write("a.tsv", "text\tscore\na\t0\nthe\t2\nfilm\t7\n")
    evaluation = load_evaluation(path, TASK, model)
    assert evaluation.metric == "spearman"
    assert evaluation.score(rows([1], [2], [3])) == {
        "spearman": pytest.approx(1),
        "pearson": pytest.approx(7 / np.sqrt(2 * 26)),
    }


def test_regression_with_several_scores_is_rejected(
    write: WriteFile, make_model: MakeModel
) -> None:
    model = make_model(labels=("VALENCE", "AROUSAL"), problem_type="regression")
    with pytest.raises(BuildError, match="the model returns 2 scores per text") as caught:
        load_evaluation(write("a.tsv", "text\tscore\na\t0\nthe\t2\n"), TASK, model)
    assert "build without labeled data" in caught.value.hint


def test_sample_keeps_labels_of_texts(write: WriteFile, make_model: MakeModel) -> None:
    model = make_model(labels=tuple(f"len{i}" for i in range(30)))
    path = write("a.tsv", "".join(f"len{i}\t{'a ' * i}a\n" for i in range(30)))
    evaluation = load_evaluation(path, TASK, model, ExampleSampling(limit=7, seed=2))
    answers = [np.eye(30, dtype=np.float32)[len(item.ids) - 3] for item in evaluation.items]
    assert len(answers) == 7
    assert evaluation.score(answers)["accuracy"] == 1


@pytest.mark.parametrize(
    ("problem", "name", "text", "complaint"),
    [
        (None, "a.tsv", "label\ttext\n0\ta\n3\tb\n",
         "line 3, `label`: the model has no label `3`; it has `NEGATIVE`, `NEUTRAL`"),
        (None, "a.tsv", "NEGATIVE\ta\nHAPPY\tb\n", "line 2, `label`: .* no label `HAPPY`"),
        (None, "a.tsv", "HAPPY\ta\n", "line 1: 2 columns, neither"),
        (None, "a.tsv", f"label\ttext\n{'1' * 5000}\tb\n", "no label `1{40}…`"),
        (None, "a.jsonl", '{"text": "a", "label": true}', "line 1, `label`: .* no label `True`"),
        (None, "a.jsonl", '{"text": "a", "label": -1}', "line 1, `label`: .* no label `-1`"),
        (None, "a.jsonl", '{"text": "a", "label": ["POSITIVE"]}', "no label"),
        (None, "a.jsonl", '{"text": "a"}', "line 1, `label`: missing"),
        ("multi_label", "a.jsonl", '{"text": "a", "labels": 3}', "`labels`: not a list of labels"),
        ("multi_label", "a.jsonl", '{"text": "a", "labels": ["x"]}', "`labels`: .* no label `x`"),
        ("multi_label", "a.jsonl", '{"text": "a", "labels": []}', "no example has a label"),
        ("regression", "a.tsv", "1\ta\n1\tb\n", "all scores are equal"),
        ("regression", "a.tsv", "score\ttext\n1\ta\nx\tb\n", "line 3, `score`: `x` is not a num"),
    ],
)  # fmt: skip
def test_data_unlike_the_model_is_rejected(
    write: WriteFile,
    make_model: MakeModel,
    problem: str | None,
    name: str,
    text: str,
    complaint: str,
) -> None:
    labels = ("SCORE",) if problem == "regression" else MOODS
    model = make_model(labels=labels, problem_type=problem)
    with pytest.raises(BadEvaluationData, match=complaint):
        load_evaluation(write(name, text), TASK, model)


def test_error_truncates_many_labels(write: WriteFile, make_model: MakeModel) -> None:
    model = make_model(labels=tuple(f"kind{i}" for i in range(500)))
    with pytest.raises(BadEvaluationData) as caught:
        load_evaluation(write("a.tsv", "label\ttext\nx\ta\n"), TASK, model)
    assert caught.value.message.endswith("`kind9`, …")
