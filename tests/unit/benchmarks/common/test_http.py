from __future__ import annotations

import orjson
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress, build_inference_body, model_path, task_path


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", ServerAddress("127.0.0.1", 8000)),
        ("http://box/", ServerAddress("box", 80)),
        ("http://box:81/hundredfold/", ServerAddress("box", 81, "/hundredfold")),
        ("http://[::1]:8000", ServerAddress("::1", 8000)),
    ],
)
def test_parse_url(url: str, target: ServerAddress) -> None:
    assert ServerAddress.parse(url) == target
    assert ServerAddress.parse(target.url) == target


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://box", "http://", "http://box:port"])
def test_parse_rejects_other_urls(url: str) -> None:
    with pytest.raises(BenchmarkError, match="not an http URL"):
        ServerAddress.parse(url)


def test_build_post_returns_a_complete_request() -> None:
    request = ServerAddress("box", 81, "/hundredfold").build_post("/models/a/b", "ü".encode())
    assert request == (
        b"POST /hundredfold/models/a/b HTTP/1.1\r\n"
        b"Host: box:81\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: 2\r\n\r\n\xc3\xbc"
    )


def test_build_inference_body_bypasses_the_cache() -> None:
    assert orjson.loads(build_inference_body("hi")) == {
        "inputs": "hi",
        "options": {"use_cache": False},
    }
    assert orjson.loads(build_inference_body(["hi"], use_gpu=True)) == {
        "inputs": ["hi"],
        "options": {"use_cache": False, "use_gpu": True},
    }


def test_paths_keep_the_slash_of_an_id() -> None:
    assert task_path("feature-extraction", "org/a b") == "/pipeline/feature-extraction/org/a%20b"
    assert model_path("org/name") == "/models/org/name"
