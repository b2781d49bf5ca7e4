"""`hundredfold models ps|load|unload` against a server."""

from __future__ import annotations

import json
import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from hundredfold.__main__ import main
from tests.support.certificates import create_certificate
from tests.support.fakes import FakeTerminal

ENTRY = {
    "model": "acme/tiny",
    "version": "000000000001",
    "deployment": "CpuEncoder",
    "replica": "abcdefgh12345678",
    "bytes": 23_700_000,
    "pinned": True,
    "in_use": 2,
    "age_s": 7_200.0,
    "idle_s": 1.5,
    "requests_per_minute": 12.5,
}


class ModelListServer(HTTPServer):
    """Server that answers every request with `status` and `body`. `asked` records the requests."""

    status, body = 200, json.dumps([ENTRY]).encode()

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ModelListHandler)
        self.asked: list[tuple[str, str, str | None]] = []


class ModelListHandler(BaseHTTPRequestHandler):
    server: ModelListServer

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers["authorization"]))
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""


@pytest.fixture
def server() -> Iterator[ModelListServer]:
    with ModelListServer() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def run(server: ModelListServer, *words: str) -> int:
    return main(["models", *words, "--url", f"http://127.0.0.1:{server.server_port}/"])


def test_ps_is_a_table(server: ModelListServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "ps") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["model", "version", "replica", "MB"]
    assert row.split("  ")[0] == "acme/tiny"
    assert "CpuEncoder 12345678" in row
    assert row.endswith("23.7  2.0 h  2 s       12.5        pinned, in use: 2")


def test_commands_send_the_key_and_the_name(
    server: ModelListServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HUNDREDFOLD_KEY", "secret")
    assert run(server, "load", "acme/tiny@stable", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [ENTRY]
    assert run(server, "unload", "acme/tiny?x") == 0
    assert server.asked == [
        ("POST", "/models/acme/tiny@stable/load", "Bearer secret"),
        ("POST", "/models/acme/tiny%3Fx/unload", "Bearer secret"),
    ]


@pytest.mark.parametrize("secret", ["hk-aaaa-secret\r\n", " hk-aaaa-secret\n", "hk-aaaa-secret\r"])
def test_key_is_sent_without_the_end_of_its_line(
    server: ModelListServer, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("HUNDREDFOLD_KEY", secret)
    assert run(server, "ps") == 0
    assert server.asked == [("GET", "/models/ps", "Bearer hk-aaaa-secret")]


@pytest.mark.parametrize("secret", ["hk-aaaa\nsecret", "hk-aaaa\x7fsecret", "hk-aaaa-“secret”"])
def test_key_that_cannot_be_sent_is_not_printed(
    server: ModelListServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    secret: str,
) -> None:
    monkeypatch.setenv("HUNDREDFOLD_KEY", secret)
    assert run(server, "ps") == 1
    error = capsys.readouterr().err
    assert "$HUNDREDFOLD_KEY has characters" in error
    assert "secret" not in error
    assert server.asked == []


@pytest.mark.parametrize(
    ("url", "path"),
    [(None, "/models/ps"), ("http://models.example.org", "http://models.example.org/models/ps")],
)
def test_proxy_is_asked_for_other_hosts_only(
    server: ModelListServer, monkeypatch: pytest.MonkeyPatch, url: str | None, path: str
) -> None:
    own = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9" if url is None else own)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["models", "ps", "--url", url or own]) == 0
    assert [asked for _, asked, _ in server.asked] == [path]


@pytest.mark.parametrize(
    "url", ["myhost", "localhost:8000", "ftp://myhost", "http://", "http://[::1", "http://a:b"]
)
def test_text_that_is_no_url_is_refused_with_an_example(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as wrong:
        main(["models", "load", "acme/tiny", "--url", url])
    assert wrong.value.code == 2
    message = f"argument --url: `{url}` is not a URL such as http://127.0.0.1:8000"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (409, b'{"error": "requests use it"}', "requests use it"),
        (400, b'{"error": ["it is pinned"]}', "it is pinned"),
        (403, b'{"error": "lacks the scope"}', "with the scope `admin`"),
        (500, b"<html>", "the server answered 500"),
    ],
)
def test_refusals_are_repeated(
    server: ModelListServer,
    status: int,
    body: bytes,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.status, server.body = status, body
    assert run(server, "unload", "acme/tiny") == 1
    assert message in capsys.readouterr().err


def test_missing_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "ps", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_certificate_of_another_name_is_explained(
    server: ModelListServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*create_certificate(tmp_path / "certificate"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    assert main(["models", "ps", "--url", f"https://127.0.0.1:{server.server_port}"]) == 1
    assert "$SSL_CERT_FILE" in capsys.readouterr().err


def test_terminal_shows_that_a_load_is_waited_for(
    server: ModelListServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := FakeTerminal())
    assert run(server, "load", "acme/tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [ENTRY]
    assert "waiting for" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K"), "the line is erased"
