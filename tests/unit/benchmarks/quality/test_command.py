from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from scipy import stats

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client
from benchmarks.common.sentences import SQUAD_NAME, LabeledText, read_answerable_questions
from benchmarks.quality.command import (
    ServedModelClient,
    find_squad,
    score_answers,
    score_sentiment,
    score_similarity,
)
from build_artifacts.evaluation.similarity import ScoredPair
from build_artifacts.evaluation.squad import SquadQuestion
from tests.support.benchmark_fakes import FakeAnswer, FakeServer, ReceivedRequest

# Angles of toy embeddings in degrees. Cosines with "east" decrease in this order.
COMPASS = {"east": 0, "north-east": 45, "north": 90, "north-west": 135, "west": 180}
LABELS = ["NEGATIVE", "POSITIVE"]


def toy_server(n: int, request: ReceivedRequest) -> FakeAnswer:
    """Embed compass points; classify texts that contain "good" as positive."""
    if request.method == "GET":
        return FakeAnswer(body=orjson.dumps({"id": "toy", "labels": LABELS}))
    inputs = orjson.loads(request.body)["inputs"]
    if request.path == "/pipeline/feature-extraction/toy":
        radians = np.deg2rad([COMPASS.get(text, 0) for text in inputs])
        return FakeAnswer(
            body=orjson.dumps(np.stack([np.cos(radians), np.sin(radians)], 1).tolist())
        )
    best = ["POSITIVE" if "good" in text else "NEGATIVE" for text in inputs]
    return FakeAnswer(body=orjson.dumps([[{"label": label, "score": 0.9}] for label in best]))


def test_score_similarity_uses_the_api() -> None:
    points = list(COMPASS)[1:]
    pairs = [
        ScoredPair("east", point, score) for point, score in zip(points, (5, 2, 3, 1), strict=True)
    ]
    cosines = [np.cos(np.deg2rad(COMPASS[point])) for point in points]
    with FakeServer(toy_server).in_thread() as server, Client(server.target) as client:
        score = score_similarity(ServedModelClient(client, "toy", use_gpu=False), pairs)
    assert score.value == pytest.approx(stats.spearmanr(cosines, [5, 2, 3, 1]).statistic)
    assert score.examples == 4


def test_score_sentiment_sends_batches() -> None:
    examples = [LabeledText(f"good {i}", 1) for i in range(60)]
    examples += [LabeledText(f"bad {i}", 0) for i in range(39)]
    examples += [LabeledText("not good", 0)]
    with FakeServer(toy_server).in_thread() as server, Client(server.target) as client:
        score = score_sentiment(ServedModelClient(client, "toy", use_gpu=True), examples)
    assert score.value == 0.99
    posted = [orjson.loads(request.body) for request in server.requests if request.method == "POST"]
    assert [len(body["inputs"]) for body in posted] == [64, 36, 1]
    assert all(body["options"] == {"use_cache": False, "use_gpu": True} for body in posted)


def first_two_words(n: int, request: ReceivedRequest) -> FakeAnswer:
    """Return the first two words of the context as the answer."""
    if request.method == "GET":
        return FakeAnswer(body=orjson.dumps({"id": "toy"}))
    assert request.path == "/pipeline/question-answering/toy"
    answers = [
        {"answer": " ".join(item["context"].split()[:2]), "score": 0.5, "start": 0, "end": 1}
        for item in orjson.loads(request.body)["inputs"]
    ]
    return FakeAnswer(body=orjson.dumps(answers))


def test_score_answers_uses_the_api() -> None:
    questions = [
        SquadQuestion("who?", "Ada Byron wrote it", gold) for gold in (("Ada Byron",), ("Ada",))
    ]
    with FakeServer(first_two_words).in_thread() as server, Client(server.target) as client:
        f1, exact = score_answers(
            ServedModelClient(client, "toy", use_gpu=False), "some.json", questions
        )
    # One of two words is correct: precision 1/2, recall 1.
    assert (f1.metric, f1.value) == ("F1", pytest.approx((1 + 2 / 3) / 2))
    assert (exact.metric, exact.value, exact.examples) == ("exact match", 0.5, 2)


def test_read_answerable_questions_skips_the_others(tmp_path: Path) -> None:
    item = [
        {"question": "a?", "answers": [{"text": "x"}]},
        {"question": "b?", "answers": [], "is_impossible": True},
    ]
    path = tmp_path / "squad.json"
    path.write_bytes(orjson.dumps({"data": [{"paragraphs": [{"context": "x", "qas": item}]}]}))
    assert [question.question for question in read_answerable_questions(path)] == ["a?"]
    path.write_bytes(orjson.dumps({"data": [{"paragraphs": [{"context": "x", "qas": item[1:]}]}]}))
    with pytest.raises(BenchmarkError, match="no question with an answer"):
        read_answerable_questions(path)


def test_find_squad_logs_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_squad(None, tmp_path) is None
    assert "skipping question answering; see --squad FILE" in capsys.readouterr().err
    (tmp_path / SQUAD_NAME).touch()
    assert find_squad(None, tmp_path) == tmp_path / SQUAD_NAME
    # If an option names a missing file, the error comes when the file is read.
    named = tmp_path / "absent.json"
    assert find_squad(named, tmp_path) == named
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_answerable_questions(named)


def test_answers_rejects_a_short_response() -> None:
    server = FakeServer(lambda n, request: FakeAnswer(body=b"[[1.0, 2.0]]"))
    with server.in_thread(), Client(server.target) as client:
        served = ServedModelClient(client, "toy", use_gpu=False)
        with pytest.raises(BenchmarkError, match="did not return 2 answers"):
            score_similarity(served, [ScoredPair("a", "b", 1.0)])


def test_answers_reports_an_error_response() -> None:
    error = FakeAnswer(status=404, body=b'{"error": "Model toy does not exist"}')
    server = FakeServer(lambda n, request: error)
    with server.in_thread(), Client(server.target) as client:
        served = ServedModelClient(client, "toy", use_gpu=False)
        with pytest.raises(BenchmarkError, match=r"404: .*Model toy does not exist"):
            served.describe()
