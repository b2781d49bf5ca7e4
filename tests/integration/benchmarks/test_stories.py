"""`bench stories` with tiny models: story a (techniques), b (stages) and c (decoding)."""

from __future__ import annotations

import argparse
import io
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

from benchmarks.__main__ import main
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress
from benchmarks.common.sentences import SQUAD_NAME, STSB_NAME
from benchmarks.generation.streams import StreamGroup, StreamResult
from benchmarks.servers.own_server import Server
from benchmarks.stories import command, decoding, served_stages, techniques
from benchmarks.stories import stages as story_stages
from benchmarks.stories.decoding import GptShape, compare_logits
from benchmarks.stories.stages import SealedStage
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import BuildRecipe
from build_artifacts.types import Tokens
from deployments.artifacts.types import Device, ModelHead
from deployments.terminal.command_line import INTERRUPTED
from tests.integration.benchmarks.test_commands import only_result
from tests.support.http_server import serve_http
from tests.support.in_process import InProcess
from tests.support.prepared_build import LITTLE
from tests.support.tiny_encoders import tiny_checkpoint

WORDS = ("good", "bad", "lovely film", "awful food", "the river", "a train at night")
PAIRS = "\n".join(f"1.0\t{one}\t{two}" for one in WORDS for two in WORDS)


def run_story(part: str, out: Path, *options: str) -> dict[str, Any]:
    words = ["stories", part, "--rounds", "1", "--note", "a test", "--out", str(out), *options]
    assert main(words) == 0
    assert {path.suffix for path in out.iterdir()} >= {".json", ".png", ".svg"}
    written = only_result(out)
    assert written["results"]["note"] == "a test"
    return written


def build_tiny(root: Path, **options: Any) -> str:
    """Build a tiny model in `root`/store; return its id."""
    recipe = BuildRecipe(candidates=(CPU_INT8,))
    source = tiny_checkpoint(root / "source", layers=1, **options)
    request = BuildRequest(ref=str(source), store=root / "store", recipe=recipe, budget=LITTLE)
    return build(request, BuildProgress(io.StringIO())).manifest.id


def test_techniques_measures_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def serve_configured(config: Path, _logs: Path) -> Iterator[Server]:
        (application,) = yaml.safe_load(config.read_text())["applications"]
        models = tuple(model["id"] for model in application["args"]["models"])
        store = Path(application["args"]["store"])
        with serve_http(InProcess(store, models=models)) as server:
            yield Server(ServerAddress.parse(server.url), launcher=os.getpid())

    monkeypatch.setattr(techniques, "start_server", serve_configured)
    monkeypatch.setattr(techniques, "REQUESTS", 12)
    monkeypatch.setattr(techniques, "CONNECTIONS", 4)
    monkeypatch.setattr(techniques, "LOAD_S", 2.0)
    model_id = build_tiny(tmp_path)
    (tmp_path / STSB_NAME).write_text(f"score\tsentence1\tsentence2\n{PAIRS}\n")
    places = ["--store", str(tmp_path / "store"), "--data", str(tmp_path)]
    options = ["--embedder", model_id, "--generator", ""]
    written = run_story("a", tmp_path / "out", *places, *options)
    steps = written["results"]["embedding"]
    assert [step["name"] for step in steps] == [
        *("naive", "fast tokenizer", "no padding", "cache", "graph", "fusion", "quantization"),
        "batching",
    ]
    assert all(step["per_s"]["median"] > 0 for step in steps)
    assert 0 < written["results"]["distinct"] < written["results"]["requests"] == 12
    table, served, answers = written["tables"]
    assert table["rows"][0][3:] == ["1.00", "1.0"]
    assert written["results"]["served_per_s"]["median"] > 0
    assert served["rows"][0][0] == "over HTTP, 4 connections, without the cache"
    *checks, server = written["results"]["checks"]
    assert [check["what"] for check in checks] == [
        f"{step['name']} against naive" for step in steps[1:]
    ]
    assert {check["compared"] for check in checks} == {written["results"]["distinct"]}
    assert server["compared"] == 12
    assert len(answers["rows"]) == len(checks) + 1


class ScriptedSystem:
    """A generation system that takes one second per token, for any number of streams."""

    name, max_streams = "scripted", None

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        times = tuple(float(n) for n in range(1, new_tokens + 1))
        return StreamGroup(tuple(StreamResult(0.0, times, new_tokens) for _ in prompts))


def test_generation_steps_count_all_streams() -> None:
    prompts = [(1, 2)] * techniques.STREAMS
    alone, together = (
        techniques.GenerationStep("step", "what", ScriptedSystem(), streams)
        for streams in (1, techniques.STREAMS)
    )
    assert alone.tokens_per_s(prompts) == pytest.approx(1.0)
    assert together.tokens_per_s(prompts) == pytest.approx(techniques.STREAMS)


FIRST = SealedStage(
    name="baseline",
    what="torch",
    model_id="stages/baseline",
    directory=Path("unused"),
    device=Device.CPU,
    parameters=1,
    size_bytes=1,
)


def write_squad(path: Path, count: int) -> Path:
    """Write a file in SQuAD format whose texts use words of the tiny vocabulary."""
    paragraphs = [
        {
            "context": "the lovely river and the city at night " + "good " * number,
            "qas": [
                {
                    "id": str(number),
                    "question": "is it good",
                    "answers": [{"text": "lovely river", "answer_start": 4}],
                }
            ],
        }
        for number in range(1, count + 1)
    ]
    path.write_bytes(orjson.dumps({"data": [{"title": "tiny", "paragraphs": paragraphs}]}))
    return path


@contextmanager
def serve_here(stages: Sequence[SealedStage], store: Path, _out: Path) -> Iterator[Client]:
    gpus = float(any(stage.device is Device.GPU for stage in stages))
    in_process = InProcess(store, models=tuple(stage.model_id for stage in stages), gpus=gpus)
    with serve_http(in_process) as server, Client(ServerAddress.parse(server.url)) as client:
        yield client


def run_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run story b, the stages of a build, with a tiny model; return the results by stage name."""
    calibration = write_squad(tmp_path / "calibration.json", 12)
    monkeypatch.setattr(command, "find_calibration", lambda: calibration)
    monkeypatch.setattr(served_stages, "serve", serve_here)
    monkeypatch.setattr(served_stages, "LENGTHS", (48, 60, 512))
    monkeypatch.setattr(served_stages, "REQUESTS", 10)
    model_id = build_tiny(tmp_path, head=ModelHead.SPAN)
    data = tmp_path / "data"
    data.mkdir()
    write_squad(data / SQUAD_NAME, 4)
    places = ["--store", str(tmp_path / "store"), "--data", str(data)]
    options = ["--reader", model_id, "--prune", "0.25", "--max-drop", "100"]
    written = run_story("b", tmp_path / "out", *places, *options)
    return {stage["name"]: stage for stage in written["results"]["stages"]}


def test_stages_include_fp16_where_a_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test pretends that this host has a GPU. The graph for the GPU runs on the CPU."""
    monkeypatch.setattr(story_stages, "has_device", lambda _device: True)
    monkeypatch.setattr(story_stages, "STAGES", story_stages.STAGES[-1:])
    stages = run_stages(tmp_path, monkeypatch)
    assert list(stages) == ["int8, not pruned", "fp16"]
    assert stages["fp16"]["reason"] is None
    assert set(stages["fp16"]["latencies"]) == {"48", "60"}


def test_server_answers_for_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = run_stages(tmp_path, monkeypatch)
    assert list(stages) == [
        *("baseline", "pruned", "onnx", "optimized", "int8", "int8, not pruned", "fp16")
    ]
    assert stages["fp16"]["latencies"] is None
    assert stages["fp16"]["reason"].startswith("needs a GPU")
    whole, pruned = stages["baseline"], stages["pruned"]
    assert pruned["parameters"] < whole["parameters"] == stages["int8, not pruned"]["parameters"]
    assert pruned["size_bytes"] < whole["size_bytes"]
    assert stages["int8"]["size_bytes"] < stages["int8, not pruned"]["size_bytes"]
    # These stages have the same weights. They differ only in the engine or the graph.
    assert pruned["f1"] == stages["onnx"]["f1"] == stages["optimized"]["f1"]
    for name, stage in stages.items():
        if name != "fp16":
            assert set(stage["latencies"]) == {"48", "60"}
            assert all(latency["requests"] == 10 for latency in stage["latencies"].values())
            assert all(latency["mean_ms"] > 0 for latency in stage["latencies"].values())


@pytest.mark.parametrize(
    ("stages", "lengths", "reason"),
    [([], (48,), "no stage passed"), ([FIRST], (), "the model accepts fewer than 32 tokens")],
)
def test_nothing_to_measure_is_an_error(
    tmp_path: Path, stages: list[SealedStage], lengths: Sequence[int], reason: str
) -> None:
    with pytest.raises(BenchmarkError, match=reason):
        served_stages.measure_stages(stages, tmp_path, [], "data", lengths, tmp_path)


@pytest.mark.parametrize("tokens", [40, 57])
def test_inputs_have_the_requested_length(tmp_path: Path, tokens: int) -> None:
    from tokenizers import Tokenizer

    from tests.support.tiny_encoders import tiny_tokenizer

    tiny_tokenizer(tmp_path)
    inputs = served_stages.build_inputs(tmp_path, tokens)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(tokenizer.encode(inputs["question"], inputs["context"]).ids) == tokens
    with pytest.raises(BenchmarkError, match="no text with the question has 5 tokens"):
        served_stages.build_inputs(tmp_path, 5)


TINY_GPT = GptShape(layers=2, heads=2, width=16, vocabulary=60, positions=64)


def test_decoding_compares_four_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "GPT2", TINY_GPT)
    monkeypatch.setattr(decoding, "CONTEXTS", (8, 24))
    written = run_story("c", tmp_path)
    systems = written["results"]["systems"]
    assert [(system["io"], system["kv_cache"]) for system in systems] == [
        ("numpy", False),
        ("IO binding", False),
        ("numpy", True),
        ("IO binding", True),
    ]
    for system in systems:
        assert set(system["ms_per_token"]) == {"8", "24"}
        assert system["logits_difference"] < 1e-4
    assert [table["name"] for table in written["tables"]] == ["ms per token", "times faster"]
    assert written["tables"][1]["rows"][0][1:] == ["1.0", "1.0"]


class WrongSystem:
    io, kv_cache = "wrong", False

    def __init__(self, logit: float) -> None:
        self._logit = logit

    def start(self, ids: Sequence[int]) -> None:
        del ids

    def step(self, token: int) -> Any:
        return np.array([1.0, self._logit, token], np.float32)


def test_decoding_rejects_wrong_logits() -> None:
    with pytest.raises(BenchmarkError, match="the systems compute other logits"):
        compare_logits([WrongSystem(1.0), WrongSystem(1.5)], [1], 2)


def test_a_story_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["stories", "d"])
    assert "invalid choice: 'd'" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--prune", "nan"], ["--prune", "1"], ["--max-drop", "-1"]])
def test_invalid_limits_of_a_story_are_rejected(option: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["stories", "b", *option])


def test_sigterm_removes_the_files_of_a_story(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(_arguments: argparse.Namespace, scratch: Path) -> None:
        assert scratch.is_dir()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(command.PARTS, "a", command.PARTS["a"]._replace(measure=measure))
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that a failure ends only the test
    try:
        assert main(["stories", "a", "--out", str(tmp_path / "out")]) == INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert list(tmp_path.glob("stories-*")) == []


def test_state_of_the_machine_is_not_claimed_without_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = []

    def measure(arguments: argparse.Namespace, _scratch: Path) -> None:
        notes.append(arguments.note)

    story = command.Story(measure, lambda _: [], lambda *_: [])
    monkeypatch.setitem(command.PARTS, "a", story)
    assert main(["stories", "a", "--out", str(tmp_path)]) == 0
    assert notes == ["not stated"]
