"""Builds that are killed, interrupted, out of disk space, or concurrent.

A SIGKILL ends the build after every step. Each build resumes the previous one, so all of them
together take little longer than one build.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.models.listing import list_versions
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import BUILDING_NAME, LATEST_NAME, file_sha256
from deployments.builds.queue import BuildQueue
from deployments.builds.record import BuildState
from deployments.errors import ArtifactError
from tests.support.killable_builds import BuildExit, BuildForkServer
from tests.support.shared_exports import SharedExports
from tests.support.tiny_decoders import tiny_llama
from tests.support.tiny_encoders import tiny_checkpoint

# First steps of every build of these tests. A second `gate` follows if both candidates are
# similarly fast.
ALWAYS = ["resolve", "reference", "export", "rewrite", "quantize", "quantize", "screen", "gate"]
# The disk has room for the export, but not for the graphs derived from it.
SMALL_DISK = "500k"


def small_disk_command(directory: Path) -> list[str]:
    """Return a command prefix that mounts a small disk at `directory`."""
    script = f'mount -t tmpfs -o size={SMALL_DISK} none "{directory}" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The mount point of a small disk; None without the permission to mount."""
    directory = tmp_path_factory.mktemp("disk")
    tried = subprocess.run(
        [*small_disk_command(directory), "true"], capture_output=True, check=False
    )
    return None if tried.returncode else directory


@pytest.fixture(scope="module")
def fork_server(
    tmp_path_factory: pytest.TempPathFactory,
    small_disk: Path | None,
    shared_exports: SharedExports,
) -> Iterator[BuildForkServer]:
    prefix = small_disk_command(small_disk) if small_disk else []
    outputs = tmp_path_factory.mktemp("outputs")
    made = BuildForkServer(outputs, shared_exports.directory, *prefix)
    yield made
    made.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sources") / "mortal", layers=1)


def command(source: Path, store: Path, *more: str) -> list[str]:
    options = ["--search", "quick", "--tune-seconds", "0.2", "--store", str(store)]
    return ["build", str(source), *options, *more]


def versions(store: Path) -> list[ArtifactManifest | ArtifactError]:
    """Return the manifest of each listed version, or the error of an incomplete version."""
    return [entry.manifest for entry in list_versions(store)]


def graphs_of_steps(store: Path) -> set[str]:
    """Return the digests of the graphs of unfinished builds."""
    return {file_sha256(path) for path in (store / BUILDING_NAME).glob("*/steps/*/graph.onnx")}


def graphs_of(manifest: ArtifactManifest | ArtifactError) -> set[str]:
    assert isinstance(manifest, ArtifactManifest), manifest
    return {sealed.sha256 for name, sealed in manifest.files.items() if name.endswith(".onnx")}


class InterruptedBuild:
    """One build, killed after every step and restarted until it completes."""

    def __init__(self, fork_server: BuildForkServer, source: Path, store: Path) -> None:
        self.store = store
        self.killed: list[BuildExit] = []
        self.graphs: set[str] = set()
        self.interrupted = self._interrupt(fork_server, source)
        while True:
            lines = len(self.killed) + 1
            ended = fork_server.start(*command(source, store), die_after=lines).ended()
            if ended.status != -signal.SIGKILL:
                break
            assert versions(store) == [], f"half an artifact after {ended.output}"
            assert not (store / "local--mortal").exists()
            self.killed.append(ended)
            self.graphs |= graphs_of_steps(store)
        self.completed = ended

    def _interrupt(self, fork_server: BuildForkServer, source: Path) -> BuildExit:
        """Send SIGINT during a step of a build in a separate store."""
        store = self.store.with_name("interrupted")
        return fork_server.start(*command(source, store), die_in="the export").ended()


@pytest.fixture(scope="module")
def interrupted_build(
    fork_server: BuildForkServer, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> InterruptedBuild:
    return InterruptedBuild(fork_server, source, tmp_path_factory.mktemp("chain") / "store")


def test_killed_build_resumes_with_next_step(interrupted_build: InterruptedBuild) -> None:
    for lines, ended in enumerate(interrupted_build.killed, start=1):
        assert len(ended.steps) == lines, ended.output
        # `resolve` is not cached, and the last step is new. All steps in between are reused.
        assert ended.resumed == ended.steps[1:-1], ended.output
    steps = interrupted_build.killed[-1].steps
    assert steps[: len(ALWAYS)] == ALWAYS
    assert steps[-1] == "seal"
    assert "tune" in steps


def test_last_resumed_build_only_publishes(interrupted_build: InterruptedBuild) -> None:
    completed = interrupted_build.completed
    assert completed.status == 0, completed.output
    assert completed.resumed == completed.steps[1:] == interrupted_build.killed[-1].steps[1:]
    (manifest,) = versions(interrupted_build.store)
    assert isinstance(manifest, ArtifactManifest)
    assert f"local/mortal {manifest.version} is built: " in completed.output
    assert list((interrupted_build.store / BUILDING_NAME).iterdir()) == []


def test_interrupted_build_prints_hint_and_keeps_steps(interrupted_build: InterruptedBuild) -> None:
    ended = interrupted_build.interrupted
    assert ended.status == 130
    assert ended.steps == ["resolve", "reference", "export"]
    assert ended.output.endswith(
        "error: interrupted\n\nhint: run the command again; "
        "a build continues after its last finished step\n"
    )
    store = interrupted_build.store.with_name("interrupted")
    assert versions(store) == []
    steps = [path.name for path in (store / BUILDING_NAME).glob("*/steps/*")]
    assert steps == ["reference"]


def test_concurrent_builds_publish_one_identical_artifact(
    interrupted_build: InterruptedBuild, fork_server: BuildForkServer, source: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = fork_server.start(*command(source, store))
    first.wait_for("reference")
    os.kill(first.pid, signal.SIGSTOP)  # it could end before the second build starts
    try:
        second = fork_server.start(*command(source, store))
        second.wait_for("waiting")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    one, other = first.ended(), second.ended()
    assert (one.status, other.status) == (0, 0), (one.output, other.output)
    (manifest,) = versions(store)
    assert isinstance(manifest, ArtifactManifest)
    assert f"local/mortal {manifest.version} is built: " in one.output
    assert f"local/mortal {manifest.version} was built already: " in other.output
    waiting = f"waiting for another build of local/mortal version {manifest.version} "
    assert f"{waiting}(process {first.pid} on " in other.output
    assert other.steps == ["resolve"]

    # These builds were not killed, but sealed the same version as the killed build, and only graphs
    # that its steps wrote too.
    (killed,) = versions(interrupted_build.store)
    assert isinstance(killed, ArtifactManifest)
    assert manifest.version == killed.version
    assert len(interrupted_build.graphs) == 4, "exported, rewritten, and two of int8"
    assert graphs_of(manifest) <= interrupted_build.graphs
    assert graphs_of(killed) <= interrupted_build.graphs
    assert manifest.files["tokenizer.json"] == killed.files["tokenizer.json"]


def test_build_killed_during_publication_is_complete_or_absent(
    interrupted_build: InterruptedBuild, fork_server: BuildForkServer, source: Path
) -> None:
    """Kill at every stage of a publication that replaces an existing version."""
    store = interrupted_build.store
    (built,) = versions(store)
    assert isinstance(built, ArtifactManifest)
    directory = store / "local--mortal" / built.version
    (directory.parent / LATEST_NAME).unlink()
    forced = command(source, store, "--force")

    ended = fork_server.start(*forced, die_in="before publishing").ended()
    assert ended.status == -signal.SIGKILL
    assert versions(store) == [built]
    assert len(graphs_of_steps(store)) == 4

    old = directory.stat().st_ino
    ended = fork_server.start(*forced, die_in="before the rename").ended()
    assert ended.status == -signal.SIGKILL
    assert ended.resumed[-1] == "seal"
    assert versions(store) == [], "the old one has gone, the new one has not come"

    ended = fork_server.start(*forced, die_in="after the rename").ended()
    assert ended.status == -signal.SIGKILL
    (manifest,) = versions(store)
    assert graphs_of(manifest) <= interrupted_build.graphs
    assert directory.stat().st_ino != old
    assert not (directory.parent / LATEST_NAME).exists()

    # Without --force, a build finds the version, and only finishes the publication.
    for place in ("before cleaning", "while cleaning"):
        ended = fork_server.start(*command(source, store), die_in=place).ended()
        assert ended.status == -signal.SIGKILL, place
        (entry,) = list_versions(store)
        assert entry.is_latest
        assert entry.manifest == manifest
    ended = fork_server.start(*command(source, store)).ended()
    assert ended.status == 0
    assert "was built already" in ended.output
    assert list((store / BUILDING_NAME).iterdir()) == []


def test_build_resumes_after_full_disk(
    fork_server: BuildForkServer, source: Path, small_disk: Path | None
) -> None:
    if small_disk is None:
        pytest.skip("no small disk can be mounted here")
    store = small_disk / "store"
    ended = fork_server.start(*command(source, store)).ended()
    assert ended.status == 1, ended.output
    assert ended.steps[:2] == ["resolve", "reference"]
    assert "failed" in ended.output.splitlines()[len(ended.steps) - 1]
    error, blank, hint = ended.output.splitlines()[-3:]
    assert error.startswith("error: ")
    assert "No space left on device" in error
    assert blank == ""
    assert hint == f"hint: check space and permissions of {store}; run the command again"

    fork_server.run("mount", "-o", "remount,size=64m", str(small_disk))
    again = fork_server.start(*command(source, store)).ended()
    assert again.status == 0, again.output
    assert again.resumed[:2] == ["reference", "export"]
    assert " is built: " in again.output


def test_outputs_of_a_decoder_may_not_fit_on_the_disk(
    fork_server: BuildForkServer, small_disk: Path | None, tmp_path: Path
) -> None:
    """They are written through a memory map, where a full disk would end the process."""
    if small_disk is None:
        pytest.skip("no small disk can be mounted here")
    store = small_disk / "store"
    fork_server.run("rm", "-rf", str(store))
    fork_server.run("mount", "-o", "remount,size=600k", str(small_disk))
    llama = tiny_llama(tmp_path / "llama")
    # These tests leave only encoders in the preset `quick`.
    ended = fork_server.start(*command(llama, store, "--search", "full")).ended()
    assert ended.status == 1, ended.output
    assert "No space left on device" in ended.output


def test_killed_builder_of_the_queue_is_resumed_by_the_next(
    fork_server: BuildForkServer, source: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    pull = ["pull", str(source), "--store", str(store)]
    killed = fork_server.start(*pull, die_in="before publishing").ended()
    assert killed.status == -signal.SIGKILL, killed.output
    status = BuildQueue(store).status("local/mortal")
    assert status is not None
    assert status.state is BuildState.QUEUED
    assert "its builder ended" in status.reason
    resumed = fork_server.start("drain", "--store", str(store)).ended()
    assert resumed.status == 0, resumed.output
    assert resumed.resumed, resumed.output
    record = BuildQueue(store).read("local/mortal")
    assert record is not None
    assert (record.state, record.attempts) == (BuildState.READY, 2)
