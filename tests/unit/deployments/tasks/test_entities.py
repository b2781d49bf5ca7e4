from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from deployments.tasks.entities import EntityGroup, merge_windows
from tests.support.labeled_tokens import Scores, ask, spans
from tests.support.tiny_encoders import tiny_tokenizer

CERTAIN = 1 - 1e-12  # rounds to 1 in float32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["O", "O", "O", "O"], []),
        (["B-PER", "I-PER", "O", "B-LOC"], [("PER", "good film"), ("LOC", "river")]),
        (["B-PER", "B-PER", "I-PER", "O"], [("PER", "good"), ("PER", "film bad")]),
        (["I-PER", "I-PER", "O", "I-PER"], [("PER", "good film"), ("PER", "river")]),
        (["B-PER", "I-LOC", "I-LOC", "B-LOC"],
         [("PER", "good"), ("LOC", "film bad"), ("LOC", "river")]),
        (["I-LOC", "B-LOC", "I-PER", "I-PER"],
         [("LOC", "good"), ("LOC", "film"), ("PER", "bad river")]),
        (["MISC", "MISC", "B-PER", "MISC"],
         [("MISC", "good film"), ("PER", "bad"), ("MISC", "river")]),
    ],
)  # fmt: skip
def test_adjacent_tokens_of_one_tag_form_an_entity(
    labels: list[Scores], expected: list[tuple[str, str]], directory: Path
) -> None:
    assert spans(ask(directory, "good film bad river", [labels])) == expected


def test_entity_has_the_mean_score_and_the_bounds_of_its_tokens(directory: Path) -> None:
    tokens: list[Scores] = [{"B-LOC": 0.9}, {"I-LOC": 0.5}, {"I-LOC": 0.7}]
    assert ask(directory, "good film bad", [tokens]) == [
        {
            "entity_group": "LOC",
            "score": pytest.approx(0.7, abs=1e-6),
            "word": "good film bad",
            "start": 0,
            "end": 13,
        }
    ]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Each token has its own best label: LOC, O and PER.
        ("simple", [("LOC", "film", 0.5), ("PER", "##z", 0.8)]),
        ("first", [("LOC", "filmyz", 0.5)]),
        ("max", [("PER", "filmyz", 0.8)]),
        # Means over the tokens: PER (0.3 + 0.1 + 0.8) / 3, LOC (0.5 + 0.2 + 0.1) / 3.
        ("average", [("PER", "filmyz", 0.4)]),
    ],
)
def test_strategy_selects_the_label_of_a_word(
    strategy: str, expected: list[tuple[str, str, float]], directory: Path
) -> None:
    tokens: list[Scores] = [
        {"B-LOC": 0.5, "I-PER": 0.3},
        {"O": 0.6, "B-LOC": 0.2, "I-PER": 0.1},
        {"I-PER": 0.8, "B-LOC": 0.1},
        "O",
    ]
    answer = ask(directory, "filmyz the", [tokens], aggregation_strategy=strategy)
    entities = [(group["entity_group"], group["word"], group["score"]) for group in answer]
    assert entities == [
        (kind, word, pytest.approx(score, abs=1e-6)) for kind, word, score in expected
    ]


def test_max_strategy_takes_the_first_of_equal_scores(directory: Path) -> None:
    tokens: list[Scores] = [{"B-LOC": CERTAIN}, {"B-PER": CERTAIN}]
    answer = ask(directory, "filmy", [tokens], aggregation_strategy="max")
    assert spans(answer) == [("LOC", "filmy")]


@pytest.mark.parametrize(
    ("ignored", "expected"),
    [
        ([], ["O", "PER", "LOC"]),
        (["O"], ["PER", "LOC"]),
        (["O", "PER"], ["LOC"]),
        (["B-PER"], ["O", "PER", "LOC"]),  # entity types have no B- or I- prefix
    ],
)
def test_ignored_entity_types_are_left_out(
    ignored: list[str], expected: list[str], directory: Path
) -> None:
    answer = ask(directory, "good film bad", [["O", "B-PER", "B-LOC"]], ignore_labels=ignored)
    assert [kind for kind, _ in spans(answer)] == expected


def test_ignored_labels_apply_to_tokens_without_aggregation(directory: Path) -> None:
    answer = ask(
        directory,
        "good film bad",
        [["O", "B-PER", "I-PER"]],
        aggregation_strategy="none",
        ignore_labels=["B-PER", "PER"],
    )
    assert [token["entity"] for token in answer] == ["O", "I-PER"]


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_unknown_tokens_have_the_text_of_the_input(strategy: str, directory: Path) -> None:
    answer = ask(directory, "the Łódź film", [["O", "B-LOC", "O"]], aggregation_strategy=strategy)
    assert [(group["word"], group["start"], group["end"]) for group in answer] == [("Łódź", 4, 8)]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize(
    ("text", "entity"),
    [
        ("Café film", "film"),
        ("cafe\u0301 film", "film"),  # e and a combining accent
        ("👩‍🚀 film", "film"),
        ("🇵🇱🇵🇱 good film", "film"),
        ("日本 film", "film"),
        ("  \t film", "film"),
        ("日本film", "日"),
        ("straße film", "film"),
        ("ﬁ film", "film"),
    ],
)
def test_offsets_are_characters_of_the_original_text(
    text: str, entity: str, strategy: str, directory: Path
) -> None:
    tokens = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text)
    pieces = [text[start:end] for start, end in tokens.offsets[1:-1]]
    labels: list[Scores] = ["B-LOC" if piece == entity else "O" for piece in pieces]
    (entities,) = ask(directory, text, [labels], aggregation_strategy=strategy)
    assert text[entities["start"] : entities["end"]] == entity
    assert entities["start"] == text.index(entity)


@pytest.fixture
def bytes_directory(tmp_path: Path) -> Path:
    """Write a byte-level tokenizer, which has no continuation prefix such as `##`."""
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "labels", "expected"),
    [
        # A token without a space before it continues a word, even if it is punctuation.
        ("ab, c", ["B-PER", "B-LOC", "O", "O", "B-LOC"], [("PER", 0, 3), ("LOC", 4, 5)]),
        # Both bytes of the first character have the same offsets.
        ("éb", ["B-PER", "B-LOC", "O"], [("PER", 0, 1), ("LOC", 0, 2)]),
    ],
)
def test_words_are_split_at_spaces_without_continuation_prefix(
    text: str, labels: list[Scores], expected: list[tuple[str, int, int]], bytes_directory: Path
) -> None:
    answer = ask(bytes_directory, text, [labels], aggregation_strategy="first")
    entities = [(group["entity_group"], group["start"], group["end"]) for group in answer]
    assert entities == expected


def group(start: int, end: int, score: float = 0.5, kind: str = "PER") -> EntityGroup:
    return {"entity_group": kind, "score": score, "word": "", "start": start, "end": end}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], []),
        ([group(0, 3), group(3, 6)], [group(0, 3), group(3, 6)]),  # adjacent, without overlap
        ([group(5, 8), group(0, 3)], [group(0, 3), group(5, 8)]),
        ([group(0, 3), group(0, 6)], [group(0, 6)]),
        ([group(0, 6), group(3, 6)], [group(0, 6)]),
        ([group(0, 3, 0.4), group(0, 3, 0.6)], [group(0, 3, 0.6)]),
        ([group(0, 3, 0.6), group(0, 3, 0.4)], [group(0, 3, 0.6)]),
        ([group(0, 3, kind="LOC"), group(0, 3, kind="PER")], [group(0, 3, kind="LOC")]),
        ([group(0, 3, 0.9), group(1, 5, 0.1)], [group(1, 5, 0.1)]),
        (
            [group(0, 4), group(3, 8), group(7, 9)],
            [group(3, 8)],
        ),  # each group is compared with the last group that was kept
        ([group(2, 2), group(2, 5)], [group(2, 2), group(2, 5)]),
    ],
)
def test_overlapping_entities_keep_the_longest_then_the_most_likely(
    groups: list[EntityGroup], expected: list[EntityGroup]
) -> None:
    assert merge_windows(groups) == expected
