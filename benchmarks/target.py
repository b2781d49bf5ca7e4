"""Where a cluster listens, and the bytes of a request to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from benchmarks.errors import BenchmarkError

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Target:
    """A plain HTTP address; `prefix` is the path before every route, without a slash at its end."""

    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Target:
        """The target of a URL such as `http://127.0.0.1:8000`. Raises BenchmarkError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise _bad_url(url) from exc
        if parts.scheme != "http" or not parts.hostname:
            raise _bad_url(url)
        return cls(parts.hostname, port or 80, parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        """What a person would type."""
        return f"http://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def post_bytes(self, path: str, body: bytes) -> bytes:
        """A whole HTTP/1.1 request, ready to be written to a connection that stays open."""
        head = (
            f"POST {self.prefix}{path} HTTP/1.1\r\n"
            f"Host: {self.authority}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + body


def task_path(task: str, model_id: str) -> str:
    """The route that runs `task` on a model."""
    return f"/pipeline/{task}/{quote(model_id)}"


def model_path(model_id: str) -> str:
    """The route that describes a model."""
    return f"/models/{quote(model_id)}"


def inference_body(inputs: Any, *, use_gpu: bool = False, use_cache: bool = False) -> bytes:
    """A task request; no cache may answer it unless `use_cache` says so."""
    options = {"use_cache": use_cache} | ({"use_gpu": True} if use_gpu else {})
    return orjson.dumps({"inputs": inputs, "options": options})


def _bad_url(url: str) -> BenchmarkError:
    return BenchmarkError(
        f"`{url}` is not an address to measure", hint=f"write it like `{DEFAULT_URL}`"
    )
