"""A pruned model from checkpoint to server: smaller, with equal outputs."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from build_artifacts.encoders.candidates import CandidateGraphs
from build_artifacts.encoders.preparation import PreparedModel
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CPU_FP32, BuildRecipe
from tests.support.in_process import InProcess
from tests.support.prepared_build import PreparedBuild, RecordingRunner
from tests.support.pruned_checkpoints import pruned_encoder
from tests.support.tiny_encoders import tiny_tokenizer, write_pooling

TEXTS = ("good", "the lovely river and the city at night", "it was a bad film " * 4)
# Absolute tolerances for embeddings whose largest value is above 0.6. In fp32, only the summation
# order differs from torch. int8 rounds in each of the two layers.
FP32_TOLERANCE = 1e-5
INT8_TOLERANCE = 0.03
EXACT = BuildRecipe(candidates=(CPU_FP32,))
INT8 = BuildRecipe(candidates=(CPU_INT8,))


@dataclass(frozen=True)
class Pruned:
    """A pruned checkpoint, its build, and the torch embeddings of TEXTS."""

    source: Path
    recipe: BuildRecipe
    built: BuildResult
    output: str
    due: NDArray[np.float32]  # [texts, width]

    @property
    def store(self) -> Path:
        return self.built.directory.parents[1]


def pruned_source(directory: Path, model_type: str) -> Path:
    pruned_encoder(model_type).save_pretrained(directory)
    tiny_tokenizer(directory)
    write_pooling(directory, normalize=False)
    return directory


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def pruned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    root = tmp_path_factory.mktemp(request.param)
    source = pruned_source(root / str(request.param), request.param)
    output = io.StringIO()
    recipe = EXACT if request.param == "bert" else INT8
    built = build(
        BuildRequest(
            ref=str(source),
            store=root / "store",
            recipe=recipe,
            budget=BuildBudget(tune_seconds=0.2),
        ),
        BuildProgress(output),
    )
    return Pruned(source, recipe, built, output.getvalue(), torch_embeddings(source))


def torch_embeddings(source: Path) -> NDArray[np.float32]:
    """Return the mean token vectors of TEXTS from the checkpoint before compaction."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(source).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    with torch.inference_mode():
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS]
        return np.stack([model(input_ids=i)[0][0].mean(0).numpy() for i in ids])


def test_build_and_manifest_describe_pruning(pruned: Pruned) -> None:
    went = pruned.built.manifest.pruned
    assert went is not None
    assert went.startswith("removed 3 of 8 heads and 37 of 128 feed-forward channels: ")
    (line,) = (line for line in pruned.output.splitlines() if line.split()[0] == "compact")
    assert line.endswith(f"weights that pruning set to zero: {went}")


async def test_server_matches_unpruned_torch(pruned: Pruned) -> None:
    manifest = pruned.built.manifest
    async with InProcess(pruned.store, models=(manifest.id,)).client() as http:
        replies = [
            await http.post(f"/models/{manifest.id}", json={"inputs": texts})
            for texts in (list(TEXTS), TEXTS[0])
        ]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert np.abs(pruned.due).max() > 0.6
    exact = manifest.candidates[0].precision == "fp32"
    tolerance = FP32_TOLERANCE if exact else INT8_TOLERANCE
    together, alone = (np.array(reply.json(), dtype=np.float32) for reply in replies)
    np.testing.assert_allclose(together, pruned.due, atol=tolerance)
    np.testing.assert_allclose(alone, pruned.due[:1], atol=tolerance)
    kinds = {reply.headers["x-compute-type"] for reply in replies}
    assert kinds == {"cpu-fp32" if exact else "cpu-int8"}


def test_graph_size_excludes_removed_weights(pruned: Pruned, tmp_path: Path) -> None:
    candidate = pruned.built.manifest.candidates[0]
    recipe = pruned.recipe.candidates[0]
    shop = PreparedBuild.of(pruned.source, tmp_path / "work")
    plan = shop.prepared.compaction
    gone = plan.parameters_before - plan.parameters_after
    assert gone > 5_000
    whole = CandidateGraphs(
        RecordingRunner(tmp_path / "whole").steps, without_compaction(shop.prepared)
    )
    saved = whole.graph(recipe).stat().st_size - pruned.built.manifest.files[candidate.graph].size
    # The size of names and shapes differs by a few bytes.
    assert saved > 0.9 * gone * (4 if candidate.precision == "fp32" else 1)


def without_compaction(prepared: PreparedModel) -> PreparedModel:
    """Return the prepared model with a compaction plan that removes nothing."""
    reference_dir = prepared.reference_dir.with_name("whole")
    shutil.copytree(prepared.reference_dir, reference_dir)
    plan = prepared.compaction.model_copy(update={"reductions": ()})
    (reference_dir / "compaction.json").write_text(plan.model_dump_json(), encoding="utf-8")
    return replace(prepared, reference_dir=reference_dir)
