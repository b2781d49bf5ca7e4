"""Digests of source files, as names of what tests keep between runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# Files that decide the result of a build. Builds import `deployments` too, but it is left out: a
# change of the server alone must not rebuild the models, which takes minutes. constraints.txt has
# the pinned packages.
_COMPILER = ("build_artifacts/**/*.py", "constraints.txt")
# Exports also trace wrappers that engines have.
_EXPORTER = (_COMPILER[0], "deployments/engines/*.py", _COMPILER[1])


def digest_compiler() -> str:
    """Digest the files that decide how a model is built."""
    return _digest_files(_COMPILER)


def digest_exporter() -> str:
    """Digest the files that decide how a model is exported: code of builds, pinned packages."""
    return _digest_files(_EXPORTER)


def _digest_files(patterns: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(REPOSITORY.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
