from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.evaluation import BadEvaluationData, ExampleSampling, load_evaluation
from deployments.artifacts.types import TaskName
from deployments.errors import EngineFailed
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile

TASK = TaskName.FEATURE_EXTRACTION
FOUR = "0\tthe\tcity\n1\ta\ttrain\n3\tgood\tbad\n5\tfilm\tfood\n"


def direction(degrees: float, length: float = 1) -> np.ndarray:
    radians = np.deg2rad(degrees)
    return np.array([np.cos(radians), np.sin(radians)], dtype=np.float32) * length


def test_cosines_are_correlated_with_scores(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(write("pairs.tsv", FOUR), TASK, make_model())
    assert [len(item.ids) for item in evaluation.items] == [3] * 8
    # The angles of the pairs are 90, 60, 0, 30 degrees: cosine ranks 1 2 4 3 against 1 2 3 4.
    answers = [direction(d, length=1 + d) for d in (0, 90, 10, 70, 5, 5, 0, 30)]
    scores = evaluation.score(answers)
    assert scores == {"spearman": pytest.approx(1 - 6 * 2 / (4 * 15))}
    assert evaluation.metric == "spearman"


def test_dot_products_are_correlated_for_a_model_trained_with_them(
    write: WriteFile, make_model: MakeModel
) -> None:
    evaluation = load_evaluation(write("pairs.tsv", FOUR), TASK, make_model(similarity="dot"))
    # All cosines are 1, so only the products 1, 2, 3, 4 have an order.
    answers = [direction(0, length) for length in (1, 1, 1, 2, 1, 3, 1, 4)]
    assert evaluation.score(answers) == {"spearman": pytest.approx(1)}


def test_dot_products_are_those_of_the_truncated_vectors_that_are_served(
    write: WriteFile, make_model: MakeModel
) -> None:
    """The model normalizes its vectors before it truncates them to their first value."""
    model = make_model(similarity="dot", default_dimensions=1, normalize=True)
    evaluation = load_evaluation(write("pairs.tsv", FOUR), TASK, model)
    # The first values of the unit vectors of the pairs multiply to 0.2, 0.5, 0.8 and 1.
    angles = np.rad2deg(np.arccos([0.2, 0.5, 0.8, 1]))
    answers = [row for i, d in enumerate(angles) for row in (direction(0, 9 - i), direction(d, 7))]
    assert evaluation.score(answers) == {"spearman": pytest.approx(1)}


def test_similarity_drop_is_in_hundredths(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(write("pairs.tsv", FOUR), TASK, make_model())
    assert evaluation.metric_drop({"spearman": 0.82}, {"spearman": 0.815}) == pytest.approx(0.5)
    assert evaluation.metric_drop({"spearman": 0.82}, {"spearman": 0.83}) == pytest.approx(-1)
    assert evaluation.metric_drop({"spearman": 0.82}, {"spearman": float("nan")}) == float("inf")


def test_prompt_precedes_every_sentence(write: WriteFile, make_model: MakeModel) -> None:
    path = write("pairs.tsv", FOUR)
    plain = load_evaluation(path, TASK, make_model())
    prompted = load_evaluation(path, TASK, make_model(prompt="good film "))
    assert [len(item.ids) for item in prompted.items] == [5] * 8
    for before, after in zip(plain.items, prompted.items, strict=True):
        assert after.ids[[0, 3, 4]].tolist() == before.ids.tolist()


def test_long_sentences_are_truncated(write: WriteFile, make_model: MakeModel) -> None:
    path = write("pairs.tsv", f"1\t{'river ' * 50}\ta\n2\tb\tc\n")
    evaluation = load_evaluation(path, TASK, make_model(max_tokens=9))
    assert [len(item.ids) for item in evaluation.items] == [9, 3, 3, 3]
    assert [item.second_segment_start for item in evaluation.items] == [9, 3, 3, 3]
    assert evaluation.items[0].ids.dtype == np.int32


def test_sample_consists_of_pairs(write: WriteFile, make_model: MakeModel) -> None:
    path = write("pairs.tsv", "".join(f"{i}\tgood\t{'bad ' * i}x\n" for i in range(20)))
    evaluation = load_evaluation(path, TASK, make_model(), ExampleSampling(limit=5, seed=1))
    lengths = [len(item.ids) for item in evaluation.items]
    assert lengths[0::2] == [3] * 5
    assert len(set(lengths[1::2])) == 5


def test_equal_scores_are_rejected(write: WriteFile, make_model: MakeModel) -> None:
    with pytest.raises(BadEvaluationData, match="all scores are equal"):
        load_evaluation(write("pairs.tsv", "1\ta\tb\n1\tc\td\n"), TASK, make_model())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_embedding_is_rejected(
    write: WriteFile, make_model: MakeModel, bad: float
) -> None:
    evaluation = load_evaluation(write("pairs.tsv", FOUR), TASK, make_model())
    answers = [direction(10 * i) for i in range(8)]
    answers[5][0] = bad
    with pytest.raises(EngineFailed, match="not a finite number"):
        evaluation.score(answers)


def test_sparse_vectors_are_compared_by_dot_product(
    write: WriteFile, make_model: MakeModel
) -> None:
    task = TaskName.SPARSE_EMBEDDINGS
    evaluation = load_evaluation(write("pairs.tsv", FOUR), task, make_model(similarity="dot"))
    # The products of the pairs are 0, 1, 2 and 6: their order is that of the scores.
    pairs = [([1, 0, 0], [0, 9, 9]), ([0, 1, 5], [9, 1, 0]), ([2, 0, 1], [1, 0, 0]),
             ([0, 2, 1], [9, 2, 2])]  # fmt: skip
    answers = [np.array(vector, dtype=np.float32) for pair in pairs for vector in pair]
    assert evaluation.score(answers) == {"spearman": pytest.approx(1)}
    reduced = evaluation.reduce_output(1, answers[1])
    assert reduced.tolist() == [[1, 2], [9, 9]]
