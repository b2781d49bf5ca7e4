"""A decoder family needs one class and one table entry to be compiled and served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from build_artifacts import families
from build_artifacts.__main__ import main
from build_artifacts.checkpoints.checkpoint import CONFIG_NAME, Checkpoint, read_object
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.families.base import (
    Attempt,
    BuildBudget,
    BuildContext,
    EvaluatedCandidate,
    GateResult,
    ModelBuild,
)
from build_artifacts.graph_files import format_size
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.progress import BuildProgress
from build_artifacts.steps.seal import ArtifactContents, ArtifactIdentity
from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import (
    GENERATION_NAME,
    TOKENIZER_NAME,
    Candidate,
    EngineOptions,
    Parity,
)
from deployments.artifacts.types import Device, Precision
from deployments.config import GeneratorSettings
from deployments.engines import ENGINES
from deployments.engines.decoder import DecoderSpec
from tests.support.decoder_artifacts import TURN_END, write_byte_tokenizer
from tests.support.in_process import InProcess
from tests.support.tiny_encoders import write_json
from tests.support.toy_engine import BIGRAMS

GRAPH_NAME = "graphs/bigrams.npy"
MODEL = "toys/bigrams"
WORD = "tide"


@dataclass(frozen=True)
class BigramRecipe:
    name: str = "cpu-bigrams"
    device: Device = Device.CPU
    precision: Precision = "fp32"


class BigramBuild(ModelBuild[BigramRecipe, DecoderSpec]):
    gate_failed_hint = "use another toy"
    fallback = BigramRecipe()

    def candidates(self, device: Device) -> Sequence[BigramRecipe]:
        return (self.fallback,) if device is Device.CPU else ()

    def attempts(self, recipe: BigramRecipe) -> Iterator[Attempt[BigramRecipe]]:
        yield Attempt(recipe=recipe, label=recipe.name, key=recipe.name)

    def export(self, attempt: Attempt[BigramRecipe]) -> DecoderSpec:
        def work(into: Path) -> str:
            np.save(into / "bigrams.npy", self._reference())
            return format_size(into / "bigrams.npy")

        directory = self.context.steps.run_cached("export", "export", attempt.label, work)
        metadata = self.context.metadata
        return DecoderSpec(
            path=directory / "bigrams.npy",
            engine="bigrams",
            device=attempt.recipe.device,
            precision=attempt.recipe.precision,
            options=EngineOptions(),
            generation_config=metadata.required_generation_config,
            vocabulary=metadata.output_width,
            max_tokens=metadata.max_tokens,
        )

    def evaluate(self, spec: DecoderSpec) -> GateResult:
        equal = np.array_equal(np.load(spec.path), self._reference())
        parity = Parity(cosine_mean=1.0, cosine_worst=1.0, batched_cosine_worst=1.0)
        return GateResult(parity=parity, reasons=() if equal else ("another table",))

    def package(
        self,
        accepted: Sequence[EvaluatedCandidate[BigramRecipe, DecoderSpec]],
        identity: ArtifactIdentity,
    ) -> ArtifactContents:
        (only,) = accepted
        return ArtifactContents(
            identity=identity,
            metadata=self.context.metadata,
            candidates=(
                Candidate(
                    name=only.recipe.name,
                    device=only.recipe.device,
                    precision=only.recipe.precision,
                    engine="bigrams",
                    graph=GRAPH_NAME,
                    parity=only.parity,
                ),
            ),
            gate=self.context.recipe.gate,
            scores={},
            files={
                GRAPH_NAME: only.spec.path,
                TOKENIZER_NAME: self.context.weights / TOKENIZER_NAME,
            },
        )

    def _reference(self) -> np.ndarray:
        return load_file(self.context.weights / "model.safetensors")["bigrams"]


class BigramFamily:
    def matches(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> bool:
        return read_object(checkpoint.weights / CONFIG_NAME).get("model_type") == "bigram"

    def read_metadata(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
        config = read_object(checkpoint.weights / CONFIG_NAME)
        return CheckpointMetadata(
            tasks=tasks,
            architecture=config["architectures"][0],
            max_tokens=64,
            output_width=config["vocab_size"],
            generation_config=GenerationConfig(
                layers=1, kv_heads=1, head_dim=1, eos_token_ids=(config["eos_token_id"],)
            ),
        )

    def start(self, context: BuildContext) -> BigramBuild:
        return BigramBuild(context)


def write_bigram_checkpoint(directory: Path) -> Path:
    """Write a model that predicts the next letter of WORD, and an end token after the last one."""
    tokenizer = write_byte_tokenizer(directory / TOKENIZER_NAME)
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(TURN_END)
    logits = np.zeros((size, size), np.float32)
    ids = [tokenizer.token_to_id(letter) for letter in WORD]
    for token_id, following in zip(ids, [*ids[1:], end], strict=True):
        logits[token_id, following] = 9.0
    save_file({"bigrams": logits}, directory / "model.safetensors")
    config = {"model_type": "bigram", "architectures": ["BigramForCausalLM"]}
    write_json(directory / CONFIG_NAME, config | {"vocab_size": size, "eos_token_id": end})
    return directory


async def test_decoder_family_registered_in_the_table_is_compiled_and_serves_text(
    tmp_path: Path,
    progress: BuildProgress,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(families, "FAMILIES", [BigramFamily(), *families.FAMILIES])
    monkeypatch.setitem(ENGINES, "bigrams", BIGRAMS)  # type: ignore[misc]
    source = write_bigram_checkpoint(tmp_path / "checkpoint")
    request = BuildRequest(
        ref=str(source), store=tmp_path / "store", id=MODEL, budget=BuildBudget(tune_seconds=0)
    )
    result = build(request, progress)
    assert (result.directory / GRAPH_NAME).is_file()

    settings = GeneratorSettings(kv_slots=2, max_context_tokens=64)
    server = InProcess(request.store, (MODEL,), writes=settings)
    body = {"model": MODEL, "prompt": "t", "max_tokens": 9, "temperature": 0}
    async with server.client() as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ide", "stop")
    assert response.headers["x-compute-type"] == "cpu-fp32"

    assert main(["report", MODEL, "--store", str(request.store)]) == 1
    assert (
        f"`{MODEL}` {result.manifest.version} has no `{GENERATION_NAME}`" in capsys.readouterr().err
    )
