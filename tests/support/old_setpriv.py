"""setpriv as before util-linux 2.33."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def install_old_setpriv(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a setpriv that refuses every option, such as `--pdeathsig`, first on the PATH."""
    program = directory / "setpriv"
    program.write_text("#!/bin/sh\necho \"setpriv: unrecognized option '$1'\" >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
