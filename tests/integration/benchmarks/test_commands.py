"""Benchmark commands with tiny models and a server in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from benchmarks.__main__ import main
from benchmarks.common.engine_timing import list_core_splits
from benchmarks.common.local_model import LocalModel
from benchmarks.common.sentences import SST2_NAME, STSB_NAME
from benchmarks.engine.results import ENGINE, name_system
from deployments.host.machine import usable_cores
from tests.support.artifacts import EMBEDDER
from tests.support.benchmark_fakes import FakeAnswer, FakeServer, ReceivedRequest, Script

WORDS = ("good", "bad", "lovely film", "awful food", "the river", "a train at night", "music")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with sentences in the vocabulary of the tiny models."""
    directory = tmp_path / "data"
    directory.mkdir()
    lines = [f"1.0\t{one}\t{two}" for one in WORDS for two in WORDS]
    (directory / STSB_NAME).write_text("score\tsentence1\tsentence2\n" + "\n".join(lines))
    (directory / SST2_NAME).write_text("label\tsentence\n1\tgood\n0\tbad\n")
    return directory


def served(model: LocalModel, *, sign: float = 1.0) -> Script:
    """Return a script that answers like a server of `model`. A `sign` of -1 negates outputs."""
    vectors = {text: sign * model.unbatched_values([text], threads=1)[0] for text in WORDS}

    def answer(n: int, request: ReceivedRequest) -> FakeAnswer:
        if request.method == "GET":
            facts = {"id": EMBEDDER, "version": model.manifest.version}
            return FakeAnswer(body=orjson.dumps(facts))
        vector = vectors[orjson.loads(request.body)["inputs"]]
        return FakeAnswer(body=orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))

    return answer


def serving_command(url: str, store: Path, data: Path, out: Path) -> list[str]:
    short = ["--rounds", "1", "--seconds", "2"]
    places = ["--store", str(store), "--data", str(data), "--out", str(out)]
    return ["serving", "--url", url, "--model", EMBEDDER, *places, *short]


def only_result(out: Path) -> dict:
    (path,) = out.glob("*.json")
    return orjson.loads(path.read_bytes())


def test_serving_measures_server_and_engine(
    tiny_store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    model = LocalModel.open(tiny_store, EMBEDDER)
    with FakeServer(served(model)).in_thread() as server:
        command = serving_command(server.target.url, tiny_store, data, out)
        status = main([*command, "--connections", "1", "4", "--seed", "7", "--with-engine"])
    assert status == 0
    result = only_result(out)
    assert result["run"]["seed"] == 7
    assert result["run"]["command"].startswith("python -m benchmarks serving --url http://127.")
    assert result["run"]["host"]["usable_cores"] >= 1
    results = result["results"]
    assert [level["connections"] for level in results["levels"]] == [1, 4]
    for level in results["levels"]:
        assert level["requests"] > 0
        assert level["failures"] == {}
        assert set(level["latency_ms"]) == {"p50", "p90", "p95", "p99"}
        assert level["client_cpu_s_per_request"] > 0
    best = max(level["sentences_per_s"]["median"] for level in results["engine"])
    most = results["levels"][-1]["requests_per_s"]["median"]
    assert results["served_over_engine"] == pytest.approx(most / best)
    assert [agreement["compared"] > 0 for agreement in results["checks"]] == [True, True]
    assert {path.suffix for path in out.iterdir()} == {".json", ".png", ".svg"}
    assert "served / raw engine at 4 connections" in capsys.readouterr().out


def test_serving_writes_the_results_of_wrong_answers(
    tiny_store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = LocalModel.open(tiny_store, EMBEDDER)
    with FakeServer(served(model, sign=-1.0)).in_thread() as server:
        command = serving_command(server.target.url, tiny_store, data, tmp_path / "out")
        assert main([*command, "--connections", "2"]) == 1
    assert "error: the answers are wrong, so the timings are invalid" in capsys.readouterr().err
    assert only_result(tmp_path / "out")["results"]["checks"][0]["worst_cosine"] < -0.9


def test_serving_with_failed_requests_is_an_error(
    tiny_store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = served(LocalModel.open(tiny_store, EMBEDDER))

    def flaky(n: int, request: ReceivedRequest) -> FakeAnswer:
        return FakeAnswer(status=503) if n == 20 else good(n, request)

    with FakeServer(flaky).in_thread() as server:
        command = serving_command(server.target.url, tiny_store, data, tmp_path / "out")
        assert main([*command, "--connections", "2"]) == 1
    assert "error: requests failed at 2 connections" in capsys.readouterr().err
    assert only_result(tmp_path / "out")["results"]["levels"][0]["failures"] == {"503": 1}


def test_serving_without_artifact_repeats_the_requests(
    tiny_store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = LocalModel.open(tiny_store, EMBEDDER)
    empty = tmp_path / "empty"
    with FakeServer(served(model)).in_thread() as server:
        command = serving_command(server.target.url, empty, data, tmp_path / "out")
        assert main([*command, "--connections", "2"]) == 0
        assert main([*command, "--with-engine"]) == 1
    assert "has no version" in capsys.readouterr().err
    (agreement,) = only_result(tmp_path / "out")["results"]["checks"]
    assert agreement["what"] == "served against the same requests alone"


def test_serving_rejects_more_cached_sentences_than_there_are(
    tiny_store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(served(LocalModel.open(tiny_store, EMBEDDER))).in_thread() as server:
        command = serving_command(server.target.url, tiny_store, data, tmp_path / "out")
        assert main([*command, "--cached", "1000"]) == 1
    assert f"there are {2 * len(WORDS) ** 2} sentences, not 1000" in capsys.readouterr().err


def test_serving_without_server_is_an_error(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer().in_thread() as server:
        gone = server.target.url
    assert main(serving_command(gone, tmp_path, data, tmp_path)) == 1
    error = capsys.readouterr().err
    assert f"error: no response from {gone}" in error
    assert "\n\nhint: start the server with `make serve`\n" in error


def test_engine_measures_every_size_and_shape(tiny_store: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["engine", "--model", EMBEDDER, "--store", str(tiny_store), "--data", str(data)]
    assert main([*command, "--out", str(out), "--rounds", "2", "--batch", "1", "8"]) == 0
    results = only_result(out)["results"]
    assert {speed["batch_size"] for speed in results["throughput"]} == {1, 8}
    assert all(len(speed["sentences_per_s"]["values"]) == 2 for speed in results["throughput"])
    measured = [(cell["system"], cell["shape"]) for cell in results["latencies"]]
    threads = [split.threads for split in list_core_splits(usable_cores())]
    assert measured == [(name_system(ENGINE, n), at) for at in ("1x16", "8x16") for n in threads]
    assert results["torch_over_engine"] is None
    assert np.isclose(results["checks"][0]["worst_cosine"], 1.0)
    assert {path.suffix for path in out.iterdir()} == {".json", ".png", ".svg"}


def test_quality_without_data_names_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", "--data", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"error: `{tmp_path / STSB_NAME}`: cannot be read: No such file or directory\n" in error
    assert error.endswith("name the directory of a valid file with --data DIR\n")


@pytest.mark.parametrize(
    "option",
    [
        ["--rounds", "0"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--cached", "4", "--with-engine"],
    ],
)
def test_invalid_options_are_rejected(option: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serving", *option])
