"""The benchmark command `rivals` with toy servers, which run as processes of this environment."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from benchmarks.__main__ import main
from benchmarks.common.agreement import to_vector
from benchmarks.common.local_model import LocalModel
from benchmarks.common.sentences import STSB_NAME
from benchmarks.rivals.apis import inputs_api
from benchmarks.rivals.catalog import FP32, RIVALS, Rival
from benchmarks.rivals.references import ReferenceEmbeddings
from benchmarks.rivals.rounds import RivalRounds
from benchmarks.servers.processes import ServerProcess
from tests.support.artifacts import EMBEDDER
from tests.support.benchmark_fakes import FakeAnswer, FakeServer, ReceivedRequest

SCRIPT = Path(__file__).parents[3] / "support" / "toy_rival.py"
WORDS = ("good", "bad", "lovely film", "awful food", "the river", "a train at night", "music")


def toy(name: str, *options: str) -> Rival:
    return Rival(
        name=name,
        title=f"Toy {name}",
        environment=None,
        package="numpy",
        computes_with=FP32,
        command=(sys.executable, str(SCRIPT), "--port", "{port}", *options),
        api=inputs_api(),
        ready_path="/health",
    )


@pytest.fixture
def vectors(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, list[float]]:
    """Embeddings of WORDS. They replace the reference, because the tiny model has no checkpoint."""
    model = LocalModel.open(tiny_store, EMBEDDER)
    values = model.unbatched_values(WORDS, threads=1)
    known = {text: to_vector(v).tolist() for text, v in zip(WORDS, values, strict=True)}
    references = ReferenceEmbeddings(lambda texts: np.array([known[text] for text in texts]))
    monkeypatch.setattr(ReferenceEmbeddings, "open", lambda *_: references)
    return known


@pytest.fixture
def toys(
    vectors: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[str, ...]:
    file = tmp_path / "vectors.json"
    file.write_bytes(orjson.dumps(vectors))
    rivals = (
        toy("right", "--vectors", str(file)),
        toy("wrong", "--vectors", str(file), "--sign", "-1"),
        toy("broken", "--fail", "no such model"),
        replace(toy("uninstallable"), environment="no-such-list"),
    )
    for rival in rivals:
        monkeypatch.setitem(RIVALS, rival.name, rival)
    return tuple(rival.name for rival in rivals)


def measure(
    store: Path, vectors: dict[str, list[float]], rivals: tuple[str, ...], directory: Path
) -> int:
    """Run two rounds against a server that answers with `vectors`. Return the exit status."""
    data = directory / "data"
    data.mkdir()
    lines = [f"1.0\t{one}\t{two}" for one in WORDS for two in WORDS]
    (data / STSB_NAME).write_text("score\tsentence1\tsentence2\n" + "\n".join(lines))
    version = LocalModel.open(store, EMBEDDER).manifest.version

    def answer(n: int, request: ReceivedRequest) -> FakeAnswer:
        if request.method == "GET":
            return FakeAnswer(body=orjson.dumps({"id": EMBEDDER, "version": version}))
        inputs = orjson.loads(request.body)["inputs"]
        texts = [inputs] if isinstance(inputs, str) else inputs
        return FakeAnswer(body=orjson.dumps([vectors[text] for text in texts]))

    with FakeServer(answer).in_thread() as ours:
        places = ["--store", str(store), "--data", str(data), "--out", str(directory / "out")]
        scope = ["--rivals", *rivals, "--workloads", "sentences", "lists", "--connections", "2"]
        options = [*places, *scope, "--rounds", "2", "--seconds", "1"]
        return main(["rivals", "--model", EMBEDDER, "--url", ours.target.url, *options])


def test_interrupted_run_keeps_its_complete_rounds(
    tiny_store: Path,
    vectors: dict[str, list[float]],
    toys: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_round = RivalRounds.run_round

    def interrupt_second(rounds: RivalRounds, server: ServerProcess, number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt
        run_round(rounds, server, number)

    monkeypatch.setattr(RivalRounds, "run_round", interrupt_second)
    assert measure(tiny_store, vectors, toys[:1], tmp_path) != 0
    (path,) = (tmp_path / "out").glob("*.json")
    written = orjson.loads(path.read_bytes())
    assert written["run"]["incomplete"] == "KeyboardInterrupt()"
    assert written["results"]["rounds"] == 1
    (right,) = written["results"]["rivals"]
    assert len(right["levels"][0]["rival"]["requests_per_s"]["values"]) == 1


def test_rivals_measures_pairs_and_names_what_failed(
    tiny_store: Path,
    vectors: dict[str, list[float]],
    toys: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    version = LocalModel.open(tiny_store, EMBEDDER).manifest.version
    assert measure(tiny_store, vectors, toys, tmp_path) == 0
    (path,) = (tmp_path / "out").glob("*.json")
    results = orjson.loads(path.read_bytes())["results"]
    (right,) = results["rivals"]
    assert right["name"] == "right"
    assert right["check"]["worst_cosine"] > 0.999
    levels = [(p["level"]["workload"], p["level"]["connections"]) for p in right["levels"]]
    assert levels == [("sentences", 2), ("lists", 2)]
    assert right["idle_cores"] is not None
    assert results["idle_cores"] is None, "the CPU time of a server at --url is not known"
    assert results["models"][0]["version"] == version
    for paired in right["levels"]:
        assert len(paired["rival"]["requests_per_s"]["values"]) == 2
        assert paired["rival"]["failures"] == paired["ours"]["failures"] == {}
    assert "the answers of wrong are wrong" in results["missing"]["wrong"]
    assert "no such model" in results["missing"]["broken"]
    assert "uninstallable" in results["missing"]
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {"", ".json", ".png", ".svg"}
    assert "no such model" in next((tmp_path / "out").glob("*-logs/broken.log")).read_text()
    assert "Toy right" in capsys.readouterr().out


def test_version_of_a_running_server_must_be_in_the_store(
    tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = orjson.dumps({"id": EMBEDDER, "version": "other"})
    with FakeServer(lambda n, request: FakeAnswer(body=facts)).in_thread() as ours:
        places = ["--store", str(tiny_store), "--url", ours.target.url]
        assert main(["rivals", "--model", EMBEDDER, "--workloads", "sentences", *places]) == 1
    assert "`other`" in capsys.readouterr().err


def test_a_running_server_takes_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rivals", "--url", "http://127.0.0.1:1", "--config", "serve_config.yaml"])
    assert "not allowed with argument" in capsys.readouterr().err
