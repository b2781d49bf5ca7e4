"""A plain blocking client for everything around the measured requests."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import orjson

from benchmarks.common.errors import BenchmarkError

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A plain HTTP address; `prefix` is the path before every route, without a slash at its end."""

    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
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


TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One good answer. `headers` have lower-case names."""

    value: Any
    headers: Mapping[str, str]

    @property
    def compute_type(self) -> str | None:
        """What ran, such as `cpu-int8`, where the server says so."""
        return self.headers.get("x-compute-type")


class Client:
    """One keep-alive connection. Every answer but 200 raises BenchmarkError."""

    def __init__(self, target: ServerAddress) -> None:
        self._target = target
        self._connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def describe_model(self, model_id: str) -> dict[str, Any]:
        """What `GET /models/{id}` says."""
        value = self._ask("GET", model_path(model_id), None).value
        if not isinstance(value, dict):
            raise self._unexpected(model_path(model_id), "with no JSON object")
        return value

    def infer(
        self,
        task: str,
        model_id: str,
        inputs: Any,
        *,
        use_gpu: bool = False,
        use_cache: bool = False,
    ) -> HttpResponse:
        """One task request, past the response cache unless `use_cache` says otherwise."""
        body = inference_body(inputs, use_gpu=use_gpu, use_cache=use_cache)
        return self._ask("POST", task_path(task, model_id), body)

    def _ask(self, method: str, path: str, body: bytes | None) -> HttpResponse:
        try:
            self._connection.request(
                method, self._target.prefix + path, body, {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as exc:
            raise BenchmarkError(
                f"no answer from {self._target.url}: {exc!r}", hint="start it with `make serve`"
            ) from exc
        if response.status != 200:
            reason = raw[:300].decode(errors="replace")
            raise self._unexpected(path, f"{response.status}: {reason}")
        headers = {name.lower(): value for name, value in response.getheaders()}
        try:
            return HttpResponse(orjson.loads(raw), headers)
        except orjson.JSONDecodeError as exc:
            raise self._unexpected(path, f"with no JSON: {exc}") from exc

    def _unexpected(self, path: str, answer: str) -> BenchmarkError:
        return BenchmarkError(
            f"`{path}` answered {answer}",
            hint=f"see what is served with `curl {self._target.url}/models`",
        )
