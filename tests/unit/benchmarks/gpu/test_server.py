from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.gpu import server

ADDRESS = ServerAddress("127.0.0.1", 1)


class FakeClient:
    """A client whose server returns the path. `gpu` is the compute type of GPU requests."""

    gpu = "gpu-fp16"
    calls: ClassVar[list[str]] = []

    def __init__(self, _address: ServerAddress) -> None:
        pass

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def post(self, path: str, body: bytes) -> Any:
        is_gpu = b'"require_gpu":true' in body
        self.calls.append("gpu" if is_gpu else "cpu")
        return SimpleNamespace(value=path, compute_type=self.gpu if is_gpu else "cpu-int8")


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_draw_texts", lambda _seed: ["one", "two"])


def test_each_text_is_asked_alone_batched_and_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "Client", FakeClient)
    monkeypatch.setattr(FakeClient, "calls", [])
    rounds = server._ask(ADDRESS, server._EMBED, ["one", "two"])
    assert rounds == [["/models/gpu/encoder"] * 2] * 3
    # One request waits for a GPU replica. Then each text is sent to the GPU twice, to the CPU once.
    assert FakeClient.calls == ["gpu"] * 5 + ["cpu"] * 2


def test_answer_of_other_hardware_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Client", FakeClient)
    monkeypatch.setattr(FakeClient, "gpu", "cpu-int8")
    monkeypatch.setattr(server, "_START_S", 0.0)
    with pytest.raises(BenchmarkError, match="`cpu-int8` answered a request for the gpu"):
        server._ask(ADDRESS, server._EMBED, ["one"])


@pytest.mark.parametrize(
    ("batched", "reasons"),
    [
        ([[[1.0, 0.0]], [[0.0, 1.0]]], []),
        ([[[1.0, 0.0]], [[0.5, 1.0]]], ["an embedding changes in a batch: cosine 0.8944"]),
    ],
)
def test_embedding_that_depends_on_the_batch_is_rejected(
    batched: list[Any], reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [[[1.0, 0.0]], [[0.0, 1.0]]]

    def ask(_address: object, call: object, _texts: object) -> list[list[Any]]:
        return [alone, batched, alone] if call is server._EMBED else [["a", "b"]] * 3

    monkeypatch.setattr(server, "_ask", ask)
    assert server.compare_answers(ADDRESS, 0)["reasons"] == reasons


def test_texts_that_depend_on_the_batch_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_address: object, call: object, _texts: object) -> list[list[Any]]:
        vectors = [[[1.0, 0.0]], [[0.0, 1.0]]]
        if call is server._EMBED:
            return [vectors] * 3
        return [["a", "b"], ["a", "other"], ["a", "b"]]

    monkeypatch.setattr(server, "_ask", ask)
    values = server.compare_answers(ADDRESS, 0)
    assert values["reasons"] == ["only 50% of the answers stay the same in a batch"]
    assert values["same_answers_on_cpu"] == 1.0
