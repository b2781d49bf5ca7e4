from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.evaluation import BadEvaluationData, ExampleSampling
from build_artifacts.evaluation.files import FileLocation, read_lines, read_objects
from build_artifacts.evaluation.similarity import ScoredPair, read_pairs
from deployments.errors import BadSetting
from tests.unit.build_artifacts.evaluation.conftest import WriteFile

TWO = [ScoredPair('a "b"', "c", 2.5), ScoredPair("d", "e", 5.0)]


@pytest.mark.parametrize(
    "text",
    [
        'score\tsentence1\tsentence2\n2.500\ta "b"\tc\n5.000\td\te\n',
        'sentence1\tsentence2\tscore\na "b"\tc\t2.5\nd\te\t5',
        'Sentence1\tSentence2\tLabel\r\na "b"\tc\t2.5\r\nd\te\t5\r\n',
        'index\tscore\tgenre\tsentence1\tsentence2\n0\t2.5\tx\ta "b"\tc\n1\t5\tx\td\te\n',
        'a "b"\tc\t2.5\n\nd\te\t5.0\n\n',
        '2.5\ta "b"\tc\n5.0\td\te\n',
        '\ufeff2.5\ta "b"\tc\n5.0\td\te\n',
    ],
)
def test_table_header_is_optional(write: WriteFile, text: str) -> None:
    assert read_pairs(write("pairs.tsv", text)) == TWO


def test_json_lines_equal_the_table(write: WriteFile) -> None:
    lines = (
        '{"sentence1": "a \\"b\\"", "sentence2": "c", "score": 2.5, "genre": "x"}\n\n'
        '{"score": "5", "sentence1": "d", "sentence2": "e"}\n'
    )
    assert read_pairs(write("pairs.jsonl", lines)) == TWO


def test_unicode_separators_do_not_end_a_line(write: WriteFile) -> None:
    path = write("text.txt", "one\u2028still one\x0cand on\ntwo\n")
    assert read_lines(FileLocation(path, "text")) == [
        (1, "one\u2028still one\x0cand on"),
        (2, "two"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no examples"),
        ("\n \n", "no examples"),
        ("score\tsentence1\tsentence2\n", "no examples"),
        ("just some text\n", "line 1: 1 column, neither a header nor an example"),
        ("a\tb\tc\n", "line 1: 3 columns, neither"),
        ("\na\tb\tc\td\n", "line 2: 4 columns, neither"),
        ("1\ta\tb\n2\tc\n", "line 2: 2 columns, not 3"),
        ("1\ta\tb\n\nx\tc\td\n", "line 3, `score`: `x` is not a number"),
        ("label\tsentence1\tsentence2\nhigh\tc\td\n", "line 2, `label`: `high` is not a number"),
        ("1\ta\tb\nnan\tc\td\n", "line 2, `score`: `nan` is not a number"),
        ("1\ta\tb\n1e999\tc\td\n", "line 2, `score`: `1e999` is not a number"),
        ("1\ta\tb\n-1e300\tc\td\n", "line 2, `score`: `-1e300` is not between -1e"),
        (f"1\ta\tb\n{'9' * 5000}\tc\td\n", "line 2, `score`: `9{40}…` is not a number"),
        ("1\ta\tb\n2\t \td\n", "line 2, `sentence1`: empty"),
    ],
)
def test_invalid_table_error_names_line_and_field(
    write: WriteFile, text: str, complaint: str
) -> None:
    path = write("pairs.tsv", text)
    with pytest.raises(BadEvaluationData, match=complaint) as caught:
        read_pairs(path)
    assert caught.value.message.startswith(f"`{path}`")
    assert "`sentence1`" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[1]", "line 2: not a JSON object"),
        ("{", "line 2: not JSON"),
        ("[" * 5000, "line 2: not JSON: depth limit"),
        ('{"sentence1": "\\ud800"}', "line 2: not JSON"),
        ('{"sentence1": "a", "sentence2": "b"}', "line 2, `score`: missing"),
        ('{"sentence1": "a", "sentence2": null, "score": 1}', "`sentence2`: missing"),
        ('{"sentence1": "a", "sentence2": ["b"], "score": 1}', "`sentence2`: not a string"),
        ('{"sentence1": "a", "sentence2": "b", "score": true}', "`score`: `True` is not a number"),
        ('{"sentence1": "a", "sentence2": "b", "label": []}', r"`label`: `\[\]` is not a number"),
        ('{"sentence1": "a", "sentence2": "b", "score": NaN}', "line 2: not JSON"),
        (f'{{"sentence1": "a", "sentence2": "b", "score": 1{"0" * 400}}}', "line 2"),
    ],
)
def test_invalid_json_line_error_names_line_and_field(
    write: WriteFile, line: str, complaint: str
) -> None:
    good = '{"sentence1": "a", "sentence2": "b", "score": 1}'
    with pytest.raises(BadEvaluationData, match=complaint):
        read_pairs(write("pairs.jsonl", f"{good}\n{line}\n"))


def test_invalid_utf8_error_names_line(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_bytes(b"1\ta\tb\n2\tcaf\xe9\td\n")
    with pytest.raises(BadEvaluationData, match="line 2: not UTF-8"):
        read_pairs(tmp_path / "pairs.tsv")


@pytest.mark.parametrize("name", ["absent.tsv", "."])
def test_unreadable_file_error_names_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadEvaluationData, match=r"cannot be read: (No such file|Is a directory)"):
        read_objects(FileLocation(tmp_path / name, "JSON lines"))


def test_sample_depends_on_seed_and_keeps_order() -> None:
    examples = list(range(1000))
    some = ExampleSampling(limit=50, seed=3).sample(examples)
    assert some == sorted(set(some)) == ExampleSampling(limit=50, seed=3).sample(examples)
    assert len(some) == 50
    assert some != ExampleSampling(limit=50, seed=4).sample(examples)
    assert (
        ExampleSampling(limit=1000).sample(examples)
        == ExampleSampling().sample(examples)
        == examples
    )


@pytest.mark.parametrize("limit", [0, -1])
def test_empty_sample_is_rejected(limit: int) -> None:
    with pytest.raises(BadSetting):
        ExampleSampling(limit=limit)
