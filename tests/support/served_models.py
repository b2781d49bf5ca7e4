"""The models of the tested cluster: demo models, tiny models and a damaged model."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from build_artifacts.console import BuildProgress
from build_artifacts.pipeline import BuildRequest, build
from deployments.artifacts.store import LATEST_NAME, model_directory
from deployments.artifacts.types import Device, TaskName
from deployments.config import default_store
from deployments.tasks import find_head
from tests.support.builders import tiny_checkpoint
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.support.parity_models import RECIPES, UNTUNED
from tests.support.ray_cluster import REPOSITORY

EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
CLASSIFIER = "hundredfold/minilm-sst2"
QA_MODEL = "hundredfold/minilm-squad"
DEMO = (EMBEDDER, CLASSIFIER, QA_MODEL)
NER_MODEL = "tiny/tagger"
MASK_FILLER = "tiny/mask-filler"
NLI_MODEL = "tiny/judge"
RANKER = "tiny/ranker"
WRITER = "tiny/writer"  # generates noise without end
FIXED_TEXT_MODEL = "tiny/speaker"  # always generates SAYS
SAYS = "Hi you!"
# Context of the writer, about ten seconds of its noise.
LONG_CONTEXT = 24_000
DAMAGED = "hundredfold/damaged"


@dataclass(frozen=True)
class TinyModel:
    """A random model for a task without a demo model."""

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
SOUND = (*ENCODER_MODELS, WRITER, FIXED_TEXT_MODEL)


def fill(store: Path) -> None:
    """Put every model into `store`; build missing ones once per machine."""
    subprocess.run([sys.executable, "-m", "build_artifacts", "demo"], cwd=REPOSITORY, check=True)
    machine = default_store().with_name("test-store")
    for model_id, tiny in TINY.items():
        build_tiny(machine, model_id, tiny)
    for model_id in ENCODER_MODELS:
        built = machine if model_id in TINY else default_store()
        source, target = model_directory(built, model_id), model_directory(store, model_id)
        shutil.copytree(source, target, copy_function=link_or_copy)
    both = (Device.CPU, Device.GPU)
    seal_tiny_decoder(store, WRITER, max_tokens=LONG_CONTEXT, devices=both)
    seal_tiny_decoder(store, FIXED_TEXT_MODEL, says=SAYS, devices=both)
    damage_a_copy(model_directory(store, CLASSIFIER), model_directory(store, DAMAGED))


def build_tiny(store: Path, model_id: str, tiny: TinyModel) -> None:
    """Build the model unless it exists; its files are equal in every run."""
    with TemporaryDirectory() as directory:
        checkpoint = tiny_checkpoint(Path(directory), head=find_head(tiny.task), labels=tiny.labels)
        request = BuildRequest(
            ref=str(checkpoint),
            store=store,
            id=model_id,
            task=tiny.task,
            recipe=RECIPES["fp32"],
            budget=UNTUNED,
        )
        build(request, BuildProgress(io.StringIO()))


def link_or_copy(source: str, target: str) -> None:
    """Create a hard link if the file system supports it; artifacts are read-only."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def damage_a_copy(source: Path, target: Path) -> None:
    """Copy a model and change one byte of its tokenizer."""
    shutil.copytree(source, target)
    version = (target / LATEST_NAME).read_text().strip()
    tokenizer = target / version / "tokenizer.json"
    content = bytearray(tokenizer.read_bytes())
    content[-3] ^= 1
    tokenizer.write_bytes(content)
