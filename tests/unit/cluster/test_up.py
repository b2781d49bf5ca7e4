"""Addresses and messages of `hundredfold serve`, without a cluster."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from cluster.processes import find_free_port, is_port_free, open_listener
from cluster.progress import StartError
from cluster.serve_config import IMPORT_PATH
from cluster.up import build_startup_message, choose_ports, client_url, move_behind_edge


def has_ipv6() -> bool:
    try:
        return is_port_free("::1", 0)
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


def config(**args: Any) -> dict[str, Any]:
    other = {"import_path": "shop:app", "args": {"models": [{"id": "shop/model"}]}}
    return {"applications": [other, {"import_path": IMPORT_PATH, "args": args}]}


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUNDREDFOLD_KEYS", raising=False)


def test_startup_message_has_a_request_to_the_first_model() -> None:
    message = build_startup_message("http://here", config(models=[{"id": "org/one"}]))
    assert message.startswith("serving on http://here - try: curl http://here/models/org/one -d ")


@pytest.mark.parametrize("args", [{}, {"models": []}, {"models": None}])
def test_startup_message_without_models_lists_those_of_the_store(args: dict[str, Any]) -> None:
    message = build_startup_message("http://here", config(**args))
    assert message == "serving on http://here - try: curl http://here/models"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::1", "http://[fd00::1]:80"),
        ("example.org", "http://example.org:80"),
    ],
)
def test_clients_get_a_url_of_this_host(host: str, url: str) -> None:
    assert client_url(host, 80) == url


def test_replicas_behind_the_edge_listen_on_loopback() -> None:
    served = {**config(), "http_options": {"host": "::", "port": 8000}}
    behind = move_behind_edge(served)
    assert behind == {**served, "http_options": {"host": "127.0.0.1", "port": 8000}}
    assert served["http_options"]["host"] == "::"


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6_address_is_served(host: str) -> None:
    port = find_free_port(8000)
    assert choose_ports(host, port, None).metrics != port
    with open_listener(host, port):
        with pytest.raises(StartError, match=f"port {port} on {host} is in use by pid "):
            choose_ports(host, port, None)
        for address in ("::1", "127.0.0.1") if host == "::" else ("::1",):
            socket.create_connection((address, port), 5).close()


@pytest.mark.parametrize(
    ("host", "port", "metrics", "message"),
    [
        ("203.0.113.1", 8000, None, "cannot listen on 203.0.113.1:8000: "),
        ("fd00::203:113", 8000, None, r"cannot listen on \[fd00::203:113\]:8000: "),
        ("127.0.0.1", 70000, None, "70000 is not a port"),
        ("127.0.0.1", None, 70000, "70000 is not a port"),
        ("127.0.0.1", 8123, 8123, "`--metrics-port 8123` is the port for clients"),
    ],
)
def test_port_that_cannot_be_used_is_rejected(
    host: str, port: int | None, metrics: int | None, message: str
) -> None:
    with pytest.raises(StartError, match=message):
        choose_ports(host, port or find_free_port(8000), metrics)
