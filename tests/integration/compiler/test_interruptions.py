"""Builds that are killed, interrupted, starved of disk, or not alone.

Each kill is a real SIGKILL, and there is one at every boundary between two steps. Every build goes
on where the last one was killed, so that all of them together cost little more than one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_artifacts.inspection import list_versions
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import BUILDING_NAME, LATEST_NAME, file_sha256
from deployments.errors import ArtifactError
from tests.support.builders import tiny_checkpoint
from tests.support.killable_builds import BuildExit, BuildForkServer

# What a build of the two candidates of SMALL always does; a second verdict comes on top of it when
# the slower one is not far behind.
ALWAYS = ["resolve", "reference", "export", "rewrite", "quantize", "quantize", "screen", "verify"]
# Enough for the export, which takes seconds, and not for everything that is made of it.
SMALL_DISK = "500k"


def mount(directory: Path) -> list[str]:
    """A prefix that gives the command behind it a small disk of its own at `directory`."""
    script = f'mount -t tmpfs -o size={SMALL_DISK} none "{directory}" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A directory that is a small disk for the builds; None where none can be mounted."""
    directory = tmp_path_factory.mktemp("disk")
    tried = subprocess.run([*mount(directory), "true"], capture_output=True, check=False)
    return None if tried.returncode else directory


@pytest.fixture(scope="module")
def fork_server(
    tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None
) -> Iterator[BuildForkServer]:
    prefix = mount(small_disk) if small_disk else []
    made = BuildForkServer(tmp_path_factory.mktemp("outputs"), *prefix)
    yield made
    made.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sources") / "mortal", layers=1)


def command(source: Path, store: Path, *more: str) -> list[str]:
    options = ["--search", "quick", "--tune-seconds", "0.2", "--store", str(store)]
    return ["build", str(source), *options, *more]


def versions(store: Path) -> list[ArtifactManifest | ArtifactError]:
    """Everything that is visible in the store, whole or not."""
    return [entry.manifest for entry in list_versions(store)]


def graphs_of_steps(store: Path) -> set[str]:
    """The digests of the graphs that unfinished builds have made."""
    return {file_sha256(path) for path in (store / BUILDING_NAME).glob("*/steps/*/graph.onnx")}


def graphs_of(manifest: ArtifactManifest | ArtifactError) -> set[str]:
    assert isinstance(manifest, ArtifactManifest), manifest
    return {sealed.sha256 for name, sealed in manifest.files.items() if name.endswith(".onnx")}


class Chain:
    """One build, killed and run again until it survives."""

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
        self.survivor = ended

    def _interrupt(self, fork_server: BuildForkServer, source: Path) -> BuildExit:
        """Ctrl-C in the middle of a step, of a build in a store of its own."""
        build = fork_server.start(*command(source, self.store.with_name("interrupted")))
        build.wait_for("reference")
        time.sleep(0.5)  # into the export, which takes seconds
        os.kill(build.pid, signal.SIGINT)
        return build.ended()


@pytest.fixture(scope="module")
def chain(
    fork_server: BuildForkServer, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Chain:
    return Chain(fork_server, source, tmp_path_factory.mktemp("chain") / "store")


def test_a_build_killed_after_any_step_goes_on_with_the_next_one(chain: Chain) -> None:
    for lines, ended in enumerate(chain.killed, start=1):
        assert len(ended.steps) == lines, ended.output
        # `resolve` leaves nothing behind and the last one is new: all between were finished before.
        assert ended.resumed == ended.steps[1:-1], ended.output
    told = chain.killed[-1].steps
    assert told[: len(ALWAYS)] == ALWAYS
    assert told[-1] == "seal"
    assert "tune" in told


def test_after_the_last_kill_nothing_is_left_to_do_but_to_publish(chain: Chain) -> None:
    survivor = chain.survivor
    assert survivor.status == 0, survivor.output
    assert survivor.resumed == survivor.steps[1:] == chain.killed[-1].steps[1:]
    (manifest,) = versions(chain.store)
    assert isinstance(manifest, ArtifactManifest)
    assert f"local/mortal {manifest.version} is built: " in survivor.output
    assert list((chain.store / BUILDING_NAME).iterdir()) == []


def test_ctrl_c_ends_a_build_with_a_hint_and_keeps_its_steps(chain: Chain) -> None:
    ended = chain.interrupted
    assert ended.status == 130
    assert ended.steps == ["resolve", "reference", "export"]
    assert ended.output.endswith(
        "error: interrupted\n\nhint: run the command again; "
        "a build continues after its last finished step\n"
    )
    store = chain.store.with_name("interrupted")
    assert versions(store) == []
    steps = [path.name for path in (store / BUILDING_NAME).glob("*/steps/*")]
    assert steps == ["reference"]


def test_of_two_builds_at_once_one_builds_what_a_killed_one_would_have(
    chain: Chain, fork_server: BuildForkServer, source: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = fork_server.start(*command(source, store))
    first.wait_for("reference")
    second = fork_server.start(*command(source, store))
    second.wait_for("waiting")
    one, other = first.ended(), second.ended()
    assert (one.status, other.status) == (0, 0), (one.output, other.output)
    (manifest,) = versions(store)
    assert isinstance(manifest, ArtifactManifest)
    assert f"local/mortal {manifest.version} is built: " in one.output
    assert f"local/mortal {manifest.version} was built already: " in other.output
    waiting = f"waiting for another build of local/mortal version {manifest.version} "
    assert f"{waiting}(process {first.pid} on " in other.output
    assert other.steps == ["resolve"]

    # Nobody interrupted this one; byte by byte the graphs are those of the one that was killed.
    (killed,) = versions(chain.store)
    assert isinstance(killed, ArtifactManifest)
    assert manifest.version == killed.version
    assert len(chain.graphs) == 4, "exported, rewritten, and two of int8"
    assert graphs_of(manifest) <= chain.graphs
    assert graphs_of(killed) <= chain.graphs
    assert manifest.files["tokenizer.json"] == killed.files["tokenizer.json"]


def test_a_build_killed_while_it_publishes_is_whole_or_not_there(
    chain: Chain, fork_server: BuildForkServer, source: Path
) -> None:
    """In the order of a publication, each time on top of the version that is there."""
    store = chain.store
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
    assert graphs_of(manifest) <= chain.graphs
    assert directory.stat().st_ino != old
    assert not (directory.parent / LATEST_NAME).exists()

    # Without --force the version is found, and the step that was cut off is done.
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


def test_a_full_disk_is_told_and_a_larger_one_is_enough_to_go_on(
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
    assert hint == f"hint: check space and permissions of {store}; run it again to go on"

    fork_server.run("mount", "-o", "remount,size=64m", str(small_disk))
    again = fork_server.start(*command(source, store)).ended()
    assert again.status == 0, again.output
    assert again.resumed[:2] == ["reference", "export"]
    assert " is built: " in again.output
