"""`hundredfold models ps|load|unload`: models in the memory of a running server's replicas."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from cluster.access import is_loopback
from cluster.ports import HTTP_PORT
from cluster.probes import DIRECT
from deployments.config import CLIENT_KEY_VARIABLE, client_key
from deployments.terminal.command_line import HintedError, show_activity
from deployments.terminal.console import add_json_option, format_table, print_json, print_text

DEFAULT_URL = f"http://127.0.0.1:{HTTP_PORT}"
TIMEOUT_S = 90.0  # long, because a load reads and opens a model
HEAD = ("model", "version", "replica", "MB", "age", "last use", "per minute", "")


class ServerError(HintedError):
    """The server rejected or did not answer a request. `hint` is the remedy."""

    code = "server_error"


@dataclass(frozen=True, slots=True)
class MemoryCommand:
    """Command that calls `route` of a server. `takes_name`: the route is about one model."""

    method: str
    route: str
    takes_name: bool

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        if self.takes_name:
            parser.add_argument("name", help="model id, or ID@VERSION, or ID@ALIAS")
        parser.add_argument(
            "--url",
            type=_parse_url,
            default=DEFAULT_URL,
            help=f"of the server (default: %(default)s); ${CLIENT_KEY_VARIABLE} is sent as API key",
        )
        add_json_option(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        name = quote(arguments.name, safe="/@") if self.takes_name else ""
        url = f"{arguments.url}{self.route.format(name=name)}"
        with show_activity(f"waiting for {url}"):
            entries = ask(self.method, url)
        if arguments.json:
            return print_json(entries)
        return print_text(format_entries(entries))


PS = MemoryCommand("GET", "/models/ps", takes_name=False)
LOAD = MemoryCommand("POST", "/models/{name}/load", takes_name=True)
UNLOAD = MemoryCommand("POST", "/models/{name}/unload", takes_name=True)


def ask(method: str, url: str) -> Any:
    """Send a request and return the JSON.

    Raises ServerError with the server's message, or if the server does not answer with JSON.
    Raises BadSetting for a key that cannot be sent.
    """
    key = client_key()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with _find_opener(url).open(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        hint = ""
        if error.code in (401, 403):
            hint = f"set ${CLIENT_KEY_VARIABLE} to a key with the scope `admin`"
        raise ServerError(_read_message(error), hint=hint) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        hint = "start the server, or pass its `--url`"
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            hint = (
                "pass the `--url` with the name of the certificate; a file of the authorities "
                "that Python trusts can be named by $SSL_CERT_FILE"
            )
        raise ServerError(f"{url} does not answer: {error}", hint=hint) from error


def _find_opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener that uses the proxies of the environment, but never for this host."""
    is_here = is_loopback(urlsplit(url).hostname or "")
    return DIRECT if is_here else urllib.request.build_opener()


def _parse_url(text: str) -> str:
    with suppress(ValueError):  # an invalid port or IPv6 address
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return text.rstrip("/")
    raise argparse.ArgumentTypeError(f"`{text}` is not a URL such as {DEFAULT_URL}")


def format_entries(entries: Sequence[dict[str, Any]]) -> str:
    """Format a table with a row per model and replica."""
    return format_table([HEAD, *map(_columns, entries)])


def _columns(entry: dict[str, Any]) -> tuple[str, ...]:
    notes = ("pinned" if entry["pinned"] else "", f"in use: {entry['in_use']}")
    return (
        entry["model"],
        entry["version"],
        f"{entry['deployment']} {entry['replica'][-8:]}",
        f"{entry['bytes'] / 1e6:.1f}",
        _duration(entry["age_s"]),
        _duration(entry["idle_s"]),
        f"{entry['requests_per_minute']:g}",
        ", ".join(note for note in notes if note and note != "in use: 0"),
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"


def _read_message(error: urllib.error.HTTPError) -> str:
    try:
        message = json.loads(error.read())["error"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"
    return "; ".join(map(str, message)) if isinstance(message, list) else str(message)
