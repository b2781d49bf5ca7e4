"""Session fixtures: a tiny pruned model, its build, and one run of `report` on it."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import BuildRecipe
from build_artifacts.report.output import report_path
from build_artifacts.report.values import Report
from deployments.artifacts.types import Device
from deployments.tuning.host import read_host
from tests.support.prepared_build import LITTLE
from tests.support.pruned_checkpoints import layer, zero_columns, zero_rows
from tests.support.tiny_encoders import HIDDEN, tiny_checkpoint

ROOT = Path(__file__).parents[4]
OPTIONS = ("--runs", "5", "--seconds", "3", "--eval-limit", "6")


@dataclass(frozen=True, slots=True)
class ReportRun:
    """A build, its labeled data, and the output of its first report."""

    build: BuildResult
    data: Path
    output: str

    @property
    def store(self) -> Path:
        return self.build.directory.parents[1]

    @property
    def path(self) -> Path:
        return report_path(self.build.directory, read_host(Device.CPU))

    @property
    def report(self) -> Report:
        return Report.model_validate_json(self.path.read_bytes())

    def command(self) -> list[str]:
        where = ["--store", str(self.store), "--eval", str(self.data)]
        return ["report", self.build.manifest.id, *where, *OPTIONS]


@pytest.fixture(scope="session")
def pruned_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model with one head and 16 feed-forward channels set to zero."""
    from transformers import AutoModel

    source = tiny_checkpoint(tmp_path_factory.mktemp("source") / "pruned", layers=1)
    model = AutoModel.from_pretrained(source)
    zero_columns(layer(model, 0).attention_output, range(HIDDEN // 2))
    zero_rows(layer(model, 0).ffn_up, range(16))
    model.save_pretrained(source)
    return source


@pytest.fixture(scope="session")
def pruned_build(tmp_path_factory: pytest.TempPathFactory, pruned_source: Path) -> BuildResult:
    """A build that tests share. Tests that modify it copy its store first."""
    request = BuildRequest(
        ref=str(pruned_source),
        store=tmp_path_factory.mktemp("store"),
        recipe=BuildRecipe(candidates=(CPU_INT8,)),
        budget=LITTLE,
    )
    return build(request, BuildProgress(io.StringIO()))


@pytest.fixture(scope="session")
def report_run(tmp_path_factory: pytest.TempPathFactory, pruned_build: BuildResult) -> ReportRun:
    data = tmp_path_factory.mktemp("data") / "pairs.tsv"
    lines = ["sentence1\tsentence2\tscore"]
    texts = ("a good film", "a bad film", "the river", "the city in the night", "awful food", "you")
    lines += [f"{text}\tthe lovely train\t{i}" for i, text in enumerate(texts)]
    data.write_text("\n".join(lines), encoding="utf-8")
    report_run = ReportRun(pruned_build, data, "")
    # Run a separate process, so that the captured stdout includes the output of libraries.
    command = [sys.executable, "-m", "build_artifacts", *report_run.command()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return ReportRun(pruned_build, data, done.stdout)
