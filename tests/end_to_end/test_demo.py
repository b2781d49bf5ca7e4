"""The demo models that were built for the tested cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build_artifacts.demo import DEMO_MODELS
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact
from tests.support.served_models import BUILT_STORE, CLASSIFIER


def test_demo_finds_every_built_model(store: Path) -> None:
    command = [sys.executable, "-m", "build_artifacts", "demo", "--store", str(BUILT_STORE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    starts = [f"{each.id} {each.version(BUILT_STORE)} was built already: " for each in DEMO_MODELS]
    lines = done.stdout.splitlines()
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_demo_classifier_is_accurate(store: Path) -> None:
    manifest = ArtifactManifest.read(find_artifact(store, CLASSIFIER))
    assert manifest.labels == ("NEGATIVE", "POSITIVE")
    assert manifest.scores["accuracy"] > 0.88
    for candidate in manifest.candidates:
        assert candidate.parity.top1_agreement is not None
        assert candidate.parity.top1_agreement >= manifest.gate.top1_agreement
