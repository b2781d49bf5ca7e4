"""Models of `hundredfold serve --model` that the store lacks: each is built before the start."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cluster.processes import end_with_parent
from cluster.progress import StartupProgress
from cluster.start_errors import StartError
from deployments.artifacts.store import LATEST_NAME, resolve_version
from deployments.builds.process import has_compiler
from deployments.errors import ArtifactMissing, LatestInvalid
from deployments.host.machine import advise_install

STOP_BUILD_S = 5.0  # for a build to end after SIGTERM; it resumes at the next start


def build_missing_models(
    models: Iterable[str], store: Path, directory: Path, progress: StartupProgress
) -> None:
    """Build the models without a version in `store`, one after the other.

    The builds run in `directory`, where no model id is the name of a directory. Raises StartError
    if one fails, or if this environment has no compiler. Raises ArtifactError if `store` cannot be
    read.
    """
    for model in models:
        try:
            resolve_version(store, model, LATEST_NAME)
        except (ArtifactMissing, LatestInvalid):
            if not has_compiler():
                raise StartError(
                    f"the store `{store}` lacks `{model}`, and this environment has no compiler",
                    hint=f"{advise_install('build,cpu')}, or copy the model from another store",
                ) from None
            progress.report(f"building {model}")
            _build(model, store, directory)


def _build(model: str, store: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "hundredfold", "build", model, "--store", str(store.resolve())]
    with subprocess.Popen([*end_with_parent(signal.SIGTERM), *command], cwd=directory) as process:
        try:
            code = process.wait()
        except BaseException:  # a stop signal of the launcher
            process.terminate()
            try:
                process.wait(STOP_BUILD_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if code:
        raise StartError(
            f"`{model}` could not be built",
            hint="the reason is above; leave out `--model` to serve other models",
        )
