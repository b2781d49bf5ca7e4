from __future__ import annotations

import numpy as np
import orjson
import pytest
from scipy import stats

from benchmarks.client import Client
from benchmarks.errors import BenchmarkError
from benchmarks.quality import Served, score_sentiment, score_similarity
from benchmarks.sentences import LabelledText
from build_artifacts.evaluation.similarity import ScoredPair
from tests.benchmarks.fakes import FakeAnswer, FakeServer, Seen

# Directions of toy embeddings; cosines with "east" fall in this order.
COMPASS = {"east": 0, "north-east": 45, "north": 90, "north-west": 135, "west": 180}
LABELS = ["NEGATIVE", "POSITIVE"]


def toy_server(n: int, request: Seen) -> FakeAnswer:
    """Embeds compass points and finds everything with "good" in it good."""
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


def test_similarity_goes_through_the_api() -> None:
    points = list(COMPASS)[1:]
    pairs = [
        ScoredPair("east", point, score) for point, score in zip(points, (5, 2, 3, 1), strict=True)
    ]
    cosines = [np.cos(np.deg2rad(COMPASS[point])) for point in points]
    with FakeServer(toy_server).in_thread() as server, Client(server.target) as client:
        score = score_similarity(Served(client, "toy", use_gpu=False), pairs)
    assert score.value == pytest.approx(stats.spearmanr(cosines, [5, 2, 3, 1]).statistic)
    assert score.examples == 4


def test_sentiment_goes_through_the_api_in_batches() -> None:
    examples = [LabelledText(f"good {i}", 1) for i in range(60)]
    examples += [LabelledText(f"bad {i}", 0) for i in range(39)]
    examples += [LabelledText("not good", 0)]
    with FakeServer(toy_server).in_thread() as server, Client(server.target) as client:
        score = score_sentiment(Served(client, "toy", use_gpu=True), examples)
    assert score.value == 0.99
    posted = [orjson.loads(request.body) for request in server.seen if request.method == "POST"]
    assert [len(body["inputs"]) for body in posted] == [64, 36, 1]
    assert all(body["options"] == {"use_cache": False, "use_gpu": True} for body in posted)


def test_too_few_answers_are_an_error() -> None:
    server = FakeServer(lambda n, request: FakeAnswer(body=b"[[1.0, 2.0]]"))
    with server.in_thread(), Client(server.target) as client:
        served = Served(client, "toy", use_gpu=False)
        with pytest.raises(BenchmarkError, match="did not answer 2 texts"):
            score_similarity(served, [ScoredPair("a", "b", 1.0)])


def test_a_refusal_is_an_error_that_says_why() -> None:
    refusal = FakeAnswer(status=404, body=b'{"error": "Model toy does not exist"}')
    server = FakeServer(lambda n, request: refusal)
    with server.in_thread(), Client(server.target) as client:
        served = Served(client, "toy", use_gpu=False)
        with pytest.raises(BenchmarkError, match=r"404: .*Model toy does not exist"):
            served.describe()
