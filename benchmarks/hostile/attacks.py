"""Malformed, oversized and misleading requests with their expected statuses."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from functools import cache

import orjson

from benchmarks.common.wire import CLOSED, build_chunked_post, build_closing_post, build_request
from benchmarks.hostile.generation_attacks import attack_generation
from benchmarks.hostile.requests import REJECTED, HostileRequest

BOMB_BYTES = 200_000_000  # decompressed size; the compressed body has 200 kB


def build_attacks(models: Mapping[str, str]) -> Iterator[HostileRequest]:
    """Yield every attack once. `models` maps each served task to a model id."""
    embedder = models["feature-extraction"]
    yield from attack_names()
    yield from attack_json(f"/models/{embedder}", "inputs")
    yield from attack_json("/v1/embeddings", "input")
    yield from attack_sizes(f"/models/{embedder}")
    yield from attack_compression(f"/models/{embedder}")
    yield from attack_framing(f"/models/{embedder}")
    yield from attack_headers(f"/models/{embedder}")
    for task, model_id in models.items():
        yield from attack_parameters(f"/pipeline/{task}/{model_id}")
    if (generator := models.get("text-generation")) is not None:
        yield from attack_generation(generator)


NAMES = (
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "%2e%2e/%2e%2e/etc/passwd",
    "a/../b",
    "..\\..\\windows",
    "%00",
    "%ff%fe",
    "%0d%0aset-cookie:%20a=b",
    "%25%32%65",
    "{id}",
    "%F0%9F%92%A3",
    "n" * 30_000,
)


def attack_names() -> Iterator[HostileRequest]:
    """Yield requests with model ids that have a meaning for file systems, URL decoders or logs."""
    missing = frozenset({400, 404, 414, 431, CLOSED})
    for name in NAMES:
        shown = name[:30]
        for route in (
            "/models/{}",
            "/status/{}",
            "/models/{}/info",
            "/v1/models/{}",
            "/v2/models/{}",
        ):
            path = route.format(name) if name != "{id}" else route
            yield HostileRequest(f"GET {route} {shown}", build_request("GET", path), missing)
        for route in ("/models/{}", "/pipeline/fill-mask/{}", "/models/{}/v1/embeddings"):
            body = b'{"input":"a"}' if "v1" in route else b'{"inputs":"a"}'
            raw = build_closing_post(route.replace("{}", name), body)
            yield HostileRequest(f"POST {route} {shown}", raw, missing)
        body = orjson.dumps({"model": name, "input": "a"})
        yield HostileRequest(f"model {shown}", build_closing_post("/v1/embeddings", body), missing)


def attack_json(path: str, key: str) -> Iterator[HostileRequest]:
    """Yield requests with invalid or extreme JSON. `key` is the field that holds the texts."""
    name = key.encode()
    rejected = frozenset({400})
    broken: dict[str, bytes] = {
        "no body": b"",
        "white space": b" " * 1000,
        "cut": b'{"%b": "a' % name,
        "trailing bytes": b'{"%b": "a"} {}' % name,
        "byte order mark": b'\xef\xbb\xbf{"%b": "a"}' % name,
        "utf-16": '{"inputs": "a"}'.encode("utf-16"),
        "invalid utf-8": b'{"%b": "\xff\xfe"}' % name,
        "overlong utf-8": b'{"%b": "\xc0\xaf"}' % name,
        "surrogate in utf-8": b'{"%b": "\xed\xa0\x80"}' % name,
        "lone surrogate": b'{"%b": "\\ud800"}' % name,
        "lone surrogate as key": b'{"\\udfff": 1, "%b": "a"}' % name,
        "NaN": b'{"%b": NaN}' % name,
        "Infinity": b'{"%b": "a", "dimensions": Infinity}' % name,
        "1e999": b'{"%b": 1e999}' % name,
        "10**400": b'{"%b": "a", "dimensions": 1%b}' % (name, b"0" * 400),
        "a million digits": b'{"%b": %b}' % (name, b"9" * 1_000_000),
        "deep lists": b'{"%b": %b}' % (name, b"[" * 900 + b"]" * 900),
        "deeper lists": b"[" * 500_000 + b"]" * 500_000,
        "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
        "deep unknown key": b'{"%b": "a", "x": %b}' % (name, b"[" * 900 + b"]" * 900),
        "wide and deep": b'{"%b": [%b1]}' % (name, b"[[[[[[[]]]]]]]," * 100_000),
        "not an object": b"7",
        "texts that are objects": b'{"%b": {"__class__": "a"}}' % name,
        "a list of lists": b'{"%b": [["a"], [["b"]]]}' % name,
        "mixed list": b'{"%b": ["a", 7, null]}' % name,
    }
    for what, body in broken.items():
        yield HostileRequest(f"{path}: {what}", build_closing_post(path, body), rejected)
    valid: dict[str, bytes] = {
        "a key twice": b'{"%b": 7, "%b": "a"}' % (name, name),
        "NUL in a text": b'{"%b": "a\\u0000b"}' % name,
        "controls and marks": '{"%s": "\u202e\u0301\ufeff\U0010ffff"}'.encode() % name,
        "a flag of ten regions": ('{"%s": "' + "\U0001f1e6" * 10 + '"}').encode() % name,
    }
    for what, body in valid.items():
        # 422: the text exceeds the maximum length of some models.
        yield HostileRequest(
            f"{path}: {what}", build_closing_post(path, body), frozenset({200, 422})
        )


def attack_sizes(path: str) -> Iterator[HostileRequest]:
    """Yield requests with oversized bodies, lists, keys and texts."""
    oversized = {
        "100,000 texts": orjson.dumps({"inputs": ["a"] * 100_000}),
        "100,000 empty texts": orjson.dumps({"inputs": [""] * 100_000}),
        "100,000 numbers": orjson.dumps({"inputs": list(range(100_000))}),
        "100,000 keys": orjson.dumps({str(i): i for i in range(100_000)}),
        "a key of a megabyte": orjson.dumps({"inputs": "a", "k" * 1_000_000: 1}),
        "a parameter of a megabyte": b'{"inputs":"a","parameters":{"%b":1}}' % (b"p" * 1_000_000),
        "a prompt of a megabyte": b'{"inputs":"a","parameters":{"prompt_name":"%b"}}'
        % (b"p" * 1_000_000),
        "a text of 1.9 MB, not truncated": orjson.dumps(
            {"inputs": "x" * 1_900_000, "parameters": {"truncate": False}}
        ),
    }
    for what, body in oversized.items():
        yield HostileRequest(what, build_closing_post(path, body), REJECTED)
    truncated = {
        "a text of 1.9 MB": orjson.dumps({"inputs": "x" * 1_900_000}),
        "escapes": b'{"inputs":"%b"}' % (rb"\u0041" * 300_000),
        "a word of a megabyte in a list": orjson.dumps({"inputs": ["a", "w" * 1_000_000]}),
        "180,000 characters": orjson.dumps({"inputs": "a " * 90_000}),
    }
    for what, body in truncated.items():
        yield HostileRequest(what, build_closing_post(path, body), frozenset({200}))
    large = orjson.dumps({"inputs": "x" * 10_000_000})
    yield HostileRequest(
        "a text of 10 MB", build_closing_post(path, large), frozenset({413, CLOSED})
    )
    chunk = b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000)
    yield HostileRequest(
        "10 MB in chunks", build_chunked_post(path, chunk * 100), frozenset({413, CLOSED})
    )


@cache
def compression_bomb(window_bits: int) -> bytes:
    """Return BOMB_BYTES of spaces, compressed: as gzip for 31 `window_bits`, as zlib for 15."""
    packer = zlib.compressobj(9, zlib.DEFLATED, window_bits)
    block = b" " * 1_000_000
    return (
        b"".join(packer.compress(block) for _ in range(BOMB_BYTES // len(block))) + packer.flush()
    )


def attack_compression(path: str) -> Iterator[HostileRequest]:
    """Yield requests with compression bombs, wrong encodings and corrupt streams."""
    body = b'{"inputs": "a"}'
    packed = gzip.compress(body)
    bare = zlib.compressobj(wbits=-15)
    bare_deflate = bare.compress(body) + bare.flush()
    flipped = packed[:-6] + bytes([packed[-6] ^ 0xFF]) + packed[-5:]
    for encoding, raw, *statuses in (
        ("gzip", packed, 200),
        ("x-gzip", packed, 200),
        ("deflate", zlib.compress(body), 200),
        ("deflate", bare_deflate, 200),
        ("identity", body, 200),
        ("gzip", compression_bomb(31), 413),
        ("deflate", compression_bomb(15), 413),
        ("gzip", gzip.compress(compression_bomb(31)), 400),
        ("gzip, gzip", gzip.compress(packed), 415),
        ("br", body, 415),
        ("zstd", body, 415),
        ("x" * 5000, body, 415),
        ("gzip", body, 400),
        ("gzip", b"", 400),
        ("gzip", packed[:-9], 400),
        ("gzip", flipped, 400),
        ("gzip", packed + packed, 400),
        ("gzip", gzip.compress(b"") * 50_000, 400),
        ("deflate", packed, 400),
        ("identity", packed, 400),
    ):
        name = f"content-encoding {encoding[:20]}, {len(raw)} bytes"
        raw_request = build_closing_post(path, raw, f"Content-Encoding: {encoding}")
        yield HostileRequest(name, raw_request, frozenset(statuses))


def attack_framing(path: str) -> Iterator[HostileRequest]:
    """Yield requests with wrong lengths, malformed chunks and incomplete bodies."""
    body = b'{"inputs": "a"}'
    malformed = frozenset({400, CLOSED})
    for length in ("3", "-1", "abc", "1e3", "0x10", "9" * 30, "9" * 5000):
        status = malformed | {413, 501}
        yield HostileRequest(
            f"length {length[:10]}", build_request("POST", path, body, length=length), status
        )
    twice = build_request("POST", path, body, ["Content-Length: 3"])
    yield HostileRequest("two lengths", twice, malformed)
    both = build_request("POST", path, body, ["Transfer-Encoding: chunked"])
    yield HostileRequest("length and chunks", both, malformed)
    for name, chunks in {
        "no chunk size": b"\r\n\r\n",
        "a chunk size without digits": b"zz\r\nab\r\n0\r\n\r\n",
        "a negative chunk size": b"-5\r\nab\r\n0\r\n\r\n",
        "a chunk longer than it says": b"1\r\nabcdef\r\n0\r\n\r\n",
    }.items():
        yield HostileRequest(name, build_chunked_post(path, chunks, end=b""), malformed)
    timed_out = frozenset({408, CLOSED})
    incomplete = build_request("POST", path, body, length="5000")
    yield HostileRequest("less than the length", incomplete, timed_out, stalls=True)
    nothing = build_request("POST", path, length="50")
    yield HostileRequest("no body", nothing, timed_out, stalls=True)
    unfinished = build_chunked_post(path, b"5\r\n", end=b"")
    yield HostileRequest("no chunk data", unfinished, timed_out, stalls=True)
    packed = build_closing_post(path, gzip.compress(body)[:-4], "Content-Encoding: gzip")
    stalled = packed.replace(b"Content-Length: ", b"Content-Length: 9")
    yield HostileRequest("compressed, incomplete", stalled, timed_out, stalls=True)


def attack_headers(path: str) -> Iterator[HostileRequest]:
    """Yield requests with invalid, many or long headers, or unknown methods."""
    body = b'{"inputs": "a"}'
    for header in ("x-use-cache: maybe", "x-hardware: tpu", "x-wait-for-model: \xff"):
        yield HostileRequest(header, build_closing_post(path, body, header), frozenset({400}))
    for header in (
        "Content-Type: text/xml",
        "Accept: image/png",
        "User-Agent: hf_hub/9" + "9" * 99,
    ):
        yield HostileRequest(header[:30], build_closing_post(path, body, header), frozenset({200}))
    answered = frozenset({200, 400, 431, CLOSED})
    yield HostileRequest(
        "5,000 headers",
        build_closing_post(path, body, *(f"x-{i}: a" for i in range(5_000))),
        answered,
    )
    yield HostileRequest(
        "a header of 200 kB", build_closing_post(path, body, "x-a: " + "a" * 200_000), answered
    )
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get", "A" * 1000):
        rejected = frozenset({400, 405, CLOSED})
        # Not `path`, because DELETE on `path` would remove the model.
        raw = build_request(method, "/v1/embeddings")
        yield HostileRequest(f"method {method[:10]}", raw, rejected)


PARAMETERS: tuple[dict[str, object], ...] = (
    {"top_k": 2**63 - 1},
    {"top_k": -1},
    {"top_k": 1.5},
    {"dimensions": 2**64 - 1},
    {"stride": 2**62, "aggregation_strategy": "first"},
    {"doc_stride": 2**62},
    {"max_seq_len": 1},
    {"max_seq_len": 2**62, "max_answer_len": 2**62, "max_question_len": 2**62},
    {"targets": ["x" * 100_000]},
    {"targets": ["x"] * 100_000},
    {"candidate_labels": ",".join(map(str, range(100_000)))},
    {"candidate_labels": ["a"], "hypothesis_template": "{0.__class__.__mro__}"},
    {"candidate_labels": ["a"], "hypothesis_template": "{:>1000000000}"},
    {"candidate_labels": ["a"], "hypothesis_template": "{" * 900},
    {"candidate_labels": ["a"] * 1_000, "hypothesis_template": "{}" * 400},
    {"function_to_apply": "__import__"},
    {"prompt_name": "../../etc/passwd"},
    {"truncation_direction": "UP", "truncate": True},
    {"__class__": 1},
)


def attack_parameters(path: str) -> Iterator[HostileRequest]:
    """Yield requests with extreme parameters, including parameters that the task does not have."""
    inputs = (
        "a [MASK] b " * 300,
        ["a [MASK] b"] * 1_000,
        {"question": "a?" * 20_000, "context": "b " * 50_000},
        {"question": ["a"] * 500, "context": ["b"] * 500},
        {"source_sentence": "a", "sentences": ["b"] * 5_000},
        {"query": "a " * 5_000, "texts": ["b " * 100] * 1_000},
        {"text": "a", "text_pair": "b " * 50_000},
    )
    bodies = [{"inputs": "a [MASK] b", "parameters": parameters} for parameters in PARAMETERS]
    bodies += [{"inputs": shape, "parameters": {"truncate": True}} for shape in inputs]
    answered = frozenset({200, *REJECTED})
    for shown, body in zip((*PARAMETERS, *inputs), bodies, strict=True):
        raw = build_closing_post(path, orjson.dumps(body))
        # These requests set no token limit, so a model may generate until its context is full.
        leaves = "/text-generation/" in path
        yield HostileRequest(f"{path} {str(shown)[:40]}", raw, answered, leaves=leaves)
