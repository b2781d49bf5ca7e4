"""Probes of servers on this host: whether a port is open, whether the server is ready."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable

PROBE_TIMEOUT_S = 2.0
# Opener for requests to this host: it ignores proxies in the environment.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# Returns a description of what is missing or has failed, or None.
StatusCheck = Callable[[], str | None]


def check_port_open(host: str, port: int) -> StatusCheck:
    """Return a check that a port accepts connections."""

    def missing() -> str | None:
        try:
            with socket.create_connection((host, port), PROBE_TIMEOUT_S):
                return None
        except OSError:
            return f"waiting for port {port}"

    return missing


def check_ready(url: str) -> StatusCheck:
    """Return a check that `GET /ready` returns 200. The check reports the missing parts.

    The certificate of an HTTPS server on this host is not verified: it does not name the loopback
    address.
    """
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )

    def missing() -> str | None:
        try:
            with opener.open(f"{url}/ready", timeout=PROBE_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            return f"starting: {_read_reasons(error)}"
        except (OSError, http.client.HTTPException):
            return "starting: the ingress"

    return missing


def _read_reasons(error: urllib.error.HTTPError) -> str:
    try:
        return ", ".join(json.loads(error.read())["missing"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return "the ingress"
