from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_artifacts.__main__ import main
from build_artifacts.demo import DEMO_MODELS, build_demo_model
from build_artifacts.pipeline import BuildResult
from build_artifacts.progress import Progress
from deployments.manifest import MANIFEST_NAME
from deployments.store import LATEST_NAME, model_directory, point_latest, resolve_version
from tests.sealed import GRAPH_NAME, seal_tiny

HEAVY = ("torch", "transformers", "peft", "onnx", "onnxruntime", "huggingface_hub", "tqdm")


def seal_demo(store: Path) -> None:
    """Stand-ins for the demo models under their real ids and versions."""
    for model in DEMO_MODELS:
        directory = seal_tiny(store, model.id)
        directory = directory.rename(directory.with_name(model.version))
        manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
        (directory / MANIFEST_NAME).write_text(json.dumps(manifest | {"version": model.version}))
        point_latest(store, model.id, model.version)


def test_a_foreseen_failure_is_two_lines_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["build", str(empty), "--store", str(tmp_path / "store")]) == 1
    said = capsys.readouterr()
    error, blank, hint = said.err.splitlines()
    assert error.startswith("error: no `config.json` in ")
    assert blank == ""
    assert hint.startswith("hint: ")
    assert said.out == ""


def test_a_store_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["build", str(tmp_path), "--store", str(tmp_path / "file")]) == 1
    assert "error: cannot write to the store" in capsys.readouterr().err


def test_an_unknown_task_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["build", str(tmp_path), "--task", "poetry", "--store", str(tmp_path)])
    assert caught.value.code == 2


def test_build_finds_what_is_there(
    embedding_build: BuildResult, embedding_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = embedding_build.directory.parents[1]
    assert main(["build", str(embedding_source), "--store", str(store)]) == 0
    version = embedding_build.manifest.version
    assert f"local/embedder {version} was built already" in capsys.readouterr().out


def test_show_lists_versions_candidates_and_damage(
    tmp_path: Path, embedding_build: BuildResult, capsys: pytest.CaptureFixture[str]
) -> None:
    built = embedding_build.directory
    shutil.copytree(built.parents[0], tmp_path / built.parent.name)
    spoilt = seal_tiny(tmp_path, "tiny/spoilt")
    (spoilt / GRAPH_NAME).write_bytes(b"not the graph")
    assert main(["show", "--store", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "MODEL",
        "VERSION",
        "TASKS",
        "CANDIDATE",
        "MB",
        "PARITY",
        "SOURCE",
    ]
    int8, fp16, damaged = lines[1:]
    assert int8.startswith(f"local/embedder  {built.name} *  feature-extraction, sentence-")
    assert "cpu-int8" in int8
    assert embedding_build.manifest.source.ref in int8
    assert fp16.split()[0] == "gpu-fp16"
    parity = embedding_build.manifest.candidates[1].parity
    assert f"cosine {parity.cosine_mean:.4f} mean {parity.cosine_worst:.4f} worst" in fp16
    assert damaged.startswith(f"tiny/spoilt     {spoilt.name} *  damaged (digest_mismatch)")


def test_show_of_nothing_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "--store", str(tmp_path / "none")]) == 0
    assert "python -m build_artifacts demo" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "show"])
def test_looking_into_the_store_loads_nothing_heavy(tmp_path: Path, command: str) -> None:
    seal_demo(tmp_path)
    code = (
        "import sys; from build_artifacts.__main__ import main; "
        f"status = main([{command!r}, '--store', {str(tmp_path)!r}]); "
        f"print(status, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert all(model.id in done.stdout for model in DEMO_MODELS)


def test_a_default_that_somebody_chose_survives_the_demo(tmp_path: Path) -> None:
    seal_demo(tmp_path)
    model = DEMO_MODELS[0]
    own = seal_tiny(tmp_path, model.id)
    progress = Progress(io.StringIO())
    assert build_demo_model(model, tmp_path, progress).was_there
    assert resolve_version(tmp_path, model.id, LATEST_NAME) == own.name

    (model_directory(tmp_path, model.id) / LATEST_NAME).unlink()
    assert build_demo_model(model, tmp_path, progress).was_there
    assert resolve_version(tmp_path, model.id, LATEST_NAME) == model.version


def test_steps_are_lines_with_seconds_also_when_they_fail() -> None:
    told = io.StringIO()
    progress = Progress(told)
    progress.begin(2)
    with progress.step("export", "cpu-int8") as step:
        step.found("23.1 MB")
    with pytest.raises(ZeroDivisionError), progress.step("verify", "cpu-int8"):
        1 / 0  # noqa: B018
    progress.end()
    lines = told.getvalue().splitlines()
    assert lines[0] == "  export      0.0 s  cpu-int8: 23.1 MB"
    assert lines[1] == "  verify      0.0 s  cpu-int8: failed"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_above_which_the_lines_stay() -> None:
    screen = Terminal()
    progress = Progress(screen)
    progress.begin(3)
    with progress.step("export", "cpu-int8"):
        pass
    progress.end()
    assert "0/3" in screen.getvalue()
    assert "  export      0.0 s  cpu-int8\n" in screen.getvalue()


@pytest.mark.slow
def test_the_demo_models_are_built_from_a_package_and_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" is built: ") == len(DEMO_MODELS)
    embedder, sentiment = (
        build_demo_model(model, tmp_path, Progress(io.StringIO())).manifest for model in DEMO_MODELS
    )
    assert (embedder.width, embedder.max_tokens, embedder.normalize) == (384, 256, True)
    assert sentiment.labels == ("NEGATIVE", "POSITIVE")
    for manifest in (embedder, sentiment):
        assert [c.name for c in manifest.candidates] == ["cpu-int8", "gpu-fp16"]
        assert manifest.files["graphs/cpu-int8.onnx"].size < 30e6
