"""The benchmark command `generation` with a tiny decoder, with and without a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.generation.results import SERVED_TO_LOOP
from benchmarks.generation.streams import (
    GENAI,
    IN_PROCESS,
    LLAMA_CPP,
    NO_DRAFTS,
    OVER_HTTP,
    PAGED_TRANSFORMERS,
    TRANSFORMERS,
)
from deployments.config import GeneratorSettings
from deployments.errors import EngineFailed
from deployments.messages import Chunk, GenerationCall, Started
from tests.integration.benchmarks.test_commands import only_result
from tests.support.artifacts import EMBEDDER
from tests.support.benchmark_generation import DecodingGenerator
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.generators import ScriptedGeneratorClient, ScriptedReply
from tests.support.http_server import serve_http
from tests.support.in_process import InProcess

SHORT = ["--rounds", "2", "--streams", "8", "1", "--new-tokens", "24", "--prompt-tokens", "20"]
STREAMS_OVER_HTTP = ["--parts", "streams", "--skip", "genai", "transformers", "paged", "llama"]
UNUSED_URL = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    seal_tiny_decoder(store)
    return store


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time to trials of grammars. A schema whose trial is too slow would be rejected."""
    monkeypatch.setattr("deployments.generation.grammar_trials.WAIT_S", 120.0)


@pytest.fixture
def url(store: Path) -> Iterator[str]:
    """Start a server of the model DECODER. Yield its URL."""
    generator = DecodingGenerator(store, DECODER, GeneratorSettings(kv_slots=8))
    with serve_http(InProcess(store, models=(DECODER,), generator=generator)) as running:
        yield running.url


def command(store: Path, out: Path, url: str, *options: str) -> list[str]:
    places = ["--store", str(store), "--out", str(out), "--url", url]
    return ["generation", "--model", DECODER, *places, *SHORT, *options]


def part(results: list[dict[str, Any]], name: str, system: str) -> dict[str, Any]:
    (result,) = [f for f in results if (f["part"], f["system"]) == (name, system)]
    return result["metrics"]


def test_generation_measures_process_and_server(
    store: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    baselines = ["--skip", "genai", "transformers", "paged", "llama"]
    assert main(command(store, tmp_path, url, *baselines, "--churn", "40")) == 0
    result = only_result(tmp_path)
    assert result["run"]["benchmark"] == "generation"
    results = result["results"]
    assert (results["missing"], results["notes"]) == ({}, [])
    for system in (IN_PROCESS, NO_DRAFTS, OVER_HTTP):
        for name in ("1 stream", "8 streams"):
            level = part(results["streams"], name, system)
            assert len(level["tokens_per_s"]["values"]) == 2
            assert level["ttft_ms_p50"]["median"] > 0
        assert part(results["scenarios"], "long-prompt", system)["joining_ttft_ms"]["median"] > 0
        assert part(results["scenarios"], "mixed-load", system)["tokens_per_s"]["median"] > 0
        prefix = part(results["scenarios"], "shared-prefix", system)
        assert prefix["cached_tokens"]["low"] > 200, "the system prompt has 238 tokens"
    # The time between tokens needs IN_PROCESS, because a server may send several tokens per event.
    alone = part(results["streams"], "1 stream", IN_PROCESS)
    assert 0 < alone["inter_token_ms_p50"]["median"] <= alone["inter_token_ms_max"]["median"]
    assert results["churn"]["requests"] == 40
    schemas = results["structured_output"]
    assert (schemas["requests"], schemas["invalid"], schemas["rejected"]) == (50, 0, 0)
    assert schemas["valid"] == 50 - schemas["truncated"] == 50 - len(schemas["faults"])
    alone = results["batch_invariance"]
    assert (alone["compared"], alone["same"]) == (8, 8)
    assert len(results["answer_agreements"]) == 2
    for likeness in results["answer_agreements"]:
        assert (likeness["compared"], likeness["same"]) == (18, 18)
    assert results["ratios"][SERVED_TO_LOOP]["median"] > 0
    assert "\ngoals\n" in capsys.readouterr().out


def test_generation_runs_the_requested_parts_only(store: Path, tmp_path: Path) -> None:
    few = ["--parts", "streams", "--skip", "genai", "transformers", "paged", "llama", "http"]
    assert main(command(store, tmp_path, UNUSED_URL, *few)) == 0
    results = only_result(tmp_path)["results"]
    assert (results["scenarios"], results["churn"], results["missing"]) == ([], None, {})
    assert results["structured_output"] is None
    parts = [(level["part"], level["system"]) for level in results["streams"]]
    expected = [
        (name, who) for name in ("1 stream", "8 streams") for who in (IN_PROCESS, NO_DRAFTS)
    ]
    assert parts == expected


def test_generation_skips_unavailable_baselines(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    few = ["--parts", "streams", "shared-prefix", "--genai", gone, "--source", gone]
    assert main(command(store, tmp_path / "out", UNUSED_URL, *few)) == 0
    results = only_result(tmp_path / "out")["results"]
    missing = results["missing"]
    assert set(missing) == {OVER_HTTP, GENAI, TRANSFORMERS, PAGED_TRANSFORMERS, LLAMA_CPP}
    assert "no response from http://127.0.0.1:9" in missing[OVER_HTTP]
    assert "has no genai_config.json" in missing[GENAI]
    assert f"`{gone}` is not a directory" in missing[TRANSFORMERS]
    assert missing[LLAMA_CPP] == "llama.cpp requires a GGUF file"
    measured = {goal["what"] for goal in results["goals"] if goal["reached"] is not None}
    # This goal may be unmeasured, too: it has no value if the eight short answers never overlap.
    assert measured <= {"eight streams / one stream without drafts"}
    assert len(results["goals"]) == 9
    assert "skipped: hundredfold over HTTP: no response" in capsys.readouterr().out


class GeneratorThatBreaks(DecodingGenerator):
    """A replica whose streams fail after the first ten."""

    streams = 0

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        self.streams += 1
        if self.streams > 10:
            raise EngineFailed("gone")
        async with aclosing(super().stream(call)) as stream:
            async for event in stream:
                yield event


def test_generation_drops_a_failing_server(store: Path, tmp_path: Path) -> None:
    generator = GeneratorThatBreaks(store, DECODER, GeneratorSettings(kv_slots=8))
    with serve_http(InProcess(store, models=(DECODER,), generator=generator)) as running:
        assert main(command(store, tmp_path, running.url, *STREAMS_OVER_HTTP)) == 0
    results = only_result(tmp_path)["results"]
    assert "gone" in results["missing"][OVER_HTTP]
    assert len(part(results["streams"], "8 streams", IN_PROCESS)["tokens_per_s"]["values"]) == 2
    assert SERVED_TO_LOOP not in results["ratios"]


def test_generation_rejects_a_server_with_other_answers(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(call: Any) -> ScriptedReply:
        return ScriptedReply(pieces=("a",) * (call.options.max_new_tokens or 1))

    generator = ScriptedGeneratorClient(answer)
    with serve_http(InProcess(store, models=(DECODER,), generator=generator)) as running:
        assert main(command(store, tmp_path, running.url, *STREAMS_OVER_HTTP)) == 1
    results = only_result(tmp_path)["results"]
    assert SERVED_TO_LOOP not in results["ratios"]
    assert f"no ratio to {OVER_HTTP}: its answers are not those" in results["notes"][0]
    wrong = f"the answers are wrong, so the timings are invalid: {OVER_HTTP} and {IN_PROCESS}: 0 of"
    assert wrong in capsys.readouterr().err


def test_generation_rejects_answers_above_the_context(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(store, tmp_path, UNUSED_URL, "--new-tokens", "300")) == 1
    assert "a prompt and its answer have 320 tokens; the maximum is 256" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_encoder_model_is_rejected(
    tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--store", str(tiny_store), "--out", str(tmp_path)]
    assert main(["generation", "--model", EMBEDDER, *places]) == 1
    assert f"error: `{EMBEDDER}` does not generate text" in capsys.readouterr().err


def test_precision_of_a_built_genai_model_is_rejected() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generation", "--genai", "directory", "--genai-precision", "int4"])
