"""The browser of `hundredfold bench page` reaches the server of its URL, and no other host."""

from __future__ import annotations

import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import Error

from benchmarks.common.http import ServerAddress
from benchmarks.page.browser import open_browser


class _HelloHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


class _Ipv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


@pytest.mark.usefixtures("installed_browser")
@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_server_that_listens_on_ipv6_only_is_reached(host: str) -> None:
    try:
        server = _Ipv6Server(("::1", 0), _HelloHandler)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{host}:{server.server_port}"
        with open_browser(ServerAddress.parse(url).host) as browser:
            page = browser.new_page()
            page.goto(url)
            assert page.inner_text("body") == "hello"
            with pytest.raises(Error, match="ERR_NAME_NOT_RESOLVED"):
                page.goto("http://example.org")
        server.shutdown()
