"""Models of the tested cluster: demo models, tiny models and a damaged model."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from build_artifacts import demo
from build_artifacts.demo import ALL_DEMO_MODELS, MORE_DEMO_MODELS, build_demo_model
from build_artifacts.encoders import screening
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest
from deployments.artifacts.store import LATEST_NAME, model_directory
from deployments.artifacts.types import Device, TaskName
from deployments.tasks import find_head
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.support.kept_stores import name_store, use_store
from tests.support.parity_models import RECIPES, UNTUNED
from tests.support.tiny_encoders import tiny_checkpoint

EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
CLASSIFIER = "hundredfold/minilm-sst2"
QA_MODEL = "hundredfold/minilm-squad"
DEMO = (EMBEDDER, CLASSIFIER, QA_MODEL)
RAMPART = "nationaldesignstudio/rampart"
NUMBER_WORDS = "hundredfold/number-words"
MINILM_RERANK = "hundredfold/minilm-rerank"
MINILM_NLI = "hundredfold/minilm-nli"
REAL = tuple(model.id for model in MORE_DEMO_MODELS)
NER_MODEL = "tiny/tagger"
MASK_FILLER = "tiny/mask-filler"
NLI_MODEL = "tiny/nli"
RANKER = "tiny/ranker"
WRITER = "tiny/writer"  # generates noise without end
FIXED_TEXT_MODEL = "tiny/speaker"  # always generates SAYS
SAYS = "Hi you!"
FIXED_PROMPT = "\n"  # a prompt that FIXED_TEXT_MODEL continues with SAYS
# Context of WRITER in tokens. Its noise fills this context in about ten seconds.
LONG_CONTEXT = 24_000
DAMAGED = "hundredfold/damaged"


@dataclass(frozen=True)
class TinyModel:
    """A random model for a task that no model of DEMO has."""

    task: TaskName
    labels: tuple[str, ...] = ()


TINY: Mapping[str, TinyModel] = {
    NER_MODEL: TinyModel(TaskName.TOKEN_CLASSIFICATION, ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
    MASK_FILLER: TinyModel(TaskName.FILL_MASK),
    NLI_MODEL: TinyModel(
        TaskName.ZERO_SHOT_CLASSIFICATION, ("contradiction", "neutral", "entailment")
    ),
    RANKER: TinyModel(TaskName.TEXT_RANKING, ("relevant",)),
}
ENCODER_MODELS = (*DEMO, *TINY)
# The first generative model in this list is the default model of the generation routes.
SOUND = (*ENCODER_MODELS, WRITER, FIXED_TEXT_MODEL, *REAL)


# This store is kept between runs, because builds take minutes. The same compiler and recipes give
# the same models. `make test` fills it while other tests run.
BUILT_STORE = name_store()


def fill(store: Path) -> None:
    """Put every model into `store`."""
    build_missing()
    for model_id in (*ENCODER_MODELS, *REAL):
        source, target = model_directory(BUILT_STORE, model_id), model_directory(store, model_id)
        shutil.copytree(source, target, copy_function=link_or_copy)
    both = (Device.CPU, Device.GPU)
    seal_tiny_decoder(store, WRITER, max_tokens=LONG_CONTEXT, devices=both)
    seal_tiny_decoder(store, FIXED_TEXT_MODEL, says=SAYS, devices=both)
    damage_a_copy(model_directory(store, CLASSIFIER), model_directory(store, DAMAGED))


def build_missing() -> None:
    """Build the models that BUILT_STORE lacks, two at a time, because most steps use one core."""
    use_store(BUILT_STORE)
    with ProcessPoolExecutor(2, get_context("spawn"), initializer=use_one_thread) as pool:
        builds = [pool.submit(build_demo, i) for i in reversed(range(len(ALL_DEMO_MODELS)))]
        builds += [pool.submit(build_tiny, model_id) for model_id in TINY]
        for running in builds:
            running.result()


def use_one_thread() -> None:
    """Limit torch to one thread, because the threads of two builds would wait for each other."""
    os.environ["OMP_NUM_THREADS"] = "1"


def build_demo(index: int) -> None:
    """Build one demo model as `hundredfold demo` does, but tune less: no test needs speed.

    Models of MORE_DEMO_MODELS have one graph, because no test runs them on a GPU.
    """
    model = ALL_DEMO_MODELS[index]
    one_graph = replace(demo.QUICK, candidates=(CPU_INT8,))
    with (
        patch.object(demo, "_TUNE_SECONDS", 1.0),
        patch.object(demo, "QUICK", one_graph if model in MORE_DEMO_MODELS else demo.QUICK),
        patch.object(screening, "_SECONDS", 1.0),
        BuildProgress.on_stderr() as progress,
    ):
        build_demo_model(model, BUILT_STORE, progress)


def build_tiny(model_id: str) -> None:
    """Build a tiny model. Its files are equal in every run."""
    tiny = TINY[model_id]
    with TemporaryDirectory() as directory:
        checkpoint = tiny_checkpoint(Path(directory), head=find_head(tiny.task), labels=tiny.labels)
        request = BuildRequest(
            ref=str(checkpoint),
            store=BUILT_STORE,
            id=model_id,
            task=tiny.task,
            recipe=RECIPES["fp32"],
            budget=UNTUNED,
        )
        build(request, BuildProgress(io.StringIO()))


def link_or_copy(source: str, target: str) -> None:
    """Create a hard link, or else a copy. Hard links are safe, because artifacts never change."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def damage_a_copy(source: Path, target: Path) -> None:
    """Copy a model under the id of `target`, and change one byte of its tokenizer."""
    shutil.copytree(source, target)
    directory = target / (target / LATEST_NAME).read_text().strip()
    manifest = ArtifactManifest.parse(directory)
    renamed = manifest.model_copy(update={"id": target.name.replace("--", "/")})
    (directory / MANIFEST_NAME).write_bytes(renamed.to_json())
    tokenizer = directory / "tokenizer.json"
    content = bytearray(tokenizer.read_bytes())
    content[-3] ^= 1
    tokenizer.write_bytes(content)


if __name__ == "__main__":
    build_missing()
