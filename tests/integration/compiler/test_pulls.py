"""Builds from the build queue: recorded states, failures, waiting processes."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from build_artifacts import pulls
from build_artifacts.__main__ import main
from build_artifacts.commands import drain as drain_command
from build_artifacts.demo import DEMO_MODELS
from build_artifacts.errors import BuildError, SourceNotFound
from build_artifacts.pipeline import BuildRequest, BuildResult
from build_artifacts.pulls import build_first_demo_model, drain, pull
from build_artifacts.sources.hub import HubListing
from deployments.artifacts.locks import exclusive_lock
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact
from deployments.builds.queue import DRAIN_LOCK_NAME, MAX_CRASHES, BuildQueue
from deployments.builds.record import BuildState
from deployments.errors import EngineFailed, StoreNotWritable
from tests.support.tiny_encoders import tiny_checkpoint
from tests.support.waiting import wait_for

MODEL = "local/mortal"
BUILDER_S = 300  # maximum wait for a builder, which has the lowest priority, to start and to end


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sources") / "mortal", layers=1)


def broken_checkpoint(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{")
    return directory


def test_drain_builds_what_waits_and_records_failures(tmp_path: Path, source: Path) -> None:
    queue, output = BuildQueue(tmp_path / "store"), io.StringIO()
    queue.submit("acme/broken", str(broken_checkpoint(tmp_path / "broken")))
    queue.submit("acme/mortal", str(source))
    assert drain(queue, output) == 1
    failed, ready = queue.status("acme/broken"), queue.status("acme/mortal")
    assert failed is not None
    assert ready is not None
    assert (failed.state, ready.state) == (BuildState.FAILED, BuildState.READY)
    assert "`config.json` is corrupt" in failed.reason
    assert ready.version == ArtifactManifest.read(find_artifact(queue.store, "acme/mortal")).version
    (durations,) = queue.history()
    assert durations.size == sum(
        file.stat().st_size for file in source.rglob("*") if file.is_file()
    )
    assert {state.value for state in durations.seconds} == {"pulling", "building", "verifying"}


def test_builder_ends_if_it_cannot_write_the_record_of_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk. The server starts the next builder after a pause."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    queue = BuildQueue(tmp_path / "store")
    queue.submit("acme/mortal", "demo")
    monkeypatch.setattr("deployments.builds.queue.write_atomically", refuse)
    with pytest.raises(StoreNotWritable, match="No space left"):
        drain(queue, io.StringIO())
    (waiting,) = queue.pending()
    assert waiting.state is BuildState.QUEUED


class LocalHub:
    """Hub of one model, whose files are already in its cache."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        files = ("model.safetensors", "tokenizer.json")
        return HubListing("c0ffee" * 6, files)

    def download(self, model_id: str, commit: str, files: list[str]) -> Path:
        return self.cache


def test_log_of_the_builder_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    unreadable = tmp_path / "checkpoint" / "config.json"
    unreadable.mkdir(parents=True)
    queue, output = BuildQueue(tmp_path / "store"), io.StringIO()
    queue.submit("acme/tiny", str(unreadable.parent))
    assert drain(queue, output) == 1
    assert f"`{unreadable}` cannot be read: a directory, not a file. Hint: " in output.getvalue()


def test_checkpoint_of_the_hub_without_a_config_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    queue = BuildQueue(tmp_path / "store")
    queue.submit("acme/tiny", "acme/tiny")
    with pytest.raises(BuildError):
        pull(queue, "acme/tiny", io.StringIO(), LocalHub(cache))
    record = queue.read("acme/tiny")
    assert record is not None
    assert record.reason.startswith("no `config.json` in `acme/tiny`. Hint: ")


def test_pull_of_a_broken_checkpoint_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = str(broken_checkpoint(tmp_path / "broken"))
    assert main(["pull", broken, "--store", str(tmp_path / "store"), "--id", "acme/broken"]) == 1
    assert "`config.json` is corrupt" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x"])
def test_pull_under_a_name_outside_of_the_store_is_refused(
    tmp_path: Path, source: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", str(source), "--store", str(tmp_path / "store"), "--id", name]) == 1
    assert "is not a model id" in capfd.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "queued"),
    [
        ("smol.gguf", ("local/smol", "{}/smol.gguf")),
        ("bge.onnx", ("local/bge", "{}/bge.onnx")),
        ("checkpoint", ("local/checkpoint", "{}/checkpoint")),
        ("acme/smol/smol.gguf", ("acme/smol", "acme/smol/smol.gguf")),
        ("gpt2", ("gpt2", "gpt2")),
    ],
)
def test_pull_takes_each_source_of_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, queued: tuple[str, str]
) -> None:
    def fake_build(request: BuildRequest, *_: object, **__: object) -> BuildResult:
        assert (request.id, request.ref) == (queued[0], queued[1].format(tmp_path))
        raise SourceNotFound("no network", hint="none")

    monkeypatch.setattr(pulls, "build", fake_build)
    monkeypatch.chdir(tmp_path)
    for file in ("smol.gguf", "bge.onnx"):
        Path(file).touch()
    Path("checkpoint").mkdir()
    assert main(["pull", name, "--store", "store"]) == 1
    record = BuildQueue(tmp_path / "store").read(queued[0])
    assert record is not None
    assert record.reason.startswith("no network")


def test_pull_builds_for_the_requested_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = []

    def fake_build(request: BuildRequest, *_: object, **__: object) -> BuildResult:
        tasks.append(request.task)
        raise SourceNotFound("no network", hint="none")

    monkeypatch.setattr(pulls, "build", fake_build)
    pull_splade = ["pull", "acme/splade", "--store", str(tmp_path), "--task", "sparse-embeddings"]
    assert main(pull_splade) == 1
    assert tasks == ["sparse-embeddings"]
    BuildQueue(tmp_path).submit("acme/splade", "acme/splade")
    assert main(pull_splade) == 1
    assert "not of `acme/splade` for `sparse-embeddings`" in capsys.readouterr().err
    assert tasks == ["sparse-embeddings"]


def test_pull_waits_for_the_process_that_builds(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, str(source))
    stack = queue.claim(MODEL)
    claim = stack.__enter__()
    assert claim is not None
    looks: list[float] = []

    def finish_later(seconds: float) -> None:
        looks.append(seconds)
        claim.finish("0123456789ab")
        stack.__exit__(None, None, None)

    monkeypatch.setattr(pulls.time, "sleep", finish_later)
    assert main(["pull", str(source), "--store", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "0123456789ab"
    assert len(looks) == 1


def test_pull_does_not_follow_the_build_of_another_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, "acme/other")
    assert main(["pull", "acme/mine", "--id", MODEL, "--store", str(tmp_path)]) == 1
    assert "a build of `acme/other`, not of `acme/mine`" in capsys.readouterr().err
    assert [one.source for one in queue.pending()] == ["acme/other"]


def test_second_drain_leaves_the_queue_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("end_with_standard_input", "lower_process_priority"):  # they affect this process
        monkeypatch.setattr(drain_command, name, lambda *_: None)
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, "/nowhere")
    with exclusive_lock(queue.directory / DRAIN_LOCK_NAME, lambda _: None):
        assert drain(queue, io.StringIO()) is None
        assert main(["drain", "--store", str(tmp_path), "--for-server"]) == 3
        assert main(["drain", "--store", str(tmp_path)]) == 1
    assert "another process already runs the queued builds" in capsys.readouterr().err
    assert len(queue.pending()) == 1


def test_drain_fails_after_a_failed_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    queue = BuildQueue(tmp_path)
    queue.submit("acme/none", str(tmp_path / "none"))
    assert main(["drain", "--store", str(tmp_path)]) == 1
    assert "error: acme/none is not built: " in capfd.readouterr().err
    assert not queue.pending()


def test_only_errors_of_artifacts_point_to_the_list_of_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for command, is_hinted in (
        (["drain", "--store", str(tmp_path / "file" / "store")], False),
        (["report", "acme/none", "--store", str(tmp_path)], True),
    ):
        assert main(command) == 1
        assert ("hundredfold models ls" in capsys.readouterr().err) is is_hinted


def test_failure_that_nobody_foresaw_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> BuildResult:
        raise ZeroDivisionError

    monkeypatch.setattr(pulls, "build", fail)
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, "/nowhere")
    with pytest.raises(ZeroDivisionError):
        drain(queue, io.StringIO())
    status = queue.status(MODEL)
    assert status is not None
    assert status.reason.startswith("unexpected failure (ZeroDivisionError)")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/srv/x"), "cannot write its files"),
        (Exception("cannot save (os error 28)"), "cannot write its files"),
        (OSError(errno.EMFILE, "Too many open files", "/srv/x"), "a file: Too many open files"),
    ],
)
def test_failure_of_the_system_is_recorded_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: object, **__: object) -> BuildResult:
        raise error

    monkeypatch.setattr(pulls, "build", fail)
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, "/nowhere")
    with pytest.raises(type(error)):
        drain(queue, io.StringIO())
    status = queue.status(MODEL)
    assert status is not None
    assert reason in status.reason
    assert "/srv" not in status.reason


def test_named_error_of_the_server_ends_one_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> BuildResult:
        raise EngineFailed("no memory for the graph")

    monkeypatch.setattr(pulls, "build", fail)
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, "/nowhere")
    assert drain(queue, io.StringIO()) == 1
    status = queue.status(MODEL)
    assert status is not None
    assert status.reason == "no memory for the graph"


def test_builder_ends_with_the_process_that_started_it(tmp_path: Path, source: Path) -> None:
    queue = BuildQueue(tmp_path)
    queue.submit(MODEL, str(source))
    command = [sys.executable, "-m", "build_artifacts", "drain", "--for-server"]
    with subprocess.Popen([*command, "--store", str(tmp_path)], stdin=subprocess.PIPE) as process:
        wait_for(lambda: (record := queue.read(MODEL)) and record.attempts, timeout_s=BUILDER_S)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(BUILDER_S) == 1
    record = queue.read(MODEL)
    assert record is not None
    assert (record.state, record.crashes) == (BuildState.QUEUED, 0)


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_interrupted_pull_says_why_its_build_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_waited_for: bool,
) -> None:
    with ExitStack() as other_process:

        def interrupt(queue: BuildQueue, model_id: str, _stream: object) -> None:
            other_process.enter_context(queue.claim(model_id))
            raise KeyboardInterrupt

        monkeypatch.setattr(pulls, "pull_or_follow", interrupt)
        if is_waited_for:
            BuildQueue(tmp_path).submit("acme/mortal", "acme/mortal")
        assert main(["pull", "acme/mortal", "--store", str(tmp_path)]) == 130
    message = capsys.readouterr().err
    assert ("others may wait for it" in message) is is_waited_for
    assert ("continues: another process runs it" in message) is not is_waited_for


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_interrupted_pull_leaves_only_builds_of_others_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_waited_for: bool
) -> None:
    def interrupt(*_: object, **__: object) -> BuildResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(pulls, "build", interrupt)
    queue = BuildQueue(tmp_path)
    if is_waited_for:
        queue.submit("acme/mortal", "acme/mortal")
    for _ in range(MAX_CRASHES + 1):
        assert main(["pull", "acme/mortal", "--store", str(tmp_path)]) == 130
    assert [one.crashes for one in queue.pending()] == [0] * is_waited_for


def test_first_demo_model_is_built_and_the_others_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def fake_build(request: BuildRequest, *_: object, **__: object) -> BuildResult:
        built.append(str(request.id))
        assert request.budget.tune_seconds == 0
        raise SourceNotFound("no network", hint="none")

    monkeypatch.setattr(pulls, "build", fake_build)
    with pytest.raises(SourceNotFound):
        build_first_demo_model(tmp_path, io.StringIO(), with_gpu=False)
    assert built == [DEMO_MODELS[0].id]
    assert [record.id for record in BuildQueue(tmp_path).pending()] == [
        model.id for model in DEMO_MODELS[1:]
    ]


def test_unknown_demo_model_fails(tmp_path: Path) -> None:
    queue = BuildQueue(tmp_path)
    queue.submit("acme/other", "demo")
    with pytest.raises(SourceNotFound, match="is no demo model"):
        pull(queue, "acme/other", io.StringIO())
