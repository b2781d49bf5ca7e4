"""A fake of the parts of torch.cuda that captures use: streams and graphs of one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

POOL_STREAMS = 32  # as in torch


class FakeStream:
    """A fake of a CUDA stream. Streams at one address are the same stream, as in torch."""

    device_index = 0

    def __init__(self, address: int) -> None:
        self.cuda_stream = address

    def wait_stream(self, _other: object) -> None:
        """Do nothing: the fake computes at once."""


class FakeGraph:
    """A fake of a CUDA graph. Only a graph whose capture has ended has a pool."""

    def __init__(self) -> None:
        self.has_ended = False
        self.used_pool: object = None
        self._own_pool = object()

    def pool(self) -> object:
        if not self.has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._own_pool if self.used_pool is None else self.used_pool


@dataclass
class FakeCaptures:
    """Streams and captures of one fake device."""

    current: FakeStream = field(default_factory=lambda: FakeStream(0))
    end_error: str = ""  # message of the error at the end of each capture, if any
    streams: list[FakeStream] = field(default_factory=list)  # stream of each capture
    graphs: list[FakeGraph] = field(default_factory=list)  # graph of each capture
    drawn: int = 0

    def draw(self) -> FakeStream:
        """Return the next stream of torch's pool, which is a ring."""
        self.drawn += 1
        return FakeStream(1 + (self.drawn - 1) % POOL_STREAMS)

    def set_current(self, stream: FakeStream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        previous, self.current = self.current, stream
        yield
        self.current = previous

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: object, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """Record a capture. As in torch, its stream stays current if its end fails."""
        assert capture_error_mode == "thread_local"
        graph.used_pool = pool
        self.streams.append(stream)
        self.graphs.append(graph)
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            if self.end_error:
                raise RuntimeError(self.end_error)
            graph.has_ended = True
            self.current = previous


def fake_captures(monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    """Replace streams and captures of torch.cuda. Return the fake."""
    import torch

    fake = FakeCaptures()
    replacements: dict[str, Any] = {
        "Stream": fake.draw,
        "current_stream": lambda: fake.current,
        "set_stream": fake.set_current,
        "stream": fake.stream,
        "CUDAGraph": FakeGraph,
        "graph": fake.graph,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return fake
