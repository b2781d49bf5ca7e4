from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from build_artifacts.evaluation import BadEvaluationData, EvaluatedModel, load_evaluation
from deployments.artifacts.types import TaskName
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile, json_lines

TASK = TaskName.TOKEN_CLASSIFICATION
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
# `anna` has four tokens, `film` has one.
LINE = {"tokens": ["anna", "film", "the", "city"], "tags": ["B-PER", "I-PER", "O", "B-LOC"]}


def answer(*labels: int) -> np.ndarray:
    """Return the logits of one item with these token labels."""
    return np.eye(len(LABELS), dtype=np.float32)[list(labels)]


def test_words_have_label_of_first_token(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(
        write("a.jsonl", json_lines(LINE)), TASK, make_model(labels=LABELS)
    )
    (item,) = evaluation.items
    assert len(item.ids) == 9
    assert evaluation.metric == "entity_f1"
    # The special tokens and the later tokens of `anna` are ignored.
    assert evaluation.score([answer(3, 1, 4, 4, 4, 2, 0, 3, 3)]) == {
        "entity_f1": 1,
        "token_accuracy": 1,
    }


def test_entity_counts_with_correct_kind_and_ends(write: WriteFile, make_model: MakeModel) -> None:
    two = json_lines(LINE, {"tokens": ["train", "a"], "tags": [3, 0]})
    evaluation = load_evaluation(write("a.jsonl", two), TASK, make_model(labels=LABELS))
    # First sentence: PER ends too early, LOC is correct. Second: LOC is correct, PER is wrong.
    answers = [answer(0, 1, 0, 0, 0, 0, 0, 3, 0), answer(0, 3, 1, 0)]
    assert evaluation.score(answers) == {
        "entity_f1": pytest.approx(2 * 2 / (4 + 3)),
        "token_accuracy": pytest.approx(4 / 6),
    }


def test_entities_do_not_cross_sentences(write: WriteFile, make_model: MakeModel) -> None:
    two = json_lines({"tokens": ["a"], "tags": ["B-PER"]}, {"tokens": ["train"], "tags": ["I-PER"]})
    evaluation = load_evaluation(write("a.jsonl", two), TASK, make_model(labels=LABELS))
    assert evaluation.score([answer(0, 1, 0), answer(0, 1, 0)])["entity_f1"] == 1


def test_truncated_words_do_not_count(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(
        write("a.jsonl", json_lines(LINE)), TASK, make_model(labels=LABELS, max_tokens=7)
    )
    assert [len(item.ids) for item in evaluation.items] == [7]
    scores = evaluation.score([answer(0, 1, 0, 0, 0, 2, 0)])
    assert scores == {"entity_f1": 1, "token_accuracy": 1}


def test_fully_truncated_sentences_do_not_count(write: WriteFile, make_model: MakeModel) -> None:
    nothing = {"tokens": ["\u200b"], "tags": ["B-PER"]}
    both = write("a.jsonl", json_lines(nothing, LINE))
    assert len(load_evaluation(both, TASK, make_model(labels=LABELS)).items) == 1
    with pytest.raises(BadEvaluationData, match="no sentence has a token"):
        load_evaluation(write("b.jsonl", json_lines(nothing)), TASK, make_model(labels=LABELS))


def test_tokenizer_with_space_markers_reads_running_text(tmp_path: Path, write: WriteFile) -> None:
    vocabulary = {"a": 0, "b": 1, "Ġa": 2, "Ġb": 3, "Ġ": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    line = {"tokens": ["ab", "b", "a"], "tags": [1, 0, 3]}
    model = EvaluatedModel(directory=tmp_path, max_tokens=8, labels=LABELS)
    evaluation = load_evaluation(write("a.jsonl", json_lines(line)), TASK, model)
    assert evaluation.items[0].ids.tolist() == tokenizer.encode("ab b a").ids == [0, 1, 3, 2]
    assert evaluation.score([answer(1, 4, 0, 3)]) == {"entity_f1": 1, "token_accuracy": 1}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "line 1, `tags`: 1 tags for 2 tokens"),
        ({"tokens": ["a"], "tags": ["B-ORG"]}, r"`tags\[0\]`: the model has no label `B-ORG`"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, r"`tokens\[1\]`: empty"),
        ({"tokens": [], "tags": []}, "`tokens`: an empty list"),
        ({"tokens": ["a"]}, "`tags`: missing"),
    ],
)
def test_invalid_sentence_is_rejected(
    write: WriteFile, make_model: MakeModel, line: dict[str, object], complaint: str
) -> None:
    with pytest.raises(BadEvaluationData, match=complaint):
        load_evaluation(write("a.jsonl", json_lines(line)), TASK, make_model(labels=LABELS))
