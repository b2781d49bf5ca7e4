"""Failed deployments of an application, as Ray Serve reports them on the dashboard's port."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.probes import DIRECT, PROBE_TIMEOUT_S
from deployments.deployment_names import INGRESS, REQUIRED_FOR_READY

# Serve starts the replicas of a deployment three times before it reports a failure, which takes
# longer. A start that succeeds costs no question, for which the dashboard loads Ray's client.
ASK_AFTER_S = 15.0
PERIOD_S = 2.0
MAX_REASON_CHARS = 500
FAILED = "DEPLOY_FAILED"
# Deployments without which no server is ready.
REQUIRED = frozenset({INGRESS, *REQUIRED_FOR_READY})


class DeployFailures:
    """Reader of the failures of one start. `port` is the dashboard's port."""

    def __init__(self, port: int, environment: Mapping[str, str]) -> None:
        self._url = f"http://127.0.0.1:{port}/api/serve/applications/"
        self._environment = environment
        self._next_s = time.monotonic() + ASK_AFTER_S

    def find(self) -> str | None:
        """Describe the deployments that Serve failed to start; None if it reports none.

        Ask at most once per PERIOD_S, and not before ASK_AFTER_S.
        """
        if time.monotonic() < self._next_s:
            return None
        reasons = self._read_reasons()
        self._next_s = time.monotonic() + PERIOD_S
        return "\n".join(["Ray Serve cannot start the server", *reasons]) if reasons else None

    def _read_reasons(self) -> list[str]:
        try:
            token = read_token(self._environment)
            request = urllib.request.Request(
                self._url, headers={"authorization": f"Bearer {token}"}
            )
            with DIRECT.open(request, timeout=PROBE_TIMEOUT_S) as response:
                applications = json.load(response)["applications"]
            failed = [each for each in applications.values() if each["status"] == FAILED]
            reasons = [reason for each in failed for reason in _list_reasons(each)]
            if failed and len(applications) == 1 and not failed[0]["deployments"]:
                return [f"the application: {_last_line(failed[0]['message'])}"]
            return reasons
        # The dashboard starts late, and may not know Serve yet.
        except (OSError, http.client.HTTPException, ValueError, LookupError, AttributeError):
            return []


def read_token(environment: Mapping[str, str]) -> str:
    """Return the token of Ray's control ports. Raises OSError if its file cannot be read."""
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else find_token_file()
    return file.read_text(encoding="utf-8").strip()


def find_token_file() -> Path:
    """Return the default file of the token. Raises RuntimeError if this user has no home."""
    return Path.home() / ".ray" / "auth_token"


def _list_reasons(application: Mapping[str, Any]) -> Iterator[str]:
    """Yield name and reason of each failed deployment without which a server is not ready.

    In place of a GPU deployment the CPU answers. Other applications do not concern this server.
    """
    for name, details in application["deployments"].items():
        if name in REQUIRED and details["status"] == FAILED:
            yield f"{name}: {_last_line(details['message'])}"


def _last_line(message: str) -> str:
    """Return the reason in a message of Serve, which follows the traceback."""
    lines = message.strip().splitlines() or ["no reason"]
    return lines[-1].strip()[:MAX_REASON_CHARS]
