"""The parts of the GPU benchmark. The most useful parts for a first look at a GPU come first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.gpu import decoders, device, encoders, server, suite
from benchmarks.gpu.cases import Case, Target


@dataclass(frozen=True, slots=True)
class GpuPart:
    """Cases that run in worker processes, by default for up to MAX_PART_SECONDS in total."""

    title: str
    cases: Callable[[Target], list[Case]]


# Default limit of a part in s. Shared machines often end a command after ten minutes.
MAX_PART_SECONDS = 480.0
PARTS: Mapping[str, GpuPart] = {
    "device": GpuPart("the card: matrix rate, bandwidth", device.device_cases),
    "encoder-parity": GpuPart(
        "GPU candidates of every task against fp32 torch", encoders.parity_cases
    ),
    "decoder-parity": GpuPart(
        "GPU candidates of decoders against fp32 torch", decoders.parity_cases
    ),
    "suite": GpuPart("the GPU tests of the suite", suite.suite_cases),
    "server": GpuPart("answers of a server with GPU replicas", server.server_cases),
    "encoder-latency": GpuPart(
        "latency of 1 to 64 items of 32 to 512 tokens, MiniLM's shape", encoders.latency_cases
    ),
    "bert-large": GpuPart("BERT-large's shape at 384 tokens", encoders.large_cases),
    "streams": GpuPart("token streams beside transformers", decoders.stream_cases),
    "memory": GpuPart("memory of decoders and the cost of captures", decoders.memory_cases),
}
