"""Server addresses, request bodies, and a blocking client for requests outside of measurements."""

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
    """Address of a plain HTTP server. `prefix` precedes every route and has no trailing slash."""

    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse an http URL such as `http://127.0.0.1:8000`.

        Raises BenchmarkError for another scheme, a missing host or an invalid port.
        """
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
        return f"http://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def build_post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """Build a POST request with a JSON body for a keep-alive connection."""
        head = (
            f"POST {self.prefix}{path} HTTP/1.1\r\n"
            f"Host: {self.authority}\r\n"
            "Content-Type: application/json\r\n"
            + "".join(f"{name}: {text}\r\n" for name, text in (headers or {}).items())
            + f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + body


def task_path(task: str, model_id: str) -> str:
    return f"/pipeline/{task}/{quote(model_id)}"


def model_path(model_id: str) -> str:
    return f"/models/{quote(model_id)}"


def build_inference_body(inputs: Any, *, use_gpu: bool = False, use_cache: bool = False) -> bytes:
    """Build the body of a task request. The request bypasses the response cache by default."""
    options = {"use_cache": use_cache} | ({"use_gpu": True} if use_gpu else {})
    return orjson.dumps({"inputs": inputs, "options": options})


def _bad_url(url: str) -> BenchmarkError:
    return BenchmarkError(
        f"`{url}` is not an http URL with a host", hint=f"write it like `{DEFAULT_URL}`"
    )


TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """Parsed JSON body and headers of a response with status 200. Header names are lower case."""

    value: Any
    headers: Mapping[str, str]

    @property
    def compute_type(self) -> str | None:
        """Device and precision, such as `cpu-int8`; None without the header."""
        return self.headers.get("x-compute-type")


class Client:
    """Client with one keep-alive connection.

    Each request raises BenchmarkError if there is no response, if the status is not 200, or if the
    body is not JSON.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)

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
        """Return the body of `GET /models/{id}`."""
        value = self._request("GET", model_path(model_id), None).value
        if not isinstance(value, dict):
            raise self._unexpected(model_path(model_id), "a body that is no JSON object")
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
        """Send one task request. The request bypasses the response cache by default."""
        body = build_inference_body(inputs, use_gpu=use_gpu, use_cache=use_cache)
        return self.post(task_path(task, model_id), body)

    def post(self, path: str, body: bytes) -> HttpResponse:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: bytes | None) -> HttpResponse:
        try:
            self._connection.request(
                method, self._address.prefix + path, body, {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as exc:
            raise BenchmarkError(
                f"no response from {self._address.url}: {exc!r}",
                hint="start the server with `make serve`",
            ) from exc
        if response.status != 200:
            reason = raw[:300].decode(errors="replace")
            raise self._unexpected(path, f"{response.status}: {reason}")
        headers = {name.lower(): value for name, value in response.getheaders()}
        try:
            return HttpResponse(orjson.loads(raw), headers)
        except orjson.JSONDecodeError as exc:
            raise self._unexpected(path, f"a body that is no JSON: {exc}") from exc

    def _unexpected(self, path: str, response: str) -> BenchmarkError:
        return BenchmarkError(
            f"`{path}` returned {response}",
            hint=f"list the served models with `curl {self._address.url}/models`",
        )
