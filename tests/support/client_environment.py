"""Client programs that run in a second Python environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_cluster import REPOSITORY

PYTHON_VARIABLE = "HUNDREDFOLD_CLIENTS_PYTHON"
SKIP = "skip"
DEFAULT_PYTHON = REPOSITORY / ".venv-clients" / "bin" / "python"
PROGRAMS = REPOSITORY / "tests" / "support" / "clients"
TIMEOUT_S = 60


def run_client(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run a program of tests/support/clients and return the JSON that it prints."""
    done = subprocess.run(
        [find_python(), PROGRAMS / program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def find_python() -> str:
    """Return the interpreter of the second environment.

    Fail the test if it is missing. Skip the test if PYTHON_VARIABLE has the value SKIP.
    """
    named = os.environ.get(PYTHON_VARIABLE, str(DEFAULT_PYTHON))
    if named == SKIP:
        pytest.skip(f"{PYTHON_VARIABLE}={SKIP}")
    if not Path(named).exists():
        pytest.fail(
            f"{named} does not exist. hint: `make .venv-clients/ready` installs the clients; "
            f"{PYTHON_VARIABLE} names another Python that has them, or `{SKIP}` leaves them out",
            pytrace=False,
        )
    return named


def run_old_hub(url: str, method: str, **arguments: Any) -> Any:
    """Call a method of huggingface_hub 0.25, with the server at `url` as its Inference API."""
    environment = {"HF_INFERENCE_ENDPOINT": url}
    return run_client("old_hub.py", method, json.dumps(arguments), environment=environment)
