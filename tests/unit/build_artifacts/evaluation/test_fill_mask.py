from __future__ import annotations

import math

import numpy as np
import pytest
from tokenizers import Tokenizer

from build_artifacts.evaluation import (
    BadEvaluationData,
    Evaluation,
    ExampleSampling,
    load_evaluation,
)
from build_artifacts.evaluation.fill_mask import select_masked_positions
from deployments.artifacts.types import TaskName
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile

TASK = TaskName.FILL_MASK
MASK = 4
VOCABULARY = 150


def load(text: str, write: WriteFile, make_model: MakeModel, **options: int) -> Evaluation:
    return load_evaluation(write("a.txt", text), TASK, make_model(mask_token=MASK, **options))


def masked(evaluation: Evaluation) -> list[list[int]]:
    return [np.flatnonzero(item.ids == MASK).tolist() for item in evaluation.items]


def test_fill_mask_masks_every_seventh_token_from_varying_offsets(
    write: WriteFile, make_model: MakeModel
) -> None:
    evaluation = load("the a of and to in is it you that was for\n" * 9, write, make_model)
    # Position 0 is the special first token.
    assert masked(evaluation) == [
        [1, 8], [2, 9], [3, 10], [4, 11], [5, 12], [6], [7], [1, 8], [2, 9],
    ]  # fmt: skip


def test_short_sentence_has_one_mask(write: WriteFile, make_model: MakeModel) -> None:
    assert masked(load("good film\n" * 4, write, make_model)) == [[1], [2], [1], [2]]


def test_truncated_tokens_are_not_masked(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load("good " * 200, write, make_model, max_tokens=12)
    assert masked(evaluation) == [[1, 8]]
    assert len(evaluation.items[0].ids) == 12


def test_masks_of_a_sentence_are_limited_by_memory() -> None:
    assert len(select_masked_positions([0] * 500, offset=3)) == 16
    assert select_masked_positions([1, 1], offset=3).tolist() == []


def test_perplexity_matches_hand_calculation(write: WriteFile, make_model: MakeModel) -> None:
    plain = load("good film\nbad film", write, make_model)
    # Equal logits give a perplexity equal to the vocabulary size.
    uniform = [np.full((1, VOCABULARY), 3, dtype=np.float32)] * 2
    assert plain.score(uniform) == {"perplexity": pytest.approx(VOCABULARY, rel=1e-5)}
    assert plain.metric == "perplexity"

    # The masked tokens are `good` of the first and `film` of the second sentence. Their
    # probabilities are 1/2 and 1/8.
    def predict(token: int, share: float) -> np.ndarray:
        odds = np.full((1, VOCABULARY), (1 - share) / (VOCABULARY - 1))
        odds[0, token] = share
        return (np.log(odds) + 7).astype(np.float32)

    tokenizer = Tokenizer.from_file(str(make_model().directory / "tokenizer.json"))
    good, film = tokenizer.token_to_id("good"), tokenizer.token_to_id("film")
    assert plain.score([predict(good, 1 / 2), predict(film, 1 / 8)]) == {
        "perplexity": pytest.approx(math.sqrt(2 * 8), rel=1e-5)
    }


def test_perplexity_drop_is_growth_in_percent(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load("good film", write, make_model)
    assert evaluation.metric_drop({"perplexity": 8.0}, {"perplexity": 8.4}) == pytest.approx(5)
    assert evaluation.metric_drop({"perplexity": 8.0}, {"perplexity": 7.6}) == pytest.approx(-5)
    assert evaluation.find_violations({"perplexity": 8.0}, {"perplexity": 8.4}, max_drop=0.3) == (
        "perplexity 8.4000, 5.00 % above the reference",
    )
    assert evaluation.metric_drop({"perplexity": 8.0}, {"perplexity": math.inf}) == math.inf
    assert evaluation.metric_drop({"perplexity": math.inf}, {"perplexity": math.inf}) == math.inf


def test_overflowing_perplexity_is_infinite(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load("good film", write, make_model)
    logits = np.zeros((1, VOCABULARY), dtype=np.float32)
    logits[0, 0] = 5000
    assert evaluation.score([logits]) == {"perplexity": math.inf}


def test_sample_consists_of_sentences(write: WriteFile, make_model: MakeModel) -> None:
    path = write("a.txt", "".join("a " * n + "\n" for n in range(1, 30)))
    model = make_model(mask_token=MASK)
    evaluation = load_evaluation(path, TASK, model, ExampleSampling(limit=6, seed=9))
    assert len({len(item.ids) for item in evaluation.items}) == 6


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\u200b\n", "no sentence has a token"),
        ("", "no examples"),
    ],
)
def test_text_without_maskable_tokens_is_rejected(
    write: WriteFile, make_model: MakeModel, text: str, complaint: str
) -> None:
    with pytest.raises(BadEvaluationData, match=complaint):
        load(text, write, make_model)


def test_sentence_with_mask_token_is_rejected(write: WriteFile, make_model: MakeModel) -> None:
    path = make_model().directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(path))
    with pytest.raises(BadEvaluationData, match="line 3: the sentence contains the mask token"):
        load("good\n\na [MASK] film\n", write, make_model)
