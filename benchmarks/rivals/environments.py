"""Python environments of rivals, created once from the requirement lists of this package."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import log_progress

REQUIREMENTS = Path(__file__).with_name("requirements")
DEFAULT_ENVIRONMENTS = Path.home() / ".cache" / "hundredfold" / "rivals"
INSTALL_TIMEOUT_S = 3600.0
_COMPLETE_NAME = "complete"  # marks an installed environment; if missing, pip installs again
_DIGEST_CHARACTERS = 12
_OMIT_HINT = "leave the rival out with --rivals"


@dataclass(frozen=True, slots=True)
class Environment:
    """Interpreter of an environment and the versions of its packages."""

    python: Path
    packages: Mapping[str, str]


def open_environment(name: str, parent: Path, requirements: Path = REQUIREMENTS) -> Environment:
    """Return `<parent>/<name>-<digest>`, installed from `<requirements>/<name>.txt` if missing.

    The digest covers the requirement list and the Python version. Raises BenchmarkError if there is
    no such list, or if the installation fails.
    """
    file = requirements / f"{name}.txt"
    if not file.is_file():
        raise BenchmarkError(f"there is no `{file.name}`", hint=f"add it to {requirements}")
    content = file.read_bytes() + sys.version.encode()
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST_CHARACTERS]
    directory = (parent / f"{name}-{digest}").resolve()
    python = directory / "bin" / "python"
    # The interpreter is a symbolic link, and its target may have been removed since.
    if not ((directory / _COMPLETE_NAME).is_file() and python.is_file()):
        _install(file, directory, python)
    return Environment(python, list_packages(python))


def current_environment() -> Environment:
    """Return the Python of this process and the packages that it has."""
    python = Path(sys.executable)
    return Environment(python, list_packages(python))


def list_packages(python: Path) -> dict[str, str]:
    """Return the versions of the installed packages by their normalized names.

    Raises BenchmarkError if pip fails.
    """
    done = _pip(python, ["list", "--format=json"], timeout_s=60.0)
    if done.returncode:
        raise BenchmarkError(
            f"pip cannot list the packages of `{python}`: {_describe_failure(done)}",
            hint=_OMIT_HINT,
        )
    entries = orjson.loads(done.stdout)
    return {re.sub(r"[-_.]+", "-", e["name"]).lower(): e["version"] for e in entries}


def _install(file: Path, directory: Path, python: Path) -> None:
    log_progress(f"installing {file.name} to {directory}")
    try:
        venv.EnvBuilder(with_pip=True, clear=True).create(directory)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise BenchmarkError(
            f"cannot create `{directory}`: {exc}", hint="name a directory with --environments DIR"
        ) from exc
    done = _pip(python, ["install", "--quiet", "-r", str(file)], timeout_s=INSTALL_TIMEOUT_S)
    log = directory / "install.log"
    log.write_text(done.stderr, encoding="utf-8")
    if done.returncode:
        reason = _describe_failure(done)
        raise BenchmarkError(f"pip cannot install {file.name}: {reason}", hint=f"see {log}")
    (directory / _COMPLETE_NAME).touch()


def _describe_failure(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of stderr that names an error, or else the exit code."""
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return errors[-1].strip() if errors else f"exit code {done.returncode}"


def _pip(
    python: Path, arguments: list[str], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as exc:
        raise BenchmarkError(
            f"`pip {arguments[0]}` took longer than {timeout_s:.0f} s",
            hint=_OMIT_HINT,
        ) from exc
    except OSError as exc:
        raise BenchmarkError(f"cannot run `{python}`: {exc.strerror}", hint=_OMIT_HINT) from exc
