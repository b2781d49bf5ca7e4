from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from build_artifacts.progress import BuildProgress
from build_artifacts.workspaces.opening import open_build_workspace
from deployments.artifacts.store import BUILDING_NAME, set_latest
from deployments.builds.queue import QUEUE_NAME
from deployments.errors import BadSetting, PlanUnusable, UnknownModel
from deployments.management.garbage import (
    ABANDONED_AFTER_S,
    TEMPORARY_AFTER_S,
    Garbage,
    GarbageKind,
    describe,
    find_garbage,
    remove,
)
from deployments.plan import changes
from deployments.plan.plan_file import PLAN_NAME
from tests.support.artifacts import refuse_version
from tests.support.plan_stores import MODEL, seal_version

OLD, NEW, OTHER = "a" * 12, "b" * 12, "c" * 12


def publish(store: Path, model: str, version: str, size: int = 10) -> Path:
    """Create a version directory with one graph of `size` bytes."""
    directory = store / model.replace("/", "--") / version
    (directory / "graphs").mkdir(parents=True)
    (directory / "graphs" / "cpu.onnx").write_bytes(bytes(size))
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Create a store of one model with an old version and the latest."""
    for version in (OLD, NEW):
        publish(tmp_path, MODEL, version)
    set_latest(tmp_path, MODEL, NEW)
    return tmp_path


def names(garbage: Garbage) -> list[str]:
    return [item.name for item in garbage.items]


def age(path: Path, seconds: float) -> None:
    """Set all modification times in `path` to `seconds` ago."""
    then = time.time() - seconds
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then))


def interrupt(store: Path, version: str) -> Path:
    """Simulate a build of MODEL that fails with a full disk after its first step."""

    def fill_the_disk(into: Path) -> None:
        Path("/dev/full").write_bytes(b"one byte too many")

    with (
        suppress(OSError),
        open_build_workspace(store, MODEL, version, BuildProgress(io.StringIO())) as place,
    ):
        place.run_cached("export", lambda into: None)
        place.run_cached("quantize", fill_the_disk)
    return place.root


def test_gc_removes_only_versions_without_alias(store: Path) -> None:
    garbage = find_garbage(store)
    assert names(garbage) == [f"{MODEL}@{OLD}"]
    assert [item.kind for item in garbage.items] == [GarbageKind.VERSION]
    assert garbage.size == 10
    assert remove(garbage) == garbage.items
    assert sorted(path.name for path in (store / "org--model").iterdir()) == [NEW, "latest"]
    assert list((store / BUILDING_NAME).iterdir()) == []
    assert find_garbage(store).items == ()


def test_versions_of_the_plan_stay(store: Path) -> None:
    publish(store, MODEL, OTHER)
    changes.promote(store, MODEL, OLD)
    changes.promote(store, MODEL, OTHER)
    assert {item.name for item in find_garbage(store).items}.isdisjoint(
        {f"{MODEL}@{OLD}", f"{MODEL}@{OTHER}"}
    ), "OLD is what a rollback returns to"
    changes.forget(store, MODEL)
    removable = find_garbage(store)
    changes.promote(store, MODEL, OLD)
    assert f"{MODEL}@{OLD}" not in {item.name for item in remove(removable)}, "promoted since"


def test_version_that_a_rollback_returns_to_stays_without_a_promotion(tmp_path: Path) -> None:
    for sealed_s, version in enumerate((OLD, OTHER, NEW), start=1):
        seal_version(tmp_path, version, sealed_s)
    assert names(find_garbage(tmp_path)) == [f"{MODEL}@{OLD}"]
    refuse_version(tmp_path, MODEL, OTHER)
    removable = find_garbage(tmp_path)
    assert names(removable) == [f"{MODEL}@{OTHER}"]
    (item,) = remove(removable)
    assert item.path.name == OTHER
    plan = changes.rollback(tmp_path, MODEL)
    assert plan.find(MODEL).aliases == {"stable": OLD}


def test_versions_of_the_configuration_stay(tmp_path: Path) -> None:
    for sealed_s, version in enumerate((OLD, OTHER, NEW), start=1):
        seal_version(tmp_path, version, sealed_s)
    garbage = find_garbage(tmp_path, configured={MODEL: OLD})
    assert names(garbage) == [f"{MODEL}@{OTHER}"]
    changes.promote(tmp_path, MODEL, OTHER)
    assert names(find_garbage(tmp_path, configured={MODEL: OLD})) == [], "a rollback returns to OLD"
    assert remove(garbage) == ()


def test_nothing_is_removed_without_a_readable_plan(store: Path) -> None:
    (store / PLAN_NAME).write_text("no JSON")
    with pytest.raises(PlanUnusable, match="plan"):
        find_garbage(store)


def test_gc_treats_every_file_with_a_version_as_alias(store: Path) -> None:
    publish(store, MODEL, OTHER)
    (store / "org--model" / "stable").write_text(f"{OLD}\n")
    (store / "org--model" / "notes.txt").write_text(f"we liked {OTHER}\n")
    assert names(find_garbage(store)) == [f"{MODEL}@{OTHER}"]


def test_gc_keeps_pinned_versions(store: Path) -> None:
    assert names(find_garbage(store, keep=[f"other/model@{OLD}"])) == [f"{MODEL}@{OLD}"]
    assert names(find_garbage(store, keep=[f"{MODEL}@{OLD}", f"{MODEL}@latest"])) == []
    with pytest.raises(BadSetting, match="`org/model` names no version"):
        find_garbage(store, keep=["org/model"])


def test_gc_keeps_the_version_of_an_alias_and_refuses_unknown_ones(store: Path) -> None:
    changes.set_alias(store, MODEL, "tested", OLD)
    changes.set_alias(store, MODEL, "other", NEW)
    assert names(find_garbage(store, keep=[f"{MODEL}@tested"])) == []
    with pytest.raises(UnknownModel, match=f"has no version `{OLD[:7]}`"):
        find_garbage(store, keep=[f"{MODEL}@{OLD[:7]}"])


@pytest.mark.parametrize("content", [b"", b"v2\n", b"\xff\xfe"])
def test_gc_with_invalid_alias_keeps_every_version(store: Path, content: bytes) -> None:
    (store / "org--model" / "latest").write_bytes(content)
    assert names(find_garbage(store)) == []


def test_gc_rechecks_aliases_before_removal(store: Path) -> None:
    publish(store, MODEL, OTHER)
    garbage = find_garbage(store)
    set_latest(store, MODEL, OLD)
    assert [item.name for item in remove(garbage)] == [f"{MODEL}@{OTHER}"]
    assert (store / "org--model" / OLD / "graphs" / "cpu.onnx").exists()
    # NEW lost its alias after `find_garbage`, so the confirmed list does not contain it.
    assert (store / "org--model" / NEW).exists()


def test_gc_skips_model_being_built(store: Path) -> None:
    publish(store, "org/model--like", OLD)
    publish(store, "org", OLD)
    garbage = find_garbage(store)
    with open_build_workspace(store, MODEL, OTHER, BuildProgress(io.StringIO())):
        assert set(names(garbage)) - set(names(find_garbage(store))) == {f"{MODEL}@{OLD}"}
        assert f"{MODEL}@{OLD}" not in [item.name for item in remove(garbage)]
    assert names(find_garbage(store)) == [f"{MODEL}@{OLD}"]


def test_gc_skips_version_with_held_lock(store: Path) -> None:
    lock = store / "org--model" / OLD / "hosts" / "this-host" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert names(find_garbage(store)) == []
    assert names(find_garbage(store)) == [f"{MODEL}@{OLD}"]


def test_gc_keeps_recent_and_running_builds(store: Path) -> None:
    root = interrupt(store, OTHER)
    assert root.with_name(f"{root.name}.log").is_file()
    building = store / BUILDING_NAME
    assert f"{MODEL}@{OTHER}" not in names(find_garbage(store))
    age(building, ABANDONED_AFTER_S + 60)
    with open_build_workspace(store, MODEL, OTHER, BuildProgress(io.StringIO())):
        assert f"{MODEL}@{OTHER}" not in names(find_garbage(store))


def test_gc_removes_old_build_with_log_and_lock(store: Path) -> None:
    root = interrupt(store, OTHER)
    building = store / BUILDING_NAME
    (building / f"{root.name}.lock").write_text("process 1 on another-host")
    age(building, ABANDONED_AFTER_S + 60)
    garbage = find_garbage(store, keep=[f"{MODEL}@{OLD}"])
    assert names(garbage) == [f"{MODEL}@{OTHER}"]
    assert garbage.items[0].reason == "unfinished, 7 days old"
    assert remove(garbage) == garbage.items
    assert list(building.iterdir()) == []


def test_gc_keeps_build_resumed_before_removal(store: Path) -> None:
    root = interrupt(store, OTHER)
    age(store / BUILDING_NAME, ABANDONED_AFTER_S + 60)
    garbage = find_garbage(store)
    (root / "steps" / "quantize").mkdir()
    assert f"{MODEL}@{OTHER}" not in [item.name for item in remove(garbage)]
    assert root.is_dir()


def test_gc_keeps_locked_builds(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    age(interrupt(store, OTHER).parent, ABANDONED_AFTER_S + 60)
    lock = "deployments.management.garbage.try_exclusive_lock"  # a build takes it after the search
    monkeypatch.setattr(lock, lambda _: nullcontext(False))
    assert remove(find_garbage(store)) == ()
    assert list((store / BUILDING_NAME).glob("*.log"))


def test_gc_removes_log_of_old_failure(store: Path) -> None:
    building = store / BUILDING_NAME
    building.mkdir()
    for name in (f"org--model--{OTHER}.log", "of-an-earlier-release.log"):
        (building / name).write_text("Traceback")
    assert names(find_garbage(store)) == [f"{MODEL}@{OLD}"]
    age(building, ABANDONED_AFTER_S + 60)
    garbage = find_garbage(store, keep=[f"{MODEL}@{OLD}"])
    assert names(garbage) == [f"{MODEL}@{OTHER}", "of-an-earlier-release.log"]
    assert remove(garbage) == garbage.items
    assert list(building.iterdir()) == []


def test_gc_removes_old_partial_files(store: Path) -> None:
    half = store / "org--model" / ".latest.4711"
    half.write_text(OLD[:5])
    set_latest(store, MODEL, OLD)
    assert ".latest.4711" not in str(names(find_garbage(store)))
    age(half, 7_200)
    garbage = find_garbage(store, keep=[f"{MODEL}@{NEW}"])
    assert names(garbage) == ["org--model/.latest.4711"]
    assert remove(garbage) == garbage.items
    assert not half.exists()


@pytest.mark.parametrize(
    "name", [f".{PLAN_NAME}.4711.1403", f"{QUEUE_NAME}/.org--model.json.4711.1403"]
)
def test_gc_removes_old_partial_files_of_the_plan_and_the_queue(store: Path, name: str) -> None:
    half = store / name
    half.parent.mkdir(exist_ok=True)
    half.write_text("{")
    keep = [f"{MODEL}@{OLD}"]
    assert names(find_garbage(store, keep)) == [], "its writer may still write"
    age(half, TEMPORARY_AFTER_S + 60)
    garbage = find_garbage(store, keep)
    assert names(garbage) == [name]
    assert remove(garbage) == garbage.items
    assert not half.exists()


def test_gc_does_not_follow_a_linked_queue(
    store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    half = elsewhere / ".org--model.json.4711.1403"
    half.write_text("{")
    age(half, TEMPORARY_AFTER_S + 60)
    (store / QUEUE_NAME).symlink_to(elsewhere)
    (store / f".{PLAN_NAME}.4711.1403").symlink_to(half)
    assert names(find_garbage(store)) == [f"{MODEL}@{OLD}"]


HOLD_SCRATCH = """
import sys, time
from pathlib import Path
from build_artifacts.workspaces.opening import open_scratch
with open_scratch(Path(sys.argv[1])) as root:
    (root / "wheel").write_bytes(b"wheel")
    print(root.name, flush=True)
    time.sleep(60)
"""


def test_gc_removes_scratch_of_ended_processes_only(store: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD_SCRATCH, str(store)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        held = [process.stdout.readline().strip() for process in processes if process.stdout]
        processes[0].kill()
        processes[0].wait()
        garbage = find_garbage(store, keep=[f"{MODEL}@{OLD}"])
        assert names(garbage) == held[:1]
        assert garbage.size == 5
        assert remove(garbage) == garbage.items
        assert [path.name for path in (store / BUILDING_NAME).iterdir()] == held[1:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_killed_removal_leaves_no_partial_version(store: Path) -> None:
    program = (
        "import os, shutil, sys; from pathlib import Path; "
        "from deployments.management import garbage; "
        "shutil.rmtree = lambda *a, **k: os.kill(os.getpid(), 9); "
        "garbage.remove(garbage.find_garbage(Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (store / "org--model" / OLD).exists()
    garbage = find_garbage(store)
    assert [item.kind for item in garbage.items] == [GarbageKind.SCRATCH]
    assert remove(garbage) == garbage.items
    age(store / BUILDING_NAME, ABANDONED_AFTER_S + 60)
    (lock,) = find_garbage(store).items  # left by the killed process
    assert remove(find_garbage(store)) == (lock,)
    assert list((store / BUILDING_NAME).iterdir()) == []


def test_gc_ignores_links(store: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    precious = publish(elsewhere, "their/model", OTHER)
    (store / "org--model" / OTHER).symlink_to(precious)
    (store / "their--model").symlink_to(precious.parent)
    (store / "org--model" / OLD / "way-out").symlink_to(elsewhere)
    garbage = find_garbage(store)
    assert names(garbage) == [f"{MODEL}@{OLD}"]
    assert garbage.size == 10
    remove(garbage)
    assert (precious / "graphs" / "cpu.onnx").exists()
    assert (store / "org--model" / OTHER).is_symlink()


def test_gc_does_not_follow_version_replaced_by_link(store: Path) -> None:
    garbage = find_garbage(store)
    (store / "org--model" / OLD).rename(store / "precious")
    (store / "org--model" / OLD).symlink_to(store / "precious")
    assert remove(garbage) == ()
    assert (store / "precious" / "graphs" / "cpu.onnx").exists()


def test_gc_ignores_unrelated_files(store: Path) -> None:
    for path in ("README.md", "org--model/notes.txt", "lost+found/x", "org--model/draft/graph"):
        (store / path).parent.mkdir(exist_ok=True)
        (store / path).write_text("theirs")
    before = sorted(store.rglob("*"))
    removed = remove(find_garbage(store))
    gone = {item.path for item in removed}
    remaining = [path for path in before if not gone & {path, *path.parents}]
    assert [path for path in remaining if not path.exists()] == []


def test_gc_ignores_directories_without_the_name_of_a_model(store: Path) -> None:
    for name in ("org--two..dots", "one--two--three", "two words"):
        publish(store, name, OLD)
    garbage = find_garbage(store)
    assert names(garbage) == [f"{MODEL}@{OLD}"]
    assert remove(garbage) == garbage.items


def test_gc_finds_versions_of_an_organization_that_ends_with_a_dash(store: Path) -> None:
    for version in (OLD, NEW):
        publish(store, "org-/model", version)
    set_latest(store, "org-/model", NEW)
    garbage = find_garbage(store, keep=[f"{MODEL}@{OLD}"])
    assert names(garbage) == [f"org-/model@{OLD}"]
    assert remove(garbage) == garbage.items


def test_garbage_table_is_sorted_by_size_with_sum(store: Path) -> None:
    publish(store, "org/large", OLD, size=2_500_000)
    set_latest(store, "org/large", publish(store, "org/large", NEW).name)
    assert describe(find_garbage(store)).splitlines() == [
        "WHAT     NAME                     MB  WHY",
        f"version  org/large@{OLD}  2.5  nothing names it",
        f"version  org/model@{OLD}  0.0  nothing names it",
        "2 to remove, 2.5 MB",
    ]


def test_empty_store_has_no_garbage(tmp_path: Path) -> None:
    for store in (tmp_path, tmp_path / "none"):
        garbage = find_garbage(store)
        assert describe(garbage) == f"nothing to remove from {store}"
        assert remove(garbage) == ()
    assert list(tmp_path.iterdir()) == []
