from __future__ import annotations

import socket
import threading

import pytest

from cluster.probes import check_ready
from tests.support.waiting import TIMEOUT_S


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        (b'{"missing": ["Ingress", "Tokenizer"]}', "starting: Ingress, Tokenizer"),
        (b"no JSON", "starting: the ingress"),
        (b"", "starting: the ingress"),  # the server ended before it sent the body
    ],
)
def test_reasons_of_a_server_that_is_not_ready_are_reported(
    body: bytes, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.probes.PROBE_TIMEOUT_S", TIMEOUT_S)
    head = f"HTTP/1.1 503 Unavailable\r\ncontent-length: {len(body) or 9}\r\n\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(head + body)

        server = threading.Thread(target=answer)
        server.start()
        assert check_ready(f"http://127.0.0.1:{listener.getsockname()[1]}")() == missing
        server.join()
