"""`python -m build_artifacts`: options, output and exit status."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from build_artifacts import pipeline
from build_artifacts.__main__ import COMMANDS, main
from build_artifacts.demo import ALL_DEMO_MODELS, DEMO_MODELS, DemoModel, build_demo_model
from build_artifacts.evaluation import ExampleSampling
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, BuildResult
from build_artifacts.presets import FULL, QUICK, SEARCH_PRESETS
from build_artifacts.progress import BuildProgress
from deployments.artifacts.manifest import MANIFEST_NAME, Gate
from deployments.artifacts.store import LATEST_NAME, model_directory, resolve_version, set_latest
from deployments.artifacts.types import Device, TaskName
from deployments.config import EncoderSettings
from deployments.tuning.costs import TuningTarget, read_costs
from hundredfold.__main__ import main as hundredfold
from tests.integration.compiler.conftest import BOTH_DEVICES
from tests.support.artifacts import GRAPH_NAME, seal_tiny
from tests.support.fakes import FakeTerminal
from tests.support.pruned_checkpoints import PRUNED, pruned_encoder
from tests.support.tiny_encoders import tiny_tokenizer

HEAVY = (
    *("torch", "transformers", "peft", "safetensors", "huggingface_hub", "matplotlib", "tqdm"),
    *("onnx", "onnx_ir", "onnxscript", "onnxruntime", "openvino", "nncf"),
)


def seal_demo(store: Path, models: Iterable[DemoModel] = DEMO_MODELS) -> None:
    """Seal fake demo models with their real ids and versions."""
    for model in models:
        version = model.version(store)
        directory = seal_tiny(store, model.id)
        directory = directory.rename(directory.with_name(version))
        manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
        (directory / MANIFEST_NAME).write_text(json.dumps(manifest | {"version": version}))
        set_latest(store, model.id, version)


@pytest.fixture
def store(tmp_path: Path, embedding_build: BuildResult) -> Path:
    """A copy of the store of a built model."""
    copied = tmp_path / "store"
    shutil.copytree(embedding_build.directory.parents[1], copied)
    return copied


def test_build_error_prints_error_and_hint_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["build", str(empty), "--store", str(tmp_path / "store")]) == 1
    captured = capsys.readouterr()
    error, blank, hint = captured.err.splitlines()
    assert error.startswith("error: no `config.json` in ")
    assert blank == ""
    assert hint.startswith("hint: ")
    assert captured.out == ""


def test_empty_source_is_not_the_working_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "", "--store", str(tmp_path / "store")]) == 1
    assert "error: SOURCE is empty\n" in capsys.readouterr().err


def test_store_that_is_a_file_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["build", str(tmp_path), "--store", str(tmp_path / "file")]) == 1
    assert "error: cannot write to the store" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("build", ["--task", "poetry"], "'poetry' (choose from 'feature-extraction', "),
        ("build", ["--search", "endless"], "invalid choice: 'endless'"),
        ("build", ["--gate", "beauty=1"], "the gate has no limit `beauty`"),
        ("build", ["--gate", "cosine_mean"], "`cosine_mean`: the limit must be a finite number"),
        (
            "build",
            ["--gate", "cosine_mean=nan"],
            "`cosine_mean=nan`: the limit must be a finite number",
        ),
        (
            "build",
            ["--gate", "metric_drop=inf"],
            "`metric_drop=inf`: the limit must be a finite number",
        ),
        ("build", ["--gate", "cosine_mean=7"], "`cosine_mean=7`: the limit must be -1 to 1"),
        ("build", ["--gate", "near_tie_margin=-1"], "the limit must be 0 to 1"),
        ("build", ["--gate", "metric_drop=-101"], "the limit must be at least -100"),
        ("build", ["--tune-seconds", "-1"], "`-1` is not a number of seconds"),
        ("build", ["--tune-seconds", "nan"], "`nan` is not a number of seconds"),
        ("build", ["--eval-limit", "0"], "`0` is not a positive integer"),
        ("tune", ["--threads", "two"], "`two` is not a positive integer"),
        ("tune", ["--device", "abacus"], "invalid Device value: 'abacus'"),
    ],
    ids=str,
)
def test_invalid_option_value_exits_with_usage_error(
    command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "source", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["build", "report"])
def test_limit_of_examples_without_data_is_refused(
    command: str, embedding_source: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = str(embedding_source) if command == "build" else "tiny/embedder"
    store = ["--store", str(tiny_store)]
    assert main([command, named, *store, "--eval-limit", "9"]) == 1
    assert "`--eval-limit` has no effect without `--eval`" in capsys.readouterr().err


def test_limit_of_another_kind_of_models_is_refused(
    embedding_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--store", str(tmp_path), "--gate", "perplexity_increase=0.2"]
    assert main(["build", str(embedding_source), *options]) == 1
    shown = capsys.readouterr().err
    assert "`--gate perplexity_increase` is supported for models that generate text only" in shown
    assert "cosine_mean" in shown.splitlines()[-1]


@pytest.mark.parametrize("arguments", [[], ["build"], ["paint", "it"], ["verify"], ["compact"]])
def test_incomplete_command_exits_with_usage_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def parse_build_request(
    monkeypatch: pytest.MonkeyPatch, built: BuildResult, *arguments: str
) -> BuildRequest:
    """Return the build request that `build` creates from these arguments."""
    requests: list[BuildRequest] = []

    def record_request(request: BuildRequest, progress: BuildProgress) -> BuildResult:
        requests.append(request)
        return built

    monkeypatch.setattr(pipeline, "build", record_request)
    assert main(["build", "here", *arguments]) == 0
    return requests[0]


def test_build_passes_options_to_pipeline(
    monkeypatch: pytest.MonkeyPatch, embedding_build: BuildResult
) -> None:
    defaults = parse_build_request(monkeypatch, embedding_build)
    assert (defaults.ref, defaults.recipe, defaults.force) == ("here", FULL, False)
    assert defaults.budget == BuildBudget(tune_seconds=60.0)
    assert (defaults.id, defaults.task, defaults.adapter) == (None, None, None)
    full = parse_build_request(
        monkeypatch,
        embedding_build,
        *("--id", "a/b", "--task", "text-ranking", "--adapter", "lora", "--force"),
        *("--search", "quick", "--tune-seconds", "1.5", "--eval", "data.tsv", "--eval-limit", "9"),
        *("--gate", "cosine_mean=0.9", "--gate", "metric_drop=1", "--store", "elsewhere"),
    )
    assert full.recipe == replace(QUICK, gate=Gate(cosine_mean=0.9, metric_drop=1))
    assert full.budget == BuildBudget(
        tune_seconds=1.5, evaluation=Path("data.tsv"), sampling=ExampleSampling(limit=9)
    )
    assert (full.id, full.task, full.force) == ("a/b", TaskName.TEXT_RANKING, True)
    assert (full.adapter, full.store) == (Path("lora"), Path("elsewhere"))


@pytest.mark.parametrize(
    "arguments",
    [["--tensor-parallel-size", "2"], ["--offload-kv-cache"], ["--attention", "eager"]],
    ids=str,
)
def test_build_of_an_encoder_rejects_gpu_options_of_generative_models(
    embedding_source: Path,
    tmp_path: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = ["--store", str(tmp_path / "store")]
    assert main(["build", str(embedding_source), *store, *arguments]) == 1
    error, hint = capsys.readouterr().err.splitlines()[-3::2]
    message = f"`{arguments[0]}` is only supported for models that generate text"
    assert error == f"error: {message}"
    assert hint == f"hint: omit `{arguments[0]}`"


def test_every_command_has_store_option() -> None:
    for command, spec in COMMANDS.items():
        parser = argparse.ArgumentParser()
        spec.load().add_arguments(parser)
        assert "--store" in parser.format_help(), command


def test_build_reports_existing_version(
    store: Path,
    embedding_build: BuildResult,
    embedding_source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SEARCH_PRESETS, "quick", BOTH_DEVICES)
    arguments = ["build", str(embedding_source), "--search", "quick", "--store", str(store)]
    assert main(arguments) == 0
    version = embedding_build.manifest.version
    assert f"local/embedder {version} was built already" in capsys.readouterr().out


def test_ls_lists_versions_candidates_and_damage(
    store: Path, embedding_build: BuildResult, capsys: pytest.CaptureFixture[str]
) -> None:
    built, manifest = embedding_build.directory, embedding_build.manifest
    corrupted = seal_tiny(store, "tiny/broken")
    (corrupted / GRAPH_NAME).write_bytes(b"not the graph")
    assert hundredfold(["models", "ls", "--store", str(store)]) == 0
    head, first, *others, damaged = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODEL", "VERSION", "TASKS", "CANDIDATE", "MB", "PARITY", "SOURCE"]
    assert first.startswith(f"local/embedder  {built.name} *  feature-extraction, sentence-")
    assert manifest.candidates[0].name in first
    assert manifest.source.ref in first
    assert [line.split()[0] for line in others] == [c.name for c in manifest.candidates[1:]]
    parity = manifest.candidates[-1].parity
    assert f"cosine {parity.cosine_mean:.4f} mean {parity.cosine_worst:.4f} worst" in others[-1]
    assert damaged.startswith(f"tiny/broken     {corrupted.name} *  damaged (digest_mismatch)")


@pytest.mark.parametrize(("option", "models"), [("", DEMO_MODELS), ("--all", ALL_DEMO_MODELS)])
def test_demo_that_is_built_imports_no_build_packages(
    tmp_path: Path, option: str, models: Sequence[DemoModel]
) -> None:
    seal_demo(tmp_path, models)
    arguments = ["demo", "--store", str(tmp_path), *option.split()]
    code = (
        "import sys; from build_artifacts.__main__ import COMMANDS, main; "
        f"status = main({arguments!r}); "
        f"print(status, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    ids = [line.split()[0] for line in done.stdout.splitlines()[:-1]]
    assert ids == [model.id for model in models]


def test_missing_build_package_is_named_with_hint(tmp_path: Path, embedding_source: Path) -> None:
    code = (
        "import sys; sys.modules['safetensors'] = None; "
        "from build_artifacts.__main__ import COMMANDS, main; "
        f"sys.exit(main(['build', {str(embedding_source)!r}, '--store', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: `safetensors` is not installed\n\nhint: run `pip install" in done.stderr


def test_demo_keeps_existing_default_version(tmp_path: Path) -> None:
    seal_demo(tmp_path)
    model = DEMO_MODELS[0]
    own = seal_tiny(tmp_path, model.id)
    progress = BuildProgress(io.StringIO())
    assert build_demo_model(model, tmp_path, progress).already_built
    assert resolve_version(tmp_path, model.id, LATEST_NAME) == own.name

    (model_directory(tmp_path, model.id) / LATEST_NAME).unlink()
    assert build_demo_model(model, tmp_path, progress).already_built
    assert resolve_version(tmp_path, model.id, LATEST_NAME) == model.version(tmp_path)


def test_tune_updates_costs_and_prints_selection(
    store: Path, embedding_build: BuildResult, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = embedding_build.manifest
    directory = store / "local--embedder" / manifest.version
    encoder = EncoderSettings(intra_op_threads=1)
    placement = TuningTarget(directory, manifest, Device.CPU, encoder)
    before = placement.costs_path.read_bytes()
    arguments = ["--threads", "1", "--tune-seconds", "0.2", "--store", str(store)]
    assert main(["tune", "local/embedder", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert placement.costs_path.read_bytes() != before
    table = read_costs(placement)
    assert table is not None
    assert "1 thread a pass" in lines[0]
    for variant in table.selected_variants():
        assert variant.name in lines[1].split()
    assert all("*" in line for line in lines[2:]), "every shape has a selected variant"
    assert [line.split()[0] for line in lines[2:]] == [str(shape) for shape, _ in table.selection]


def test_tune_requires_built_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "no/model", "--store", str(tmp_path)]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith("error: `no/model` is not built")
    assert "\n\nhint: " in captured


def test_compact_describes_removals_and_stores_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "pruned"
    pruned_encoder("bert").save_pretrained(source)
    tiny_tokenizer(source)
    assert main(["compact", str(source), "--store", str(tmp_path / "store")]) == 0
    output, _, *layers = capsys.readouterr().out.splitlines()
    assert output.startswith("removed 3 of 8 heads and 37 of 128 feed-forward channels: ")
    expected = [[i, len(heads), len(rows)] for i, (heads, rows) in enumerate(PRUNED)]
    assert [[int(cell) for cell in line.split()] for line in layers] == expected
    assert main(["compact", str(source), "--store", str(tmp_path / "store"), "--json"]) == 0
    reductions = json.loads(capsys.readouterr().out)["reductions"]
    assert [len(reduction["heads"]) for reduction in reductions] == [row[1] for row in expected]
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".building"]


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of builds take no time, however busy the host is."""
    monkeypatch.setattr("build_artifacts.progress.time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.usefixtures("stopped_clock")
def test_progress_prints_a_line_per_step() -> None:
    output = io.StringIO()
    progress = BuildProgress(output)
    progress.begin()
    with progress.step("export", "cpu-int8") as step:
        step.set_outcome("23.1 MB")
    with pytest.raises(ZeroDivisionError), progress.step("gate", "cpu-int8"):
        1 / 0  # noqa: B018
    progress.end()
    lines = output.getvalue().splitlines()
    assert lines[0] == "  export      0.0 s  cpu-int8: 23.1 MB"
    assert lines[1] == "  gate        0.0 s  cpu-int8: failed"


@pytest.mark.usefixtures("stopped_clock")
def test_progress_shows_current_step_on_terminal() -> None:
    screen = FakeTerminal()
    progress = BuildProgress(screen)
    progress.begin()
    with progress.step("export", "cpu-int8"):
        assert "export cpu-int8" in screen.getvalue()
        assert re.search(r"step 0, 0:00:\d\d", screen.getvalue())
    progress.end()
    assert "  export      0.0 s  cpu-int8\n" in screen.getvalue()
