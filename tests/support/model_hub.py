"""A model hub on a free port of this host, with the routes that huggingface_hub calls.

https://huggingface.co/docs/hub/api describes the list of files.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


class ModelHub(ThreadingHTTPServer):
    """A hub with the models in `root`: `root/owner/name/...`."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _HubRequest)
        self.root = root

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve_hub(root: Path) -> Iterator[ModelHub]:
    with ModelHub(root) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _HubRequest(BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), is_tree=parts[4:5] == ["tree"])
        else:  # owner/name/resolve/commit/file
            self._send_file(self.server.root.joinpath(*parts[:2], *parts[4:]))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Keep the output of the tests short."""

    def _describe(self, model_id: str, *, is_tree: bool) -> None:
        directory = self.server.root / model_id
        if not directory.is_dir():
            return self._send(404, b"{}", {"x-error-code": "RepoNotFound"})
        content: object
        files = {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        if is_tree:
            content = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            content = {"id": model_id, "sha": COMMIT, "siblings": siblings, "tags": []}
        return self._send(200, json.dumps(content).encode(), {"content-type": "application/json"})

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            return self._send(404, b"", {"x-error-code": "EntryNotFound"})
        content = path.read_bytes()
        headers = {"etag": f'"{_digest(content)}"', "x-repo-commit": COMMIT}
        return self._send(200, content, headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
