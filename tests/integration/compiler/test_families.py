"""Model families: a toy family needs one class and one table entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from build_artifacts import families
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.errors import GateFailed
from build_artifacts.families.base import (
    Attempt,
    BuildBudget,
    BuildContext,
    EvaluatedCandidate,
    GateResult,
    ModelBuild,
)
from build_artifacts.families.encoder import EncoderFamily
from build_artifacts.graph_files import format_size
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CPU_FP32, BuildRecipe, CandidateRecipe
from build_artifacts.steps.seal import ArtifactContents, ArtifactIdentity
from deployments.artifacts.manifest import TOKENIZER_NAME, ArtifactManifest, Candidate, Parity
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.tasks import find_head
from tests.support.artifacts import word_vectors, write_graph
from tests.support.fakes import item

EXACT = Parity(cosine_mean=1.0, cosine_worst=1.0, batched_cosine_worst=1.0)


class ToyBuild(ModelBuild[CandidateRecipe, GraphSpec]):
    """Toy build whose graph averages word vectors and whose gate rejects int8."""

    gate_failed_hint = "use another toy"

    def candidates(self, device: Device) -> Sequence[CandidateRecipe]:
        return self.context.recipe.candidates_for(device)

    @property
    def fallback(self) -> CandidateRecipe:
        return self.context.recipe.fallback

    def attempts(self, recipe: CandidateRecipe) -> Iterator[Attempt[CandidateRecipe]]:
        yield Attempt(recipe=recipe, label=recipe.name, key=recipe.name)

    def export(self, attempt: Attempt[CandidateRecipe]) -> GraphSpec:
        tokenizer = Tokenizer.from_file(str(self.context.weights / TOKENIZER_NAME))

        def work(into: Path) -> str:
            write_graph(into / "toy.onnx", word_vectors(tokenizer.get_vocab_size()))
            return format_size(into / "toy.onnx")

        key = f"export-{attempt.key}"
        directory = self.context.steps.run_cached(key, "export", attempt.label, work)
        return GraphSpec(
            path=directory / "toy.onnx",
            device=attempt.recipe.device,
            precision=attempt.recipe.precision,
            engine="onnxruntime",
            head=ModelHead.VECTOR,
            options=attempt.recipe.options,
        )

    def evaluate(self, spec: GraphSpec) -> GateResult:
        return GateResult(parity=EXACT, reasons=("rounded",) if spec.precision == "int8" else ())

    def package(
        self,
        accepted: Sequence[EvaluatedCandidate[CandidateRecipe, GraphSpec]],
        identity: ArtifactIdentity,
    ) -> ArtifactContents:
        (toy,) = accepted
        return ArtifactContents(
            identity=identity,
            metadata=self.context.metadata,
            candidates=(
                Candidate(
                    name=toy.recipe.name,
                    device=toy.recipe.device,
                    precision=toy.recipe.precision,
                    graph="graphs/toy.onnx",
                    parity=toy.parity,
                ),
            ),
            gate=self.context.recipe.gate,
            scores={},
            files={
                "graphs/toy.onnx": toy.spec.path,
                TOKENIZER_NAME: self.context.weights / TOKENIZER_NAME,
            },
            texts={"toy.txt": "a toy"},
        )


class ToyFamily(EncoderFamily):
    def matches(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> bool:
        return find_head(tasks[0]) is ModelHead.VECTOR

    def start(self, context: BuildContext) -> ToyBuild:
        return ToyBuild(context)


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", [ToyFamily(), *families.FAMILIES])


def request_toy(source: Path, store: Path, **recipe: CandidateRecipe) -> BuildRequest:
    return BuildRequest(
        ref=str(source),
        store=store,
        recipe=BuildRecipe(candidates=(CPU_INT8,), **recipe),
        budget=BuildBudget(tune_seconds=0),
    )


def test_family_registered_in_the_table_builds_an_artifact_that_runs(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress
) -> None:
    directory = build(request_toy(embedding_source, tmp_path), progress).directory
    manifest = ArtifactManifest.read(directory)
    assert [candidate.name for candidate in manifest.candidates] == [CPU_FP32.name]
    assert set(manifest.files) == {"graphs/toy.onnx", "toy.txt", TOKENIZER_NAME}
    spec = GraphSpec.of(directory, manifest, manifest.candidates[0])
    engine = open_engine(spec, EncoderSettings())
    try:
        (vector,) = engine.run(collate([item(3, 4)])).items
    finally:
        engine.close()
    assert vector.any()


def test_family_without_an_accepted_graph_fails_with_its_hint(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress
) -> None:
    with pytest.raises(GateFailed, match="int8: rounded") as caught:
        build(request_toy(embedding_source, tmp_path, fallback=CPU_INT8), progress)
    assert caught.value.hint == ToyBuild.gate_failed_hint
