"""Layout of the store: directories, digests, publishing and removals.

<store>/<organization>--<name>/latest             the version served by default
<store>/<organization>--<name>/<version>/         one sealed artifact
<store>/<organization>--<name>/<version>/hosts/<fingerprint>/     measurements of one kind of host
<store>/.building/<organization>--<name>--<version>[.lock|.log]   one build
<store>/.building/.scratch-*[.log]                temporary directories

`deployments/builds/queue.py` and `deployments/plan/__init__.py` describe the other files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from deployments.artifacts.locks import is_locked
from deployments.errors import (
    ArtifactError,
    ArtifactMissing,
    DigestMismatch,
    LatestInvalid,
    ManifestInvalid,
    PathOutsideArtifact,
    StoreNotWritable,
)
from deployments.files import write_atomically

LATEST_NAME = "latest"
PLAN_NAME = "plan.json"  # file in the store; its lock is the file `plan.json.lock`
HOSTS_NAME = "hosts"
BUILDING_NAME = ".building"

# An optional organization, then a name. Neither starts with a dot or a dash. `is_model_id` has more
# conditions.
_MODEL_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*")
# File names have at most 255 bytes. Names of temporary files add up to 50 bytes to a model's id.
MAX_ID_BYTES = 200
VERSION = re.compile(r"[0-9a-f]{12}")
# Name of the directory of a build. The names of its lock and its log add a suffix.
_BUILD_NAME = re.compile(rf"(?P<model>.+)--(?P<version>{VERSION.pattern})")
# A model id never starts with a dot, so no directory of a build has this prefix.
_SCRATCH_PREFIX = ".scratch-"


def is_model_id(text: str) -> bool:
    """Return whether a model of the store can have this id."""
    return (
        bool(_MODEL_ID.fullmatch(text))
        and ".." not in text
        # `--` separates the organization from the name in the name of a directory.
        and "--" not in text
        and len(text.encode()) <= MAX_ID_BYTES
        and text not in (PLAN_NAME, f"{PLAN_NAME}.lock")
    )


def model_directory(store: Path, model_id: str) -> Path:
    """Return the directory of all versions of a model. Raises ManifestInvalid for an invalid id."""
    if not is_model_id(model_id):
        raise ManifestInvalid(f"`{model_id}` is not a model id")
    return store / model_id.replace("/", "--")


def read_model_id(directory: Path) -> str:
    """Return the model id of a model's directory."""
    # An organization may end with a dash, but a name never starts with one, so the last `--` is
    # the separator.
    return "/".join(directory.name.rsplit("--", maxsplit=1))


def list_model_directories(store: Path) -> list[Path]:
    """Return the directories of all models, sorted; none if there is no store.

    Raises OSError if the store cannot be read, because an unreadable store is not an empty one.
    """
    if not store.exists():
        return []
    paths = (path for path in sorted(store.iterdir()) if is_model_id(read_model_id(path)))
    return [path for path in paths if path.is_dir()]


def list_version_directories(model: Path) -> list[Path]:
    """Return the directories of a model's versions, sorted, even those without a manifest.

    If the model's directory cannot be read, the list is empty.
    """
    try:
        paths = sorted(model.iterdir())
    except OSError:
        return []
    return [path for path in paths if VERSION.fullmatch(path.name) and path.is_dir()]


def list_artifacts(store: Path) -> list[Path]:
    """Return the directories of all versions of all models, sorted.

    Raises OSError if the store cannot be read.
    """
    return [
        version
        for model in list_model_directories(store)
        for version in list_version_directories(model)
    ]


def host_directory(artifact: Path, fingerprint: str) -> Path:
    """Return the directory for the measurements of an artifact on one kind of host."""
    return artifact / HOSTS_NAME / fingerprint


def make_host_directory(directory: Path) -> None:
    """Make a directory that `host_directory` has returned.

    Raises ArtifactMissing if the artifact was removed. Otherwise a model that is removed during its
    tuning would come back as a version without files. Raises OSError on other failures.
    """
    try:
        directory.parent.mkdir(exist_ok=True)
        directory.mkdir(exist_ok=True)
    except FileNotFoundError as exc:
        raise ArtifactMissing("the version was removed from the store") from exc


def list_host_files(artifact: Path, pattern: str) -> list[Path]:
    """Return the files that match the glob `pattern` in the directories of all hosts, sorted."""
    return sorted(artifact.glob(f"{HOSTS_NAME}/*/{pattern}"))


def resolve_version(store: Path, model_id: str, version: str) -> str:
    """Return `version`; for `latest`, the version that it names.

    Raises ArtifactMissing if the store lacks the version, ManifestInvalid for an invalid model id,
    LatestInvalid if `latest` is damaged, and ArtifactError if it cannot be read, such as with too
    many open files.
    """
    directory = model_directory(store, model_id)
    if version == LATEST_NAME:
        try:
            version = (directory / LATEST_NAME).read_text(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise ArtifactMissing(f"`{model_id}` is not built; run `hundredfold build`") from exc
        except OSError as exc:
            message = f"`{LATEST_NAME}` of `{model_id}` cannot be read: {exc.strerror}"
            raise ArtifactError(message) from exc
        if not VERSION.fullmatch(version):  # such as empty, after a full disk or a power failure
            raise LatestInvalid(
                f"`{LATEST_NAME}` of `{model_id}` names no version; promote one, or build the model"
            )
    if not VERSION.fullmatch(version) or not (directory / version).is_dir():
        raise ArtifactMissing(f"`{model_id}` has no version `{version}`")
    return version


def find_artifact(store: Path, model_id: str, version: str = LATEST_NAME) -> Path:
    """Return the directory of a sealed version. Raises as `resolve_version` does."""
    return model_directory(store, model_id) / resolve_version(store, model_id, version)


def name_artifact(directory: Path) -> str:
    """Return `id@version` for the directory of a sealed version, else the directory's name.

    Error messages use this name, because clients read them and must not see paths of the host.
    """
    if not VERSION.fullmatch(directory.name):
        return directory.name
    return f"{read_model_id(directory.parent)}@{directory.name}"


def read_aliased_versions(model: Path) -> frozenset[str] | None:
    """Return the versions that the alias files in a model's directory name.

    An alias file, such as `latest`, contains only a version. Hidden files do not count. Return None
    if this process lacks permission to read a file, or if `latest` names no version. Raises OSError
    for any other failure to read the directory or a file.
    """
    aliased = set()
    for path in model.iterdir():
        text = ""
        if path.is_file() and not path.name.startswith("."):
            try:
                with path.open("rb") as file:
                    text = file.read(100).decode(errors="replace").strip()
            except PermissionError:
                return None
        if VERSION.fullmatch(text):
            aliased.add(text)
        elif path.name == LATEST_NAME:
            return None
    return frozenset(aliased)


class StoredBuild(NamedTuple):
    """A build that has a directory, a lock or a log."""

    path: Path  # directory of the build, which may be missing
    model_id: str
    version: str


def building_directory(store: Path) -> Path:
    """Return the directory of all builds and temporary directories."""
    return store / BUILDING_NAME


def build_path(store: Path, model_id: str, version: str) -> Path:
    """Return the directory in which a version is built."""
    return building_directory(store) / f"{model_directory(store, model_id).name}--{version}"


def lock_path(build: Path) -> Path:
    return build.with_name(f"{build.name}.lock")


def log_path(build: Path) -> Path:
    return build.with_name(f"{build.name}.log")


def list_builds(building: Path) -> list[StoredBuild]:
    """Return the builds in `building`, running or not, sorted; none if there is no directory.

    Raises OSError if the directory cannot be read.
    """
    if not building.is_dir():
        return []
    names = {re.sub(r"\.(log|lock)$", "", path.name) for path in building.iterdir()}
    return [
        StoredBuild(building / name, read_model_id(Path(match["model"])), match["version"])
        for name in sorted(names)
        if (match := _BUILD_NAME.fullmatch(name))
    ]


def is_being_built(store: Path, model_id: str) -> bool:
    """Return whether a build of the model runs. Raises OSError as `list_builds` does."""
    builds = list_builds(building_directory(store))
    return any(is_locked(lock_path(build.path)) for build in builds if build.model_id == model_id)


def list_logs_without_version(building: Path) -> list[Path]:
    """Return the logs in `building` whose name contains no version, sorted."""
    return [path for path in sorted(building.glob("*.log")) if not _BUILD_NAME.fullmatch(path.stem)]


def publish(
    staged: Path, store: Path, model_id: str, version: str, *, is_latest: bool = True
) -> Path:
    """Rename the finished directory `staged` to the version's directory, and return the latter.

    If `is_latest`, let `latest` name the version. The caller holds the lock of the build. An
    existing version is renamed away first and deleted last, so the version is missing only for the
    instant between the two renames. If renaming `staged` fails, the existing version is put back.
    """
    target = model_directory(store, model_id) / version
    target.parent.mkdir(parents=True, exist_ok=True)
    former = _rename_away(target, building_directory(store)) if target.exists() else None
    try:
        staged.rename(target)
    except BaseException:
        if former is not None:
            former.rename(target)
        raise
    if is_latest:
        set_latest(store, model_id, version)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)
    return target


def set_latest(store: Path, model_id: str, version: str) -> None:
    """Write `version` to the model's file `latest`."""
    write_atomically(model_directory(store, model_id) / LATEST_NAME, f"{version}\n".encode())


def remove_atomically(directory: Path, building: Path) -> None:
    """Rename a directory into `building`, then delete it: readers never see a partial directory.

    If the process is killed after the rename, the next build deletes the remaining files. Raises
    OSError if the directory cannot be renamed; then the directory is unchanged.
    """
    shutil.rmtree(_rename_away(directory, building), ignore_errors=True)


def _rename_away(directory: Path, building: Path) -> Path:
    return directory.rename(building / f"{_SCRATCH_PREFIX}{uuid.uuid4().hex}")


def create_scratch(building: Path) -> Path:
    """Create an empty temporary directory, which counts as abandoned until it is locked."""
    return Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=building))


def find_abandoned_scratch(building: Path) -> list[Path]:
    """Return the scratch directories that no process has locked: those of dead processes.

    The caller must hold the lock of `building`. Otherwise a new scratch directory, which is not
    locked at once, would count as abandoned.
    """
    paths = (path for path in sorted(building.glob(f"{_SCRATCH_PREFIX}*")) if not path.is_symlink())
    return [path for path in paths if path.is_dir() and not is_locked(path)]


def find_abandoned_scratch_logs(building: Path) -> list[Path]:
    """Return the logs whose scratch directory is gone."""
    logs = building.glob(f"{_SCRATCH_PREFIX}*.log")
    return [log for log in logs if not log.with_suffix("").exists()]


def check_file(directory: Path, name: str, sha256: str, size: int) -> None:
    """Raise DigestMismatch unless `name` is a plain file with this digest and size.

    Raises PathOutsideArtifact as `resolve_inside` does, and OSError if the file cannot be read.
    """
    path = resolve_inside(directory, name)
    subject = f"{name_artifact(directory)}: `{name}`"
    if path.is_symlink() or not path.is_file():
        raise DigestMismatch(f"{subject} is missing or not a plain file")
    actual = path.stat().st_size
    if actual != size:
        raise DigestMismatch(f"{subject} has {actual} bytes, the sealed file {size}")
    if file_sha256(path) != sha256:
        raise DigestMismatch(f"{subject} differs from the sealed file (sha256)")


def check_no_extra_files(directory: Path, graph: str, files: Container[str]) -> None:
    """Raise DigestMismatch if the graph's directory tree contains a file that is not in `files`.

    An engine might load such a file.
    """
    for path in resolve_inside(directory, graph).parent.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in files:
            raise DigestMismatch(
                f"{name_artifact(directory)}: `{name}` is next to a graph and not sealed"
            )


def resolve_inside(directory: Path, name: str) -> Path:
    """Return `directory / name`.

    Raises PathOutsideArtifact if this path leaves the directory or cannot be resolved.
    """
    pure = PurePosixPath(name)
    subject = f"{name_artifact(directory)}: `{name}`"
    is_relative = not pure.is_absolute() and ".." not in pure.parts and "\\" not in name
    path = directory / pure
    try:
        resolved = path.resolve()
        # For a circular link, `resolve` returns a link since Python 3.13. Before, it raised.
        is_circular = os.path.islink(resolved)
        if is_relative and not is_circular and resolved.is_relative_to(directory.resolve()):
            return path
    except (OSError, RuntimeError, ValueError) as exc:  # circular links, a null byte
        raise PathOutsideArtifact(f"{subject} cannot be resolved") from exc
    raise PathOutsideArtifact(f"{subject} is outside of the artifact")


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def store_errors(store: Path, doing: str, *, for_command: bool = True) -> Iterator[None]:
    """Convert an OSError of the context to StoreNotWritable.

    `doing` is the start of the message, such as "clean" or "remove MODEL from". `for_command` adds
    advice for commands with `--store`.
    """
    try:
        yield
    except OSError as exc:
        message = f"cannot {doing} the store {store}: {exc.strerror or exc}"
        advice = "Check its space and permissions, or pass another `--store DIR`"
        raise StoreNotWritable(f"{message}. {advice}" if for_command else message) from exc
